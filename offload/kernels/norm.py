"""How a row is normalised, for every op that does so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from offload.kernels import structs
from offload.kernels.call import check, pointer


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm, over the last dimension (of `width` elements).

    y = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, "rms" without the mean and
    the bias. `weight` and `bias` are [width]. `weight_offset` is 1 where a checkpoint stores the
    weight less one (Gemma).
    """

    kind: Literal["layer", "rms"]
    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    eps: float = 1e-5
    weight_offset: float = 0.0

    def check(self, op: str, name: str, width: int, like: torch.Tensor) -> None:
        """Refuse what `op` cannot use on rows of `width` like those of `like`."""
        if self.kind not in ("layer", "rms"):
            raise ValueError(f"{op}: {name}.kind must be 'layer' or 'rms', not {self.kind!r}")
        if self.kind == "rms" and self.bias is not None:
            raise ValueError(f"{op}: {name} is an RMSNorm and has no bias")
        if self.eps < 0:
            raise ValueError(f"{op}: {name}.eps must not be negative, got {self.eps}")
        for field in ("weight", "bias"):
            if getattr(self, field) is not None:
                check(op, f"{name}.{field}", getattr(self, field), (width,), like)

    def struct(self) -> structs.NormStruct:
        """These arguments as the library takes them."""
        return structs.NormStruct(
            pointer(self.weight),
            pointer(self.bias),
            self.eps,
            self.weight_offset,
            structs.NORMS[self.kind],
        )

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What must stay alive while a call is in use."""
        return self.weight, self.bias


def norm_struct(norm: Norm | None) -> structs.NormStruct:
    """The struct of `norm`, or of no normalisation."""
    return structs.NormStruct() if norm is None else norm.struct()
