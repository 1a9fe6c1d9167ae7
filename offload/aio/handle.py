"""Asynchronous reads and writes of files: a queue, its engine, and what is under way."""

from __future__ import annotations

import atexit
import errno
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from . import backends, regions
from .engine import Shape, Ticket
from .errors import AioClosedError, AioError, BackendUnavailable, whole
from .file import AioFile, Descriptors
from .future import IOFuture
from .hints import transfer_hint
from .native import NativeEngine
from .pieces import FuturePieces, Pieces, course
from .request import refuse_misaligned
from .span import Span, span_of
from .stream import Stream

# Of the numbers that `AioHandle` takes. One system call moves less than 2 GiB.
LIMITS = {
    "block_size": (4096, 1 << 30),
    "queue_depth": (1, 4096),
    "intra_op_parallelism": (1, 64),
}
_tokens = itertools.count(1)
_handles: weakref.WeakSet[AioHandle] = weakref.WeakSet()


class AioHandle:
    """Reads and writes any range of a file into or from any host memory, many at a time.

    A request moves all its bytes or raises; a failed one leaves the handle as good as before.
    Methods may be called from any thread. The names are those of DeepSpeed's aio handle.

    Args:
        block_size: bytes of one transfer at most, 4096 to 1 GiB; a larger request is cut.
        queue_depth: transfers in flight for each I/O thread, 1 to 4096.
        backend: "auto" (the first of `backends.BACKENDS` that works here, or the one that the
            environment variable OFFLOAD_AIO_BACKEND names), or one of them.
        single_submit: a system call for each transfer, not one for many.
        overlap_events: transfers are begun as others end, not batch by batch.
        intra_op_parallelism: I/O threads, each with a queue of its own, 1 to 64.

    A buffer is whatever lends contiguous host memory: an `AlignedBuffer`, a CPU tensor, a NumPy
    array, a bytearray. A file is an `AioFile`, or a path that is opened for this request.

    Raises ValueError for an argument out of range, and BackendUnavailable where no backend, or not
    the one that was named, works here.
    """

    def __init__(
        self,
        block_size: int = 8 << 20,
        queue_depth: int = 16,
        backend: str = "auto",
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._closed = self._over = True  # until the engine is there
        self._closing = threading.RLock()  # held by the thread that ends the engine
        _check("block_size", block_size)
        _check("queue_depth", queue_depth)
        _check("intra_op_parallelism", intra_op_parallelism)
        self._shape = Shape(
            block_size, queue_depth, intra_op_parallelism, bool(single_submit), bool(overlap_events)
        )
        self._requested = backend
        self._pid = os.getpid()
        # Around every call that submits or polls: a request must not be reported before it is
        # known, nor claimed by its caller while another thread is about to report it.
        self._lock = threading.RLock()
        self._pending: dict[int, IOFuture] = {}
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        # Ended since the last wait(), and not claimed by their own result(): their number, and
        # those that failed. Successful futures are not kept: nobody may ever ask for them.
        self._unclaimed = 0
        self._failed: list[IOFuture] = []
        self._waits = 0
        self._totals = {"reads": 0, "writes": 0, "read_bytes": 0, "written_bytes": 0, "failed": 0}
        this = weakref.ref(self)  # the engine's threads must not keep a forgotten handle alive

        def on_done(token: int, ticket: Ticket) -> None:
            handle = this()
            if handle is not None:
                handle._finish(token, ticket)

        self._engine, self._tried = backends.select(backend, self._shape, on_done)
        self.backend = self._engine.name
        self._closed = self._over = False
        _handles.add(self)

    def pread(
        self, buffer: Any, file: AioFile | str | os.PathLike[str], file_offset: int = 0,
        nbytes: int | None = None,
    ) -> int:  # fmt: skip
        """Read `nbytes` (default: the whole buffer) at `file_offset`; returns how many they were.

        Raises ShortReadError where the file ends first, AioError where the system fails, and
        AlignmentError for a file opened with `direct=True` that cannot take the range; ValueError
        or TypeError for what is no buffer or range.
        """
        return self.async_pread(buffer, file, file_offset, nbytes).result()

    def pwrite(
        self, buffer: Any, file: AioFile | str | os.PathLike[str], file_offset: int = 0,
        nbytes: int | None = None,
    ) -> int:  # fmt: skip
        """Write `nbytes` (default: the whole buffer) at `file_offset`; returns how many they were.
        Raises as `pread`.
        """
        return self.async_pwrite(buffer, file, file_offset, nbytes).result()

    def async_pread(
        self, buffer: Any, file: AioFile | str | os.PathLike[str], file_offset: int = 0,
        nbytes: int | None = None,
    ) -> IOFuture:  # fmt: skip
        """Begin a read; the buffer's content is undefined until the future has ended. What the
        system makes of it is raised by `IOFuture.result`, arguments that do not fit here.
        """
        return self._begin(False, buffer, file, file_offset, nbytes)

    def async_pwrite(
        self, buffer: Any, file: AioFile | str | os.PathLike[str], file_offset: int = 0,
        nbytes: int | None = None,
    ) -> IOFuture:  # fmt: skip
        """Begin a write, likewise; the buffer must not change until the future has ended."""
        return self._begin(True, buffer, file, file_offset, nbytes)

    def _begin(
        self, write: bool, buffer: Any, file: Any, offset: int, nbytes: int | None
    ) -> IOFuture:
        self._usable()
        span = span_of(buffer, writable=not write)
        offset = whole("file_offset", offset)
        if nbytes is not None:
            nbytes = whole("nbytes", nbytes)
            if not 0 <= nbytes <= span.nbytes:
                raise ValueError(f"nbytes is {nbytes}, the buffer holds {span.nbytes}")
            span = Span(span.address, nbytes, span.hold)
        if offset < 0 or offset + span.nbytes >= 1 << 63:
            raise ValueError(f"file_offset is {offset}, outside of any file")
        files = self._opened(file, write, offset, span.nbytes)
        refuse_misaligned(files, span.address, offset, span.nbytes)
        return self._submit(write, span, files, offset)

    def _opened(self, file: Any, write: bool, offset: int, nbytes: int) -> Descriptors:
        """The file's descriptors, where this handle may use them so."""
        if not isinstance(file, AioFile):
            file = AioFile(file, "rw" if write else "r")
        files = file.descriptors()
        if write and not files.writable:
            raise AioError(
                errno.EBADF, "write refused", filename=files.path, offset=offset,
                length=nbytes, hint=transfer_hint(errno.EBADF, True, files.path),
            )  # fmt: skip
        if files.direct < 0 and self._requested in ("libaio", "ctypes-libaio"):
            raise BackendUnavailable(
                f"native AIO cannot read through the page cache without blocking ({files.path!r} "
                "is not open for O_DIRECT); use backend='auto' or 'threads' for this file",
                self.describe()["tried"],
                errno=errno.EOPNOTSUPP,
                filename=files.path,
            )
        return files

    def _submit(self, write: bool, span: Span, files: Descriptors, offset: int) -> IOFuture:
        future = IOFuture(self._claim, self.backend, write, span, files, offset)
        token = next(_tokens)
        with self._lock:
            self._usable()
            self._engine.poll()
            self._pending[token] = future
            try:
                future._begun(
                    self._engine.submit(token, write, files, span.address, offset, span.nbytes)
                )
            except Exception:  # not Ctrl-C: the engine may be at work on the request by then
                self._pending.pop(token, None)
                raise
        return future

    def stream(
        self, buffer: Any, file: AioFile | str | os.PathLike[str],
        ranges: Iterable[tuple[int, int]] | None = None, *, chunk: int | None = None,
        keep: int = 1,
    ) -> Stream:  # fmt: skip
        """Read `ranges` (offset, bytes; default: the whole file) in order through a small buffer.

        Iterating gives `(offset, view)`: views of the buffer with the next bytes, at most `chunk`
        of them (default: a quarter of the buffer), never of two ranges. A piece's content lasts
        until `keep` more have been asked for; its memory is then read into again at once, and
        reads run ahead as far as the buffer has room. `wait`, `cancel` and the requests in
        `stats` know nothing of streams. Raises what `pread` does, at the piece that failed.
        """
        self._usable()
        span = span_of(buffer, writable=True)
        if not isinstance(file, AioFile):
            file = AioFile(file)
        files = self._opened(file, False, 0, span.nbytes)
        checked = course(files, span, [(0, file.size)] if ranges is None else ranges, chunk, keep)
        with self._lock:
            self._usable()
            pieces: Pieces = (
                self._engine.stream(checked)
                if isinstance(self._engine, NativeEngine)
                else FuturePieces(functools.partial(self._submit, False), checked)
            )
            stream = Stream(self, pieces, checked)
            self._streams.add(stream)
        return stream

    def _owns_this_thread(self) -> bool:
        return self._engine.owns_this_thread()

    def _stream_ended(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _finish(self, token: int, ticket: Ticket) -> None:
        """Called once for each request, by the engine, when the kernel is done with its memory."""
        outcome = ticket.outcome()
        with self._lock:
            future = self._pending.pop(token)
            future._outcome = outcome
            future._wait_number = self._waits
            self._unclaimed += 1
            kind = "writes" if future.write else "reads"
            self._totals[kind] += 1
            moved = "written_bytes" if future.write else "read_bytes"
            self._totals[moved] += outcome.transferred
            if outcome.kind != "ok":
                self._failed.append(future)
                self._totals["failed"] += 1
        future._let_go()

    def _claim(self, future: IOFuture) -> None:
        """A caller has taken this future's result: wait() neither counts nor raises it again."""
        with self._lock:
            self._engine.poll()
            if future._claimed:
                return
            future._claimed = True
            if future._wait_number == self._waits:
                self._unclaimed -= 1
                if future in self._failed:
                    self._failed.remove(future)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all requests have ended; returns how many did since the last `wait`.

        Requests whose own `result` was taken do not count. If any failed, the first one's error
        is raised after all have ended, with the rest in its `others`. TimeoutError if `timeout`
        seconds pass; the requests then go on.
        """
        self._usable(closed_is_fine=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            pending = list(self._pending.values())
        for future in pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ticket = future._ticket
            if ticket is not None and not ticket.wait(left):
                still = sum(not each.done() for each in pending)
                raise TimeoutError(f"{still} requests have not ended after {timeout} s")
        with self._lock:
            self._engine.poll()
            count, failed = self._unclaimed, self._failed
            self._unclaimed, self._failed = 0, []
            self._waits += 1
        errors = [error for future in failed if isinstance(error := future.error(), AioError)]
        if errors:
            errors[0].others = errors[1:]
            raise errors[0]
        return count

    def describe(self) -> dict[str, Any]:
        """What was asked for, tried and chosen, and how requests are cut."""
        return {
            "requested": self._requested,
            "selected": self.backend,
            "tried": [dict(entry) for entry in self._tried],
            "block_size": self._shape.block_size,
            "queue_depth": self._shape.queue_depth,
            "intra_op_parallelism": self._shape.parallelism,
            "single_submit": self._shape.single_submit,
            "overlap_events": self._shape.overlap_events,
            **self._engine.describe(),
        }

    def stats(self) -> dict[str, int]:
        """Requests and bytes so far, what is in flight, and the engine's own counters."""
        with self._lock:
            self._engine.poll()
            return {**self._totals, "in_flight": len(self._pending), **self._engine.stats()}

    @property
    def closed(self) -> bool:
        """Whether the handle takes no more requests."""
        return self._closed

    def cancel(self) -> int:
        """Cancel what has not reached the kernel yet; returns how many requests will end so."""
        with self._lock:
            pending = list(self._pending.values())
        return sum(future.cancel() for future in pending)

    def close(self) -> None:
        """Take no more requests, wait for those under way, and end the engine; safe to call twice,
        and to call again where Ctrl-C broke it off.
        """
        if self._over or os.getpid() != self._pid:
            return
        with self._closing:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            pending = list(self._pending.values())
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        for future in pending:
            ticket = future._ticket
            if ticket is not None:
                ticket.wait(None)
        self._engine.close()
        with self._lock:
            self._engine.poll()
        self._over = True
        _handles.discard(self)

    def _shut_down(self) -> None:
        """Nobody will look at the results: drop reads, finish writes."""
        if self._over or os.getpid() != self._pid:
            return
        for future in list(self._pending.values()):
            if not future.write:
                future.cancel()
        self.close()

    def _usable(self, closed_is_fine: bool = False) -> None:
        if os.getpid() != self._pid:
            raise AioClosedError(
                f"this handle belongs to process {self._pid}, from which this one was forked; "
                "make a new AioHandle here, or start processes by 'spawn'"
            )
        if self._closed and not closed_is_fine:
            raise AioClosedError("the handle is closed", backend=self.backend)

    def __enter__(self) -> AioHandle:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()  # an error that nobody has seen yet
            else:
                self.cancel()
        finally:
            self.close()

    def __del__(self) -> None:
        if getattr(self, "_over", True):
            return
        if self._owns_this_thread():  # the garbage collector runs in any thread
            threading.Thread(target=self._shut_down, name="offload-aio-close").start()
        else:
            self._shut_down()

    def __repr__(self) -> str:
        shape = f"{self._shape.block_size} x {self._shape.queue_depth}"
        return f"AioHandle({getattr(self, 'backend', None)}, {shape})"


def within_limits(name: str, value: Any) -> bool:
    """Whether `AioHandle` takes the value for the argument of this name."""
    low, high = LIMITS[name]
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check(name: str, value: int) -> None:
    low, high = LIMITS[name]
    if not within_limits(name, value):
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")


@atexit.register
def _shut_down_all() -> None:
    for handle in list(_handles):
        handle._shut_down()


def _after_fork_in_child() -> None:
    regions.forget_listeners()
    for handle in list(_handles):
        for stream in list(handle._streams):
            stream._abandon()
        handle._engine.abandon()
    _handles.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
