"""torch.ops.offload.skinny_gemm and linear: products with weights as they are computed with."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels.activation import Kind
from offload.kernels.call import on_device
from offload.kernels.gemm import SkinnyGemm
from offload.kernels.linear import Linear
from offload.kernels.norm import Norm
from offload.kernels.ops.norm_fields import norm_fields, norm_of, norm_schema
from offload.kernels.ops.registration import define, launch
from offload.kernels.ops.scratch import workspace


def _linear_output(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    transposed: bool = False,
    **_: Any,
) -> torch.Tensor:
    products = weight.shape[1 if transposed else 0]
    return input.new_empty(*input.shape[:-1], products // (2 if gated else 1))


def _skinny_gemm(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    out = _linear_output(input, weight, **options)
    norm = norm_of("norm", options)
    call = SkinnyGemm(input, weight, out, norm=norm, workspace=workspace(input.device), **options)
    launch(call, input.device)
    return out


def _linear(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    out = _linear_output(input, weight, **options)
    norm = norm_of("norm", options)
    with on_device(input.device):
        call = Linear(input, weight, out, norm=norm, workspace=workspace(input.device), **options)
        launch(call, input.device)
    return out


_PRODUCT = (
    "(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? residual=None, "
    f"{norm_schema('norm')}, str? activation=None, bool gated=False"
)
define(f"skinny_gemm{_PRODUCT}) -> Tensor", _skinny_gemm, _linear_output)
define(f"linear{_PRODUCT}, bool transposed=False) -> Tensor", _linear, _linear_output)


def skinny_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: Kind | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(norm(input) @ weight.T + bias) + residual for up to 16 rows; see `SkinnyGemm`."""
    return torch.ops.offload.skinny_gemm(
        input,
        weight,
        bias=bias,
        residual=residual,
        activation=activation,
        gated=gated,
        **norm_fields("norm", norm),
    )


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: Kind | None = None,
    gated: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """act(norm(input) @ weight.T + bias) + residual for any number of rows; see `Linear`."""
    return torch.ops.offload.linear(
        input,
        weight,
        bias=bias,
        residual=residual,
        activation=activation,
        gated=gated,
        transposed=transposed,
        **norm_fields("norm", norm),
    )
