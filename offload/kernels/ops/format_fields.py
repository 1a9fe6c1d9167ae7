"""A stored weight as arguments of an op, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.kernels.weight_format import SHAPE, WeightFormat

STORED = (
    "Tensor[] stored, str kind, str layout, SymInt[] block, bool zero_points, bool act_order, "
    "SymInt[] shape"
)


def format_of(
    stored: list[torch.Tensor],
    kind: Any,
    layout: Any,
    block: list[int],
    zero_points: bool,
    act_order: bool,
    shape: list[int],
) -> tuple[WeightFormat, dict[str, torch.Tensor]]:
    """The format, and its tensors by the ends of their names."""
    form = WeightFormat(kind, layout, (block[0], block[1]), zero_points, act_order)
    names = [name for name in form.stored(tuple(shape)) if name != SHAPE]
    if len(stored) != len(names):
        raise ValueError(
            f"a weight in {form.name} is made of {', '.join(names)}, not of {len(stored)} tensors"
        )
    found = dict(zip(names, stored, strict=True))
    if SHAPE in form.stored(tuple(shape)):
        found[SHAPE] = torch.tensor(shape)
    return form, found


def format_fields(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[Any, ...]:
    """The reverse: arguments of an op."""
    names = [name for name in form.stored(shape) if name != SHAPE]
    missing = [name for name in names if name not in stored]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    tensors = [stored[name] for name in names]
    return (
        tensors, form.kind, form.layout, form.block, form.zero_points, form.act_order, shape
    )  # fmt: skip
