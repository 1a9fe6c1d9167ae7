"""torch.ops.offload.dequantize and quant_linear: weights in any format that is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.kernels.activation import Kind
from offload.kernels.call import on_device
from offload.kernels.dequantizer import Dequantize
from offload.kernels.ops.format_fields import STORED, format_fields, format_of
from offload.kernels.ops.registration import define, launch
from offload.kernels.ops.scratch import workspace
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.weight_format import WeightFormat


def _dequantize_output(stored: list[torch.Tensor], *form: Any, dtype: torch.dtype) -> torch.Tensor:
    shape = form[-1]
    if len(shape) == 3:  # experts [E, K, N], in memory as [E, N, K]
        return stored[0].new_empty((shape[0], shape[2], shape[1]), dtype=dtype).transpose(1, 2)
    return stored[0].new_empty(shape, dtype=dtype)


def _dequantize(stored: list[torch.Tensor], *form: Any, dtype: torch.dtype) -> torch.Tensor:
    described, found = format_of(stored, *form)
    out = _dequantize_output(stored, *form, dtype=dtype)
    memory = out.transpose(1, 2) if out.dim() == 3 else out
    launch(Dequantize(described, found, memory), out.device)
    return out


define(f"dequantize({STORED}, *, ScalarType dtype) -> Tensor", _dequantize, _dequantize_output)


def dequantize(
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight of `shape` that `stored` stands for, as `dtype`; see `Dequantize`."""
    return torch.ops.offload.dequantize(*format_fields(form, stored, shape), dtype=dtype)


def _quant_linear_output(
    input: torch.Tensor, stored: list[torch.Tensor], *form: Any, gated: bool = False, **_: Any
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], form[-1][0] // (2 if gated else 1))


def _quant_linear(
    input: torch.Tensor, stored: list[torch.Tensor], *form: Any, **options: Any
) -> torch.Tensor:
    described, found = format_of(stored, *form)
    out = _quant_linear_output(input, stored, *form, **options)
    with on_device(input.device):
        call = QuantLinear(
            input, described, found, out, workspace=workspace(input.device), **options
        )
        launch(call, input.device)
    return out


define(
    f"quant_linear(Tensor input, {STORED}, *, Tensor? bias=None, Tensor? residual=None, "
    "str? activation=None, bool gated=False) -> Tensor",
    _quant_linear,
    _quant_linear_output,
)


def quant_linear(
    input: torch.Tensor,
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Kind | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(input @ weight.T + bias) + residual with a stored weight; see `QuantLinear`."""
    return torch.ops.offload.quant_linear(
        input,
        *format_fields(form, stored, shape),
        bias=bias,
        residual=residual,
        activation=activation,
        gated=gated,
    )
