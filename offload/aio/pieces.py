"""What lies behind a stream: where its pieces come from and go to, and what reads them ahead."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import AioError, whole
from .file import PAGE, Descriptors
from .future import IOFuture, failure
from .request import refuse_misaligned
from .span import Span


@dataclass(frozen=True)
class Course:
    """Where the pieces of a stream come from and go to."""

    files: Descriptors
    span: Span
    chunk: int  # bytes of a slot
    slots: int
    kept: int  # pieces that the caller may look at, at the same time
    ranges: tuple[tuple[int, int], ...]  # offset and bytes

    @property
    def grain(self) -> int:
        return max(PAGE, self.files.offset_align)

    def place(self, slot: int, offset: int) -> int:
        """Where a piece lies in the buffer: in its slot as in its page, so that O_DIRECT fits."""
        return slot * self.chunk + offset % self.grain

    def pieces(self) -> Iterable[tuple[int, int]]:
        """Offset and bytes of each piece: the ranges, cut at multiples of a chunk."""
        for start, nbytes in self.ranges:
            at, stop = start, start + nbytes
            while at < stop:
                end = min((at // self.chunk + 1) * self.chunk, stop)
                yield at, end - at
                at = end


def course(
    files: Descriptors, span: Span, ranges: Iterable[tuple[int, int]], chunk: int | None, keep: int
) -> Course:
    """A checked course; ValueError or TypeError names what cannot be."""
    grain = max(PAGE, files.offset_align)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be a positive integer, not {keep!r}")
    if chunk is None:
        chunk = max(span.nbytes // max(4, 2 * keep) // grain * grain, grain)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < grain or chunk % grain:
        raise ValueError(f"chunk must be a positive multiple of {grain}, not {chunk!r}")
    slots = span.nbytes // chunk
    if slots < keep:
        raise ValueError(
            f"the buffer of {span.nbytes} bytes holds {slots} chunks of {chunk}, "
            f"and a stream that keeps {keep} needs {keep} at least (more, to read ahead)"
        )
    checked = []
    for offset, nbytes in ranges:
        offset, nbytes = whole("a range's offset", offset), whole("a range's length", nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes >= 1 << 63:
            raise ValueError(f"range ({offset}, {nbytes}) lies outside of any file")
        refuse_misaligned(files, span.address + offset % grain, offset, nbytes)
        checked.append((offset, nbytes))
    return Course(files, span, chunk, slots, keep, tuple(checked))


class Pieces(Protocol):
    """What reads ahead: the compiled engine by itself, or futures for the engines in Python."""

    def next(self) -> tuple[int, int, int] | None:
        """Give back what is no longer kept; the next piece's place, offset and bytes, or None."""

    def close(self) -> None:
        """Begin no more, and return when nothing is written into the buffer any more."""

    def abandon(self) -> None: ...


class NativePieces:
    """Pieces by the compiled engine: between two of them no Python runs."""

    def __init__(self, stream: Any, backend: str, course: Course) -> None:
        self._stream = stream
        self._backend = backend
        self._course = course  # its file and memory, until nothing is in flight

    def next(self) -> tuple[int, int, int] | None:
        found: Any = self._stream.next()
        if found is None or len(found) == 3:
            return found
        self.close()
        outcome, nbytes = found
        raise failure(outcome, self._backend, False, self._course.files.path, nbytes)

    def close(self) -> None:
        self._stream.close()

    def abandon(self) -> None:
        self._stream.abandon()


class FuturePieces:
    """Pieces by one future each."""

    def __init__(
        self, read: Callable[[Span, Descriptors, int], IOFuture], course: Course
    ) -> None:  # fmt: skip
        self._read, self._course = read, course
        self._ahead = iter(course.pieces())
        self._free = list(range(course.slots - 1, -1, -1))
        self._held: deque[int] = deque()
        self._in_flight: deque[tuple[int, int, IOFuture]] = deque()
        self._waiting = False
        self._read_ahead()

    def next(self) -> tuple[int, int, int] | None:
        if not self._waiting and len(self._held) >= self._course.kept:
            self._free.append(self._held.popleft())
            self._read_ahead()
        try:
            slot, place, future = self._in_flight[0]
        except IndexError:
            return None
        self._waiting = True
        try:
            future.result()
        except (AioError, CancelledError):
            self.close()
            raise
        self._waiting = False
        with contextlib.suppress(IndexError):  # closed by another thread
            self._in_flight.popleft()
        self._held.append(slot)
        return place, future.offset, future.nbytes

    def _read_ahead(self) -> None:
        while self._free and (piece := next(self._ahead, None)) is not None:
            offset, nbytes = piece
            slot = self._free.pop()
            place = self._course.place(slot, offset)
            span = Span(self._course.span.address + place, nbytes, self._course.span.hold)
            future = self._read(span, self._course.files, offset)
            self._in_flight.append((slot, place, future))

    def close(self) -> None:
        self._ahead = iter(())
        futures = [future for _, _, future in self._in_flight]
        self._in_flight.clear()
        for future in futures:
            future.cancel()
        for future in futures:
            with contextlib.suppress(AioError, CancelledError):
                future.result()  # taken, so that wait() does not count it

    def abandon(self) -> None:
        self._in_flight.clear()
