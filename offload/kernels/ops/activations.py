"""torch.ops.offload.activation."""

from __future__ import annotations

import torch

from offload.kernels.activation import Activation, Kind
from offload.kernels.ops.registration import define, launch


def _activation_output(
    input: torch.Tensor,
    kind: str | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    if gated and input.shape[-1] % 2:
        raise ValueError(
            f"activation: a row of input must be [gate, up] of equal size, not {input.shape[-1]} "
            "elements"
        )
    return input.new_empty(*input.shape[:-1], input.shape[-1] // (2 if gated else 1))


def _activation(
    input: torch.Tensor,
    kind: Kind | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    out = _activation_output(input, kind, gated=gated)
    launch(Activation(input, out, kind=kind, bias=bias, gated=gated), input.device)
    return out


define(
    "activation(Tensor input, str? kind, *, Tensor? bias=None, bool gated=False) -> Tensor",
    _activation,
    _activation_output,
)


def activation(
    input: torch.Tensor,
    kind: Kind | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(input + bias), or act(gate + bias) * (up + bias); see `Activation`."""
    return torch.ops.offload.activation(input, kind, bias=bias, gated=gated)
