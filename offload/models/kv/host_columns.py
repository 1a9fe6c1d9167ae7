"""Keys, or values, of some sequences in CPU memory: as they were computed, or as int8."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels.call import current_stream
from offload.kernels.quantize_rows import QuantizeRows

SCALE = torch.float32


@dataclass(frozen=True, slots=True)
class HostColumns:
    """[rows, kv_heads, capacity, head_dim] numbers of `dtype`: `stored` itself or, where that is
    int8, stored * scales with one scale a column, float32 [rows, kv_heads, capacity].

    A number that is written is read with an error of half a scale, which is 1/254 of the largest
    magnitude among the head's of that token; what is moved between two of these keeps its codes.
    """

    stored: torch.Tensor
    scales: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, int8: bool) -> HostColumns:
        """With any content, in memory of its own."""
        if not int8:
            return cls(torch.empty(shape, dtype=dtype), None, dtype)
        scales = torch.empty(shape[:-1], dtype=SCALE)
        return cls(torch.empty(shape, dtype=torch.int8), scales, dtype)

    @staticmethod
    def nbytes(shape: tuple[int, ...], dtype: torch.dtype, int8: bool) -> int:
        """What such columns take."""
        if int8:
            return torch.Size(shape).numel() + torch.Size(shape[:-1]).numel() * SCALE.itemsize
        return torch.Size(shape).numel() * dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        """[rows, kv_heads, capacity, head_dim]."""
        return self.stored.shape

    def __getitem__(self, rows: slice) -> HostColumns:
        """Some rows, in the same memory."""
        scales = None if self.scales is None else self.scales[rows]
        return HostColumns(self.stored[rows], scales, self.dtype)

    def read(self, columns: int) -> torch.Tensor:
        """The first columns of all rows, on the CPU: a view, or numbers made of int8."""
        codes = self.stored[:, :, :columns]
        if self.scales is None:
            return codes
        return (codes * self.scales[:, :, :columns, None]).to(self.dtype)

    def write(self, first: int, new: torch.Tensor) -> None:
        """Columns from `first` on: new [rows, kv_heads, columns, head_dim], of any device."""
        columns = slice(first, first + new.shape[2])
        if self.scales is None:
            self.stored[:, :, columns] = new
            return
        codes, scales = quantised(new.to(self.dtype))
        self.stored[:, :, columns] = codes
        self.scales[:, :, columns] = scales

    def take(self, other: HostColumns, columns: int) -> None:
        """The first columns of as many rows, as they are stored there."""
        self.stored[:, :, :columns] = other.stored[:, :, :columns]
        if self.scales is not None and other.scales is not None:
            self.scales[:, :, :columns] = other.scales[:, :, :columns]

    def picked(self, rows: torch.Tensor, columns: int) -> HostColumns:
        """Those rows' first columns, in that order, in memory of their own."""
        scales = self.scales
        if scales is not None:
            scales = scales[:, :, :columns].index_select(0, rows)
        return HostColumns(self.stored[:, :, :columns].index_select(0, rows), scales, self.dtype)


def quantised(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [...] and float32 scales [...], one for the last dimension, where numbers are."""
    numbers = numbers.contiguous()
    with _current(numbers.device):
        codes = torch.empty_like(numbers, dtype=torch.int8)
        scales = torch.empty(numbers.shape[:-1], dtype=SCALE, device=numbers.device)
        quantise_into(numbers, codes, scales, current_stream(numbers.device))
    return codes, scales


def quantise_into(
    numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, stream: int
) -> None:
    """The same in contiguous memory at hand, on a stream of the current GPU."""
    width = numbers.shape[-1]
    if numbers.numel():
        QuantizeRows(numbers, codes.view(-1, width), scales.view(-1)).launch(stream)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
