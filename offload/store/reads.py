"""Which file ranges to read for a layer, and where the bytes of each go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from offload.checkpoint.expressions import Pieces
from offload.errors import CheckpointError
from offload.store.layout import Layer, align

# Bytes; offsets and lengths of direct reads are multiples of it on every common drive.
SECTOR = 4096
MAX_GAP = 256 << 10  # bytes between two wanted ranges that are cheaper to read than to seek over


@dataclass(frozen=True, slots=True)
class Move:
    """`nbytes` bytes from `source` in what was read to `target` in the layer's slot."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One request: `nbytes` bytes of `file` from `offset` (a multiple of SECTOR) on, then the
    moves.
    """

    file: str
    offset: int
    nbytes: int
    moves: tuple[Move, ...]


def plan_reads(layer: Layer, chunk_bytes: int, file_sizes: dict[str, int]) -> tuple[ReadOp, ...]:
    """The fewest large sequential requests of at most `chunk_bytes` that cover all extents of a
    layer.

    Every source of the layer must be `Pieces`. Ranges are widened to whole sectors, but never
    beyond the end of the file.
    """
    wanted: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # file: (start, stop, target)
    for place in layer.places:
        if not isinstance(place.source, Pieces):
            raise TypeError(f"{place.name} is not stored as plain bytes: {place.source}")
        at = place.offset
        for extent in place.source.extents:
            if extent.nbytes:
                wanted[extent.file].append((extent.offset, extent.offset + extent.nbytes, at))
            at += extent.nbytes
    ops: list[ReadOp] = []
    for file, ranges in wanted.items():
        ranges.sort()
        size = file_sizes[file]
        for start, stop in _runs(ranges):
            if stop > size:
                raise CheckpointError(
                    f"{file} has {size} bytes, but {layer.name} needs those up to {stop}: it was "
                    "changed while it was being loaded"
                )
            ops += _requests(file, start, min(align(stop, SECTOR), size), chunk_bytes, ranges)
    return tuple(ops)


def _runs(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch or nearly touch, joined; starts are aligned to sectors."""
    runs: list[tuple[int, int]] = []
    for start, stop, _ in ranges:
        if runs and start - runs[-1][1] <= MAX_GAP:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop))
        else:
            runs.append((start // SECTOR * SECTOR, stop))
    return runs


def _requests(
    file: str, start: int, stop: int, chunk_bytes: int, ranges: list[tuple[int, int, int]]
) -> Iterable[ReadOp]:
    first = 0  # ranges before it end before the request at hand
    for low in range(start, stop, chunk_bytes):
        high = min(low + chunk_bytes, stop)
        moves = []
        while first < len(ranges) and ranges[first][1] <= low:
            first += 1
        for a, b, target in ranges[first:]:
            if a >= high:
                break
            lo, hi = max(a, low), min(b, high)
            if lo < hi:
                moves.append(Move(lo - low, target + lo - a, hi - lo))
        if moves:
            yield ReadOp(file, low, high - low, tuple(_join(moves)))


def _join(moves: list[Move]) -> list[Move]:
    """Moves that continue one another in source and target, as one."""
    joined = moves[:1]
    for move in moves[1:]:
        last = joined[-1]
        if (last.source + last.nbytes, last.target + last.nbytes) == (move.source, move.target):
            joined[-1] = Move(last.source, last.target, last.nbytes + move.nbytes)
        else:
            joined.append(move)
    return joined
