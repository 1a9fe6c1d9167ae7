"""Ranges of a file, read in order through a buffer that is smaller than they are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import AioClosedError, AioError
from .file import PAGE, Descriptors
from .future import IOFuture, failure
from .request import refuse_misaligned
from .span import Span

if TYPE_CHECKING:
    from .handle import AioHandle


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
    """A checked course; ValueError names what cannot be."""
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
        if offset < 0 or nbytes < 0 or offset + nbytes >= 1 << 63:
            raise ValueError(f"range ({offset}, {nbytes}) lies outside of any file")
        refuse_misaligned(files, span.address + offset % grain, offset, nbytes)
        checked.append((int(offset), int(nbytes)))
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

    def __init__(self, handle: AioHandle, course: Course) -> None:
        self._handle, self._course = handle, course
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
            future = self._handle._submit(False, span, self._course.files, offset)
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


class Stream:
    """Iterates over `(offset, view)`: the next bytes of the file, where they lie in the buffer.

    A view's content is that piece until `keep` more pieces have been asked for. Made by
    `AioHandle.stream`; one thread at a time may iterate.
    """

    def __init__(self, handle: AioHandle, pieces: Pieces, course: Course) -> None:
        self._handle = handle
        self._pieces: Pieces | None = pieces  # None: closed, and lets go of memory and file
        self._pid = os.getpid()
        array = (ctypes.c_ubyte * course.span.nbytes).from_address(course.span.address)
        array._hold = course.span  # type: ignore[attr-defined]
        self._view = memoryview(array).cast("B")  # holds the memory, as do its slices
        self._turn = threading.Lock()
        self._ended = False
        self.count = self.nbytes = 0  #: pieces and bytes so far

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[int, memoryview]:
        if not self._turn.acquire(blocking=False):
            raise ValueError("another thread is waiting for this stream's next piece")
        try:
            if self._ended:
                raise StopIteration
            self._handle._usable()
            pieces = self._pieces
            if pieces is None:
                raise AioClosedError("the stream is closed", backend=self._handle.backend)
            try:
                found = pieces.next()
            except (AioError, CancelledError):
                closed = self._pieces is None  # by another thread, meanwhile
                self.close()
                if not closed:
                    raise
                found = None
            if found is not None:
                place, offset, nbytes = found
                self.count += 1
                self.nbytes += nbytes
                return offset, self._view[place : place + nbytes]
            if self._pieces is None:  # closed meanwhile: this is not the end
                raise AioClosedError("the stream was closed", backend=self._handle.backend)
            self._ended = True
            self.close()
            raise StopIteration
        finally:
            self._turn.release()

    def close(self) -> None:
        """Read no further; returns when nothing is written into the buffer any more."""
        pieces = self._pieces
        if pieces is None or os.getpid() != self._pid:
            return
        self._pieces = None
        pieces.close()
        self._handle._stream_ended(self)

    def _abandon(self) -> None:
        if self._pieces is not None:
            self._pieces.abandon()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pieces", None) is None or os.getpid() != self._pid:
            return
        if self._handle._engine.owns_this_thread():  # the garbage collector runs in any thread
            threading.Thread(target=self.close, name="offload-aio-close").start()
        else:
            self.close()
