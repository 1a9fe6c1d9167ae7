"""Python threads that call preadv and pwritev: the engine that needs nothing but Python."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .engine import Shape, Ticket
from .errors import AioError
from .file import Descriptors
from .lane import Lane
from .mapping import Mapping
from .request import BOUNCE, BUFFERED, Request, Transfer, plan, settle

_MAX_THREADS = 64


class ThreadPool:
    """Threads that serve one lane until it is closed and empty. Raises AioError where the process
    may have none.
    """

    def __init__(self, lane: Lane, threads: int, reroute: Callable[[Transfer], None]) -> None:
        self._lane = lane
        self._reroute = reroute
        self.calls = 0
        self._threads: list[threading.Thread] = []
        for i in range(threads):
            thread = threading.Thread(target=self._serve, name=f"offload-aio-{i}", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more of them
                self._threads.pop()
                if not self._threads:
                    raise AioError(errno.EAGAIN, f"no I/O thread: {error}") from None
                break  # fewer are slower, and do the same

    def __len__(self) -> int:
        return len(self._threads)

    def _serve(self) -> None:
        bounce: list[Mapping] = []  # made at ragged ends, larger ones first: most need none
        while self._serve_one(bounce):
            pass
        for page in bounce:
            page.close()

    def _serve_one(self, bounce: list[Mapping]) -> bool:
        # In a frame of its own: a thread that waits must not hold on to its last transfer,
        # and so to a file and a buffer.
        transfer = self._lane.take(block=True)
        if transfer is None:
            return False
        try:
            if transfer.path == BOUNCE:
                align = transfer.request.align
                if not bounce or bounce[0].nbytes < align:
                    bounce.insert(0, Mapping(align))
            result = move(transfer, bounce[0] if bounce else None)
        except MemoryError:  # a thread that died of it would leave its request waiting for ever
            result = -errno.ENOMEM
        left = settle(transfer, result)
        self.calls += 1
        if left is not None:
            if left.again:
                time.sleep(0.005)
            self._reroute(left)
        return True

    def owns_this_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def move(transfer: Transfer, bounce: Mapping | None) -> int:
    """Do one transfer by one system call; returns bytes or -errno."""
    request = transfer.request
    files = request.files
    fd = files.buffered if transfer.path == BUFFERED else files.direct
    try:
        if transfer.path == BOUNCE:
            assert bounce is not None
            return read_through(transfer, bounce, lambda view, at: os.preadv(fd, [view], at))
        view = (ctypes.c_ubyte * transfer.nbytes).from_address(transfer.address)
        if request.write:
            return os.pwritev(fd, [view], transfer.offset)
        return os.preadv(fd, [view], transfer.offset)
    except OSError as error:
        return -(error.errno or 5)


def read_through(transfer: Transfer, bounce: Mapping, read: Callable[[Any, int], int]) -> int:
    """Read the aligned page around a ragged end, copy what was asked for; returns its bytes."""
    align = transfer.request.align
    start = transfer.offset // align * align
    got = read((ctypes.c_ubyte * align).from_address(bounce.address), start)
    skip = transfer.offset - start
    kept = max(0, min(got - skip, transfer.nbytes))
    ctypes.memmove(transfer.address, bounce.address + skip, kept)
    return kept


class ThreadEngine:
    """The engine behind backend "python-threads"."""

    name = "python-threads"

    def __init__(self, shape: Shape, on_done: Callable[[int, Ticket], None]) -> None:
        self._on_done = on_done
        self._lane = Lane(shape.block_size)
        threads = min(shape.queue_depth * shape.parallelism, _MAX_THREADS)
        self._pool = ThreadPool(self._lane, threads, self._lane.put_back)

    def submit(
        self, token: int, write: bool, files: Descriptors, address: int, offset: int, nbytes: int
    ) -> Request:
        request = Request(
            write, files, address, offset, nbytes, lambda ended: self._on_done(token, ended)
        )
        for segment in plan(request):
            self._lane.put(segment)
        return request

    def poll(self) -> None:
        """Nothing to collect: a thread that ends a request says so itself."""

    def describe(self) -> dict[str, Any]:
        return {"threads": len(self._pool)}

    def stats(self) -> dict[str, int]:
        return {"system_calls": self._pool.calls}

    def owns_this_thread(self) -> bool:
        return self._pool.owns_this_thread()

    def close(self) -> None:
        """End the threads; the caller has cancelled or awaited all requests."""
        self._lane.close()
        self._pool.join()

    def abandon(self) -> None:
        """In a forked child there is nothing to end: its parent's threads are not here."""
