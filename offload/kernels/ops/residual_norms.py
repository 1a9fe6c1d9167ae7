"""torch.ops.offload.residual_norm."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels.norm import Norm
from offload.kernels.ops.norm_fields import norm_fields, norm_of, norm_schema
from offload.kernels.ops.registration import define, launch
from offload.kernels.residual_norm import ResidualNorm


def _first(*tensors: torch.Tensor | None) -> torch.Tensor:
    given = next((x for x in tensors if x is not None), None)
    if given is None:
        raise ValueError("residual_norm: give at least one of residual, branch and branch2")
    return given


def _residual_norm_outputs(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    *,
    norm: str | None = None,
    norm2: str | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    like = _first(residual, branch, branch2)

    def output(wanted: bool) -> torch.Tensor:
        return like.new_empty(like.shape if wanted else (0,))

    return output(True), output(norm is not None), output(norm2 is not None)


def _residual_norm(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = _residual_norm_outputs(branch, residual, branch2, **options)
    branch_norm, norm, norm2 = (norm_of(n, options) for n in ("branch_norm", "norm", "norm2"))
    total, out, out2 = outputs
    call = ResidualNorm(
        branch=branch,
        residual=residual,
        branch2=branch2,
        sum_out=total,
        out=None if norm is None else out,
        out2=None if norm2 is None else out2,
        branch_norm=branch_norm,
        norm=norm,
        norm2=norm2,
        **options,
    )
    launch(call, total.device)
    return outputs


define(
    "residual_norm(Tensor? branch=None, Tensor? residual=None, Tensor? branch2=None, *, "
    "Tensor? bias=None, Tensor? bias2=None, "
    + ", ".join(map(norm_schema, ("branch_norm", "norm", "norm2")))
    + ") -> (Tensor, Tensor, Tensor)",
    _residual_norm,
    _residual_norm_outputs,
)


def residual_norm(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    branch_norm: Norm | None = None,
    norm: Norm | None = None,
    norm2: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sum = residual + branch_norm(branch + bias) + (branch2 + bias2), norm(sum), norm2(sum).

    What is not asked for is an empty tensor. See `ResidualNorm` for shapes, dtypes and errors.
    """
    _first(residual, branch, branch2)  # without a tensor there is no device to dispatch to
    return torch.ops.offload.residual_norm(
        branch,
        residual,
        branch2,
        bias=bias,
        bias2=bias2,
        **norm_fields("branch_norm", branch_norm),
        **norm_fields("norm", norm),
        **norm_fields("norm2", norm2),
    )
