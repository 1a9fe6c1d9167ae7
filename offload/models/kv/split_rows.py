"""Rows of a batch that lie on two sides, the compute device and CPU memory, when others are picked
of them: beams that are reordered, sequences that go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from offload.models.kv.host_columns import HostColumns

SPARE = -1  # stands for a row of CPU memory beside the others


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Keys, or values: the first rows of a batch on the compute device, the others, if there are
    any, in CPU memory. Of their columns the first `length` count.
    """

    on_device: torch.Tensor  # [rows, kv_heads, capacity, head_dim]
    on_cpu: HostColumns | None
    length: int

    def to_device(self, rows: torch.Tensor) -> torch.Tensor:
        """These rows of the batch on the compute device, in memory of their own: [rows, kv_heads,
        length, head_dim].
        """
        device, split = self.on_device.device, self.on_device.shape[0]
        _, heads, _, width = self.on_device.shape
        found = self.on_device.new_empty((rows.numel(), heads, self.length, width))
        first = rows < split
        if bool(first.any()):
            found[first.to(device)] = first_columns(self.on_device, rows[first], self.length)
        if self.on_cpu is not None and not bool(first.all()):
            kept = self.on_cpu.picked(rows[~first] - split, self.length).read(self.length)
            found[~first.to(device)] = kept.to(device)
        return found

    def to_cpu(self, rows: torch.Tensor, int8: bool) -> HostColumns:
        """These rows, which are on the compute device, in CPU memory of their own, as int8 or as
        they are.
        """
        _, heads, _, width = self.on_device.shape
        shape = (rows.numel(), heads, self.length, width)
        found = HostColumns.empty(shape, self.on_device.dtype, int8)
        found.write(0, first_columns(self.on_device, rows, self.length))
        return found


@dataclass(frozen=True, slots=True)
class RowMoves:
    """What is to be moved so that row i of a batch is what row picked[i] was."""

    up: torch.Tensor  # rows on the compute device that are to be written
    up_from: torch.Tensor  # the rows of the batch before, on either side, that they become
    down_from: torch.Tensor  # rows of the compute device before that are wanted in CPU memory
    # Copies (target, source) within CPU memory, to be made in this order. A target is a row there,
    # or SPARE; a source is a row that was there, SPARE, or, numbered on, one of `down_from`.
    copies: list[tuple[int, int]]

    @classmethod
    def of(
        cls, picked: torch.Tensor, sides: tuple[int, int], cpu_rows: int, stays: bool
    ) -> RowMoves:
        """`picked`: int64 on the CPU. `sides`: rows of the batch before on the compute device, and
        in CPU memory. `cpu_rows`: those that are to be in CPU memory, the last ones. `stays`:
        buffers stay, so that a row which keeps its place is not touched; else all are written.
        """
        on_device, on_cpu = sides
        places = torch.arange(picked.numel())
        moved = places[picked != places] if stays else places
        first = picked.numel() - cpu_rows  # in CPU memory
        up, down = moved[moved < first], moved[moved >= first]
        crosses = picked[down] < on_device
        sources = picked[down] - on_device
        sources[crosses] = on_cpu + torch.arange(int(crosses.sum()))
        wanted = dict(zip((down - first).tolist(), sources.tolist(), strict=True))
        copies = list(in_place(wanted) if stays else wanted.items())
        return cls(up, picked[up], picked[down[crosses]], copies)


def in_place(sources: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Copies (target, source) that permute rows in place: after them each target row has what its
    source had before. Each row is copied once, and one of every cycle twice, by way of the row
    SPARE.
    """
    pending = {target: source for target, source in sources.items() if target != source}
    readers = Counter(pending.values())
    ready = [target for target in pending if not readers[target]]
    while pending:
        if not ready:  # nothing but cycles is left
            target = next(iter(pending))
            yield SPARE, target
            pending = {t: SPARE if s == target else s for t, s in pending.items()}
            ready.append(target)
        target = ready.pop()
        source = pending.pop(target)
        yield target, source
        readers[source] -= 1
        if source in pending and not readers[source]:
            ready.append(source)


def first_columns(buffer: torch.Tensor, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """The first columns of those rows, in memory of their own."""
    return buffer[:, :, :columns].index_select(0, rows.to(buffer.device))
