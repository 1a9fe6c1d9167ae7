"""A norm as arguments of an op, and back."""

from __future__ import annotations

from typing import Any

from offload.kernels.norm import Norm


def norm_schema(name: str) -> str:
    return (
        f"str? {name}=None, Tensor? {name}_weight=None, Tensor? {name}_bias=None, "
        f"float {name}_eps=1e-05, float {name}_weight_offset=0.0"
    )


def norm_fields(name: str, norm: Norm | None) -> dict[str, Any]:
    if norm is None:
        return {}
    return {
        name: norm.kind,
        f"{name}_weight": norm.weight,
        f"{name}_bias": norm.bias,
        f"{name}_eps": norm.eps,
        f"{name}_weight_offset": norm.weight_offset,
    }


def norm_of(name: str, fields: dict[str, Any]) -> Norm | None:
    """Takes the fields of norm `name` out of an op's arguments."""
    kind = fields.pop(name, None)
    rest = {
        field: fields.pop(f"{name}_{field}")
        for field in ("weight", "bias", "eps", "weight_offset")
        if f"{name}_{field}" in fields
    }
    if kind is not None:
        return Norm(kind, rest.pop("weight", None), **rest)
    if rest.get("weight") is not None or rest.get("bias") is not None:
        raise ValueError(f"{name}_weight or {name}_bias is given without {name}")
    return None
