"""Lazy tensors that stand for quantised weights, and how these are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from offload.checkpoint.expressions import Coded, Expression
from offload.checkpoint.lazy import LazyTensor
from offload.kernels.dequantize import dequantise, dequantiser
from offload.kernels.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class Decoder:
    """Makes the weight of `shape` that is stored in `form`."""

    form: WeightFormat
    shape: tuple[int, ...]

    def __call__(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return dequantise(self.form, stored, self.shape, dtype)

    def filler(
        self, stored: Mapping[str, torch.Tensor], out: torch.Tensor
    ) -> Callable[[int], None]:
        """A function that fills `out` with it; it takes the number of the current stream."""
        return dequantiser(self.form, stored, out)

    @property
    def temporary(self) -> bool:
        """Whether a GPU needs the weight's memory a second time to fill a contiguous `out`."""
        return self.form.layout == "gpt_oss"


def decoder_of(expression: Expression) -> Decoder | None:
    """How a weight that is stored as one is made of it; None for any other expression."""
    decode = expression.decode if isinstance(expression, Coded) else None
    return decode if isinstance(decode, Decoder) else None


def stand_for(
    form: WeightFormat,
    parts: Mapping[str, Expression],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> LazyTensor:
    """A lazy tensor for the weight of `shape` that `parts` hold, by the ends of their names."""
    return LazyTensor(Coded(tuple(parts.items()), Decoder(form, shape), torch.Size(shape), dtype))
