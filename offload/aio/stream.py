"""Ranges of a file, read in order through a buffer that is smaller than they are."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import CancelledError
from typing import Protocol

from .errors import AioClosedError, AioError
from .pieces import Course, Pieces


class Owner(Protocol):
    """What a stream asks of its handle."""

    backend: str

    def _usable(self) -> None: ...
    def _stream_ended(self, stream: Stream) -> None: ...
    def _owns_this_thread(self) -> bool: ...


class Stream:
    """Iterates over `(offset, view)`: the next bytes of the file, where they lie in the buffer.

    A view's content is that piece until `keep` more pieces have been asked for. Made by
    `AioHandle.stream`; one thread at a time may iterate.
    """

    def __init__(self, handle: Owner, pieces: Pieces, course: Course) -> None:
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
        if self._handle._owns_this_thread():  # the garbage collector runs in any thread
            threading.Thread(target=self.close, name="offload-aio-close").start()
        else:
            self.close()
