"""torch.ops.offload.int8_linear."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels.activation import Kind
from offload.kernels.call import on_device
from offload.kernels.int8_linear import Int8Linear
from offload.kernels.ops.registration import define, launch
from offload.kernels.ops.scratch import workspace
from offload.kernels.weight_format import WeightFormat


def _int8_linear_output(
    input: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    gated: bool = False,
    **_: Any,
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], codes.shape[0] // (2 if gated else 1))


def _int8_linear(
    input: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, **options: Any
) -> torch.Tensor:
    out = _int8_linear_output(input, codes, scale, **options)
    form = WeightFormat("int8", "plain", (0 if scale.numel() == 1 else 1, 0), inputs="int8")
    stored = {"weight": codes, form.scale_name: scale}
    with on_device(input.device):
        call = Int8Linear(input, form, stored, out, workspace=workspace(input.device), **options)
        launch(call, input.device)
    return out


define(
    "int8_linear(Tensor input, Tensor codes, Tensor scale, *, Tensor? bias=None, "
    "Tensor? residual=None, str? activation=None, bool gated=False) -> Tensor",
    _int8_linear,
    _int8_linear_output,
)


def int8_linear(
    input: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Kind | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(x @ (codes * scale).T + bias) + residual, where x is the input rounded to int8 with a
    scale a row. codes: int8 [outputs, depth], scale: one a row of it, or one; see `Int8Linear`.
    """
    return torch.ops.offload.int8_linear(
        input, codes, scale, bias=bias, residual=residual, activation=activation, gated=gated
    )
