"""Keys and values in CPU memory on their way up to the compute device, which attends to them."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from offload.models.kv.host_columns import HostColumns, halves_bytes
from offload.models.kv.host_kv import HostKv
from offload.scheduler.kv_pieces import KV_PIECES, largest_piece
from offload.sizes import format_size
from offload.store import POISON, POISON_BYTE
from offload.trace import Trace

KEPT_STEPS = 256  # whose medians are reported

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # target, source


def piece_bytes(
    rows: int, shapes: Iterable[tuple[int, int]], columns: int, dtype: torch.dtype, int8: bool
) -> tuple[int, int]:
    """Bytes of the largest piece of `rows` sequences of so many columns, in layers of these (KV
    heads, head_dim): as it comes up, and, where that is int8, as it is converted to numbers (else
    0).
    """
    most = whole = 0
    for heads, width in set(shapes):
        head_bytes = 2 * HostColumns.nbytes((1, 1, columns, width), dtype, int8)
        shape = *largest_piece(rows, heads, head_bytes), columns, width
        most = max(most, halves_bytes(shape, dtype, int8))
        if int8:
            whole = max(whole, halves_bytes(shape, dtype, False))
    return most, whole


def places_bytes(
    rows: int, shapes: Iterable[tuple[int, int]], columns: int, dtype: torch.dtype, int8: bool
) -> int:
    """Bytes that the places for such sequences take on the compute device, all together."""
    most, whole = piece_bytes(rows, shapes, columns, dtype, int8)
    return KV_PIECES * most + whole


class Wanted(NamedTuple):
    """What identifies a piece that a decode step wants."""

    owner: object  # whose calls read it
    layer: int
    number: int  # of the piece
    past: int  # columns that were kept before the step
    changes: int  # of columns that were kept, so far, by others than decode steps


class Source(Protocol):
    """Whose keys and values come up."""

    count: int  # of sequences

    @property
    def arriving(self) -> Any:
        """The point at which all that was sent down has arrived."""

    def pairs(self, wanted: Wanted, place: int) -> Pairs:
        """(target, source) of the copies that bring a piece into a place."""


@dataclass(slots=True)
class _Load:
    wanted: Wanted
    place: int
    point: Any
    nbytes: int


@dataclass(slots=True)
class StreamedWork:
    """What came up for decode steps so far."""

    steps: int = 0  # that had such rows
    sequences: int = 0  # of the latest one
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))  # bytes of each

    def add(self, nbytes: int, sequences: int | None) -> None:
        """Count a piece that is used; `sequences`: given for the first piece of a step."""
        if sequences is not None:
            self.steps, self.sequences = self.steps + 1, sequences
            self.latest.append(0)
        if self.latest:  # else no step has begun
            self.latest[-1] += nbytes

    @property
    def typical_bytes(self) -> int | None:
        """Bytes of a step, the median of the latest ones; None before there was one."""
        return int(statistics.median(self.latest)) if self.latest else None

    def __str__(self) -> str:
        """One line; empty before there was a step."""
        found = self.typical_bytes
        if found is None:
            return ""
        return (
            f"attention on the compute device to {self.sequences} sequences in CPU memory: "
            f"{format_size(found)} of keys and values come up in a step (median of "
            f"{len(self.latest)} steps)"
        )


class StreamedKv:
    """The places on the compute device through which keys and values pass, piece by piece.

    Decode steps take pieces in a fixed order, so the next ones are loaded ahead while places are
    free, across layers and from one step to the next. A piece that was loaded ahead is used only if
    it is the very next that is taken and CPU memory still holds the same; otherwise all loads ahead
    are dropped: a wrong guess costs time on the link, never a wrong result. When several caches
    take turns layer by layer, nothing is loaded ahead beyond a layer.

    Compute streams that take turns share the places, and wait for each other's reads.
    """

    def __init__(
        self,
        host: HostKv,
        device: torch.device,
        trace: Callable[[], Trace | None] = lambda: None,
    ) -> None:
        self.work = StreamedWork()
        self.places: list[torch.Tensor] = []  # uint8; another list when they lie elsewhere
        self.whole = torch.empty(0, dtype=torch.uint8, device=device)  # a piece converted from int8
        self._host, self._device, self._trace = host, device, trace
        self._poison = os.environ.get(POISON) == "1"
        self._free: list[Any] = [None] * KV_PIECES  # the point after a place's last use
        self._loads: deque[_Load] = deque()  # asked for ahead, in order
        self._latest: Any = None  # the point of the last load
        self._taken: int | None = None  # the place that is in use
        self._turn = 0  # the place of the next load
        self._at: Wanted | None = None  # the piece that was taken last
        self._alone = True  # whether the layer before was of the same owner

    def reserve(self, nbytes: int, whole: int) -> None:
        """Make room for pieces of so many bytes, and for one of `whole` bytes that is converted.
        Calls made for the old places must be made anew.
        """
        if self.places and nbytes <= self.places[0].numel() and whole <= self.whole.numel():
            return
        self._settle()
        nbytes = max(nbytes, self.places[0].numel() if self.places else 0)
        whole = max(whole, self.whole.numel())
        self.places, self.whole = [], self.whole[:0].clone()  # first: both would be there at once
        with torch.inference_mode(False):
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what stays must be no part of a cached block

            def memory(size: int) -> torch.Tensor:
                return torch.empty(size, dtype=torch.uint8, device=self._device)

            self.whole = memory(whole)
            self.places = [memory(nbytes) for _ in range(KV_PIECES)]
        self._free = [self._host.copies.mark()] * KV_PIECES

    def _settle(self) -> None:
        """Drop the loads ahead, and make what is computed from now on wait for all uses of the
        places.
        """
        self._loads.clear()
        for point in (*self._free, self._latest):
            self._host.copies.wait(point)

    def take(self, wanted: Wanted, source: Source) -> int:
        """The place that holds the piece, for what is computed from now on. Pair with `give_back`,
        unless the pass breaks off.
        """
        if self._taken is not None:
            self.give_back()
        before, self._at = self._at, wanted
        if not wanted.number:
            self._alone = before is None or before.owner is wanted.owner
        if self._loads and self._loads[0].wanted == wanted:
            load = self._loads.popleft()
        else:
            self._loads.clear()
            load = self._load(wanted, source)
        self._taken = load.place
        first = not (wanted.layer or wanted.number)
        self.work.add(load.nbytes, source.count if first else None)
        trace = self._trace()
        if trace is not None:
            trace.rises()
        self._host.copies.wait(load.point)
        if trace is not None:
            trace.risen()
        return load.place

    def ahead(self, following: Iterator[Wanted], source: Source) -> None:
        """Ask for what is taken next, as far as places are free."""
        asked = len(self._loads)
        for wanted in islice(following, asked, KV_PIECES - (self._taken is not None)):
            if not self._alone and self._at is not None and wanted.layer != self._at.layer:
                return
            self._loads.append(self._load(wanted, source))

    def give_back(self) -> None:
        """The place may be loaded anew once what was issued so far has run."""
        place, self._taken = self._taken, None
        if place is None:
            return
        if self._poison:  # in tests: reads of what did not come up find NaN
            self.places[place].fill_(POISON_BYTE)
        self._free[place] = self._host.copies.mark()

    def _load(self, wanted: Wanted, source: Source) -> _Load:
        place = self._turn
        pairs = source.pairs(wanted, place)
        after = self._free[place], source.arriving
        self._latest = self._host.copies.prefetch(pairs, after)
        # Last: a load that failed leaves its turn to the next, and not the place that is in use.
        self._turn = (place + 1) % KV_PIECES
        return _Load(wanted, place, self._latest, sum(target.nbytes for target, _ in pairs))

    def close(self) -> None:
        """Let go of the memory."""
        self._settle()
        self.places, self.whole = [], self.whole[:0].clone()
