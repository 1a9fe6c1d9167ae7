"""Keys, or values, of sequences in CPU memory, or on their way up: as computed, or as int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload.kernels.call import current_stream, on_device
from offload.kernels.quantize_rows import QuantizeRows
from offload.store.layout import align

SCALE = torch.float32


@dataclass(frozen=True, slots=True)
class HostColumns:
    """[rows, kv_heads, capacity, head_dim] numbers of `dtype`: `stored` itself or, where that is
    int8, stored * scales, with one scale a column: float32 [rows, kv_heads, capacity].

    A number written as int8 is read back within half a scale, 1/254 of the largest magnitude in the
    same token and head. Copies between two of these copy codes and scales as they are.
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
        """Bytes that such columns take."""
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

    def part(self, rows: slice, heads: slice) -> HostColumns:
        """Some heads of some rows, likewise."""
        scales = None if self.scales is None else self.scales[rows, heads]
        return HostColumns(self.stored[rows, heads], scales, self.dtype)

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

    def beside(self, other: HostColumns) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of tensors that correspond: the numbers, or the codes and then the scales."""
        yield self.stored, other.stored
        if self.scales is not None and other.scales is not None:
            yield self.scales, other.scales

    def take(self, other: HostColumns, columns: int) -> None:
        """Copy the first columns of as many rows of `other`, as they are stored there."""
        self.stored[:, :, :columns] = other.stored[:, :, :columns]
        if self.scales is not None and other.scales is not None:
            self.scales[:, :, :columns] = other.scales[:, :, :columns]

    def spare_row(self, columns: int) -> HostColumns:
        """Memory for so many columns of one row, with any content."""
        shape = 1, self.shape[1], columns, self.shape[3]
        return HostColumns.empty(shape, self.dtype, self.scales is not None)

    def picked(self, rows: torch.Tensor, columns: int) -> HostColumns:
        """The first columns of those rows, in that order, in memory of their own."""
        scales = self.scales
        if scales is not None:
            scales = scales[:, :, :columns].index_select(0, rows)
        return HostColumns(self.stored[:, :, :columns].index_select(0, rows), scales, self.dtype)


def halves(
    memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, int8: bool, step: int = 1
) -> tuple[HostColumns, HostColumns]:
    """Keys and values of that shape in bytes of any content, each tensor at a multiple of `step`
    from the first.
    """
    place = 0

    def part(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal place
        first, last = place, place + torch.Size(shape).numel() * dtype.itemsize
        place = -(-last // step) * step
        return memory[first:last].view(dtype).view(shape)

    # Scales are ahead of what may end at any byte.
    scales = [part(shape[:-1], SCALE) if int8 else None for _ in range(2)]
    stored = [part(shape, torch.int8 if int8 else dtype) for _ in range(2)]
    keys, values = map(HostColumns, stored, scales, (dtype, dtype))
    return keys, values


def halves_bytes(shape: tuple[int, ...], dtype: torch.dtype, int8: bool) -> int:
    """Bytes that `halves` take on a compute device, where each tensor is aligned."""
    parts = [torch.Size(shape).numel() * (torch.int8 if int8 else dtype).itemsize]
    if int8:
        parts.append(torch.Size(shape[:-1]).numel() * SCALE.itemsize)
    return 2 * sum(map(align, parts))


def quantised(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [...] and float32 scales [...], one for the last dimension, where numbers are."""
    numbers = numbers.contiguous()
    with on_device(numbers.device):
        codes = torch.empty_like(numbers, dtype=torch.int8)
        scales = torch.empty(numbers.shape[:-1], dtype=SCALE, device=numbers.device)
        quantise_into(numbers, codes, scales, current_stream(numbers.device))
    return codes, scales


def quantise_into(
    numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, stream: int
) -> None:
    """The same into contiguous memory that exists, on a stream of the current GPU."""
    width = numbers.shape[-1]
    if numbers.numel():
        QuantizeRows(numbers, codes.view(-1, width), scales.view(-1)).launch(stream)
