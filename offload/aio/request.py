"""One read or write: how it is cut into transfers, and the account of its bytes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .errors import AlignmentError
from .file import PAGE, Descriptors

# How the bytes of a transfer move.
DIRECT = "direct"  # O_DIRECT between the drive and the caller's memory
BUFFERED = "buffered"  # through the page cache
BOUNCE = "bounce"  # O_DIRECT into a page of our own, then copied: the ends of a read

_MAX_AGAIN = 200  # EAGAIN (the kernel is short of memory) is given about a second
_MAX_STALLS = 2


@dataclass
class Segment:
    """Bytes [at, stop) of a request that move the same way, not yet cut into transfers."""

    request: Request
    path: str
    at: int
    stop: int


@dataclass
class Transfer:
    """What one system call moves: `nbytes` at `at` (counted from the request's first byte)."""

    request: Request
    path: str
    at: int
    nbytes: int
    again: int = 0
    stalls: int = 0

    @property
    def offset(self) -> int:
        return self.request.offset + self.at

    @property
    def address(self) -> int:
        return self.request.address + self.at


@dataclass(frozen=True)
class Outcome:
    """How a request ended: errno 0 and all bytes, or what went wrong and where."""

    errno: int
    kind: str  # "ok", "error", "short" or "cancelled"
    offset: int
    transferred: int


class Request:
    """A read or write of `nbytes` at `offset`; every byte is settled exactly once."""

    def __init__(
        self,
        write: bool,
        files: Descriptors,
        address: int,
        offset: int,
        nbytes: int,
        on_done: Callable[[Request], None],
    ) -> None:
        self.write = write
        self.files = files
        self.address = address
        self.offset = offset
        self.nbytes = nbytes
        self.align = max(PAGE, files.offset_align)
        self._on_done = on_done
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._unsettled = nbytes
        self._moved = 0
        self._failure: tuple[int, str, int] | None = None
        if nbytes == 0:
            self._end()

    @property
    def failed(self) -> bool:
        """Whether what has not been submitted yet should be dropped."""
        return self._failure is not None

    def settle(self, nbytes: int, moved: bool) -> None:
        """Account for bytes that have moved, or never will."""
        with self._lock:
            self._unsettled -= nbytes
            if moved:
                self._moved += nbytes
            ended = self._unsettled == 0
        if ended:
            self._end()

    def fail(self, code: int, kind: str, offset: int) -> None:
        """Record the first failure; what is in flight still runs to its end."""
        with self._lock:
            if self._failure is None and self._unsettled:
                self._failure = (code, kind, offset)

    def _end(self) -> None:
        # The owner hears of it first: who waits for the request finds its accounts in order.
        try:
            self._on_done(self)
        finally:
            self._ended.set()

    def cancel(self) -> bool:
        """Drop what was not submitted yet; False where the request has ended already."""
        with self._lock:
            if self._unsettled == 0:
                return False
            if self._failure is None:
                self._failure = (errno.ECANCELED, "cancelled", self.offset)
            return self._failure[1] == "cancelled"

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None) -> bool:
        return self._ended.wait(timeout)

    def outcome(self) -> Outcome:
        if self._failure is None:
            return Outcome(0, "ok", self.offset, self._moved)
        code, kind, offset = self._failure
        return Outcome(code, kind, offset, self._moved)


def plan(request: Request) -> list[Segment]:
    """The segments of a request: an aligned middle past the page cache, its ends by other ways.

    Direct and buffered transfers never share a page: the kernel would read the page into its
    cache, and write the stale copy back over what went past it.
    """
    files, stop = request.files, request.nbytes
    if stop == 0:
        return []
    if files.strict:  # the handle has made sure that all of it is aligned
        return [Segment(request, DIRECT, 0, stop)]
    first = -request.offset % request.align  # bytes up to the first aligned offset
    last = (request.offset + stop) // request.align * request.align - request.offset
    skewed = (request.address + first) % files.mem_align != 0
    if files.direct < 0 or skewed:
        return [Segment(request, BUFFERED, 0, stop)]
    # A write's ends go through the page cache: reading, changing and writing back whole pages
    # would lose a neighbour's bytes when two requests meet inside one page.
    ends = BUFFERED if request.write else BOUNCE
    if last <= first:
        # Less than one aligned page, or two parts of neighbouring pages.
        cut = min(first, stop) if first else stop
        parts = [(ends, 0, cut), (ends, cut, stop)]
    else:
        parts = [(ends, 0, first), (DIRECT, first, last), (ends, last, stop)]
    return [Segment(request, path, at, end) for path, at, end in parts if at < end]


def misaligned(files: Descriptors, address: int, offset: int, nbytes: int) -> str | None:
    """What stands against moving this range by O_DIRECT alone, or None."""
    if offset % files.offset_align:
        return f"offset {offset} is no multiple of {files.offset_align}"
    if nbytes % files.offset_align:
        return f"length {nbytes} is no multiple of {files.offset_align}"
    if address % files.mem_align:
        return f"the memory's address {address:#x} is no multiple of {files.mem_align}"
    return None


def refuse_misaligned(files: Descriptors, address: int, offset: int, nbytes: int) -> None:
    """Raise AlignmentError where a file opened with direct=True cannot take a range."""
    fault = misaligned(files, address, offset, nbytes) if files.strict else None
    if fault is not None:
        raise AlignmentError(
            errno.EINVAL, f"{fault}, and the file was opened with direct=True",
            filename=files.path, offset=offset, length=nbytes,
            hint="align it, or open the file with direct='auto'",
        )  # fmt: skip


def settle(transfer: Transfer, result: int) -> Transfer | None:
    """Account for a system call's result (bytes, or -errno); returns what is still to be moved."""
    request = transfer.request
    if result == transfer.nbytes:
        request.settle(transfer.nbytes, moved=True)
        return None
    if result < 0:
        return _after_error(transfer, -result)
    if request.failed:
        _give_up(transfer, moved=result)
        return None
    # Short. What is left is tried again, at an aligned place, until the end of the file shows.
    kept = result if transfer.path == BUFFERED else result // request.align * request.align
    if kept == 0:
        transfer.stalls += 1
        ended = result == 0 and not request.write
        if ended or transfer.stalls > _MAX_STALLS:
            kind = "error" if request.write else "short"
            code = errno.EIO if request.write else errno.ENODATA
            request.fail(code, kind, transfer.offset + result)
            _give_up(transfer, moved=result)
            return None
        return transfer
    request.settle(kept, moved=True)
    return Transfer(request, transfer.path, transfer.at + kept, transfer.nbytes - kept)


def _after_error(transfer: Transfer, code: int) -> Transfer | None:
    request = transfer.request
    if not request.failed:
        if code == errno.EINTR:
            return transfer
        if code == errno.EAGAIN and transfer.again < _MAX_AGAIN:
            transfer.again += 1
            return transfer
        if code == errno.EINVAL and transfer.path != BUFFERED and not request.files.strict:
            # The file system took O_DIRECT at the trial read and refuses it here.
            return Transfer(request, BUFFERED, transfer.at, transfer.nbytes)
        request.fail(code, "error", transfer.offset)
    _give_up(transfer, moved=0)
    return None


def _give_up(transfer: Transfer, moved: int) -> None:
    if moved:
        transfer.request.settle(moved, moved=True)
    if transfer.nbytes > moved:
        transfer.request.settle(transfer.nbytes - moved, moved=False)
