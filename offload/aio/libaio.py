"""The engine over Linux native AIO: one thread owns each queue of the kernel's."""

from __future__ import annotations

import contextlib
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
from .libaio_calls import Calls, Iocb, IoEvent
from .mapping import Mapping
from .request import BOUNCE, BUFFERED, Request, Transfer, plan, settle
from .threads import ThreadPool

_CMD_PREAD, _CMD_PWRITE, _CMD_POLL = 0, 1, 5
_WAKEUP = (1 << 64) - 1  # the data of the iocb that watches the eventfd
_POLLIN = 1
_CACHE_THREADS = 16


class LibaioEngine:
    """The engine behind backend "ctypes-libaio": one thread owns the kernel's queue."""

    name = "ctypes-libaio"

    def __init__(
        self, shape: Shape, on_done: Callable[[int, Ticket], None], calls: Calls | None = None
    ) -> None:
        self._on_done = on_done
        self._shape = shape
        self._calls = calls or Calls()
        self._lane = Lane(shape.block_size)
        self._cache_lane = Lane(shape.block_size)
        self._cache_pool: ThreadPool | None = None
        self._pool_lock = threading.Lock()
        self._queues: list[_Queue] = []
        try:
            for _ in range(shape.parallelism):
                self._queues.append(_Queue(self._calls, shape, self._lane, self._put))
        except OSError:
            self.close()
            raise

    def submit(
        self, token: int, write: bool, files: Descriptors, address: int, offset: int, nbytes: int
    ) -> Request:
        request = Request(
            write, files, address, offset, nbytes, lambda ended: self._on_done(token, ended)
        )
        segments = plan(request)
        if any(segment.path == BUFFERED for segment in segments):
            self._cache()  # ahead of all: what is under way when this fails has no owner
        for segment in segments:
            if segment.path == BUFFERED:
                self._cache_lane.put(segment)
            else:
                self._lane.put(segment)
                for queue in self._queues:
                    queue.wake()
        return request

    def _cache(self) -> Lane:
        """Where threads take what goes through the page cache, on which io_submit would block."""
        with self._pool_lock:
            if self._cache_pool is None:
                threads = min(self._shape.queue_depth, _CACHE_THREADS)
                self._cache_pool = ThreadPool(self._cache_lane, threads, self._cache_lane.put_back)
        return self._cache_lane

    def _put(self, transfer: Transfer) -> None:
        try:
            lane = self._cache()
        except AioError:  # the queue's thread, which this is, has others to serve
            transfer.request.fail(errno.EAGAIN, "error", transfer.offset)
            transfer.request.settle(transfer.nbytes, moved=False)
        else:
            lane.put_back(transfer)

    def poll(self) -> None:
        """Nothing to collect: the queue's thread tells when a request ends."""

    def owns_this_thread(self) -> bool:
        in_pool = self._cache_pool is not None and self._cache_pool.owns_this_thread()
        return in_pool or any(queue.owns_this_thread() for queue in self._queues)

    def describe(self) -> dict[str, Any]:
        return {"calls": self._calls.source, "page_cache_transfers": "threads"}

    def stats(self) -> dict[str, int]:
        return {"system_calls": sum(queue.system_calls for queue in self._queues)}

    def close(self) -> None:
        self._lane.close()
        for queue in self._queues:
            queue.wake()
        for queue in self._queues:
            queue.join()
        self._cache_lane.close()
        if self._cache_pool is not None:
            self._cache_pool.join()

    def abandon(self) -> None:
        for queue in self._queues:
            queue.abandon()


class _Queue:
    """One kernel queue and the thread that fills and empties it."""

    def __init__(
        self, calls: Calls, shape: Shape, lane: Lane, reroute: Callable[[Transfer], None]
    ) -> None:
        self._calls = calls
        self._shape = shape
        self._lane = lane
        self._reroute = reroute
        self._depth = shape.queue_depth
        self._context = ctypes.c_void_p()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._blocks = (Iocb * (self._depth + 1))()
        self._pointers = (ctypes.POINTER(Iocb) * self._depth)()
        self._events = (IoEvent * (self._depth + 1))()
        self._free = list(range(self._depth))
        self._owners: list[Transfer | None] = [None] * self._depth
        self._pages: list[Mapping | None] = [None] * self._depth
        self._ready: list[Transfer] = []
        self._draining = False
        self.system_calls = 0
        code = -calls("io_setup", self._depth + 1, ctypes.byref(self._context))
        if code > 0:
            os.close(self._wakeup)
            raise OSError(code, f"io_setup: {os.strerror(code)}")
        code = self._watch()
        if code > 0:
            self._release()
            raise OSError(code, f"io_submit of a poll: {os.strerror(code)}")
        self._thread = threading.Thread(target=self._serve, name="offload-libaio", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more of them
            self._release()
            raise AioError(errno.EAGAIN, f"no I/O thread: {error}") from None

    def wake(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    def join(self) -> None:
        """Wait for the thread, which ends once the lane is closed and empty."""
        self._thread.join()
        # Not by the thread: who wakes it may come when it has ended.
        wakeup, self._wakeup = self._wakeup, -1
        if wakeup >= 0:
            os.close(wakeup)

    def owns_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def abandon(self) -> None:
        os.close(self._wakeup)

    def _release(self) -> None:
        """Of a queue without a thread."""
        self._calls("io_destroy", self._context)
        os.close(self._wakeup)

    def _watch(self) -> int:
        block = self._blocks[self._depth]
        ctypes.memset(ctypes.byref(block), 0, 64)
        block.data, block.opcode, block.fildes, block.buf = (
            _WAKEUP,
            _CMD_POLL,
            self._wakeup,
            _POLLIN,
        )
        one = (ctypes.POINTER(Iocb) * 1)(ctypes.pointer(block))
        return -self._calls("io_submit", self._context, 1, one)

    def _serve(self) -> None:
        while True:
            if not self._draining:
                self._fill()
            self._submit()
            if len(self._free) == self._depth and not self._ready and self._lane.drained():
                break
            self._reap()
        self._calls("io_destroy", self._context)
        for page in self._pages:
            if page is not None:
                page.close()

    def _fill(self) -> None:
        # With company, leave some of a request for the others.
        most = self._depth if self._shape.parallelism == 1 else max(1, self._depth // 4)
        while len(self._ready) < min(most, len(self._free)):
            transfer = self._lane.take(block=False)
            if transfer is None:
                break
            self._ready.append(transfer)

    def _submit(self) -> None:
        while self._ready and self._free:
            most = 1 if self._shape.single_submit else len(self._ready)
            count = min(most, len(self._ready), len(self._free))
            try:
                for i in range(count):
                    self._prepare(i, self._free[i], self._ready[i])
            except MemoryError:  # no page for a ragged end
                self._settle(self._ready.pop(i), -errno.ENOMEM)
                continue
            taken = self._calls("io_submit", self._context, count, self._pointers)
            self.system_calls += 1
            if taken > 0:
                # A batch may be taken in part; the next round submits the rest, and learns why.
                for slot, transfer in zip(self._free[:taken], self._ready[:taken], strict=True):
                    self._owners[slot] = transfer
                del self._free[:taken], self._ready[:taken]
            elif taken == -errno.EINTR:
                continue
            elif taken in (0, -errno.EAGAIN) and len(self._free) < self._depth:
                break  # completions make room
            else:
                # The first transfer's own failure; the ones behind it are none the worse.
                self._settle(self._ready.pop(0), taken or -errno.EAGAIN)
        self._draining = not self._shape.overlap_events and len(self._free) < self._depth

    def _prepare(self, i: int, slot: int, transfer: Transfer) -> None:
        block = self._blocks[slot]
        block.data = slot
        block.opcode = _CMD_PWRITE if transfer.request.write else _CMD_PREAD
        block.fildes = transfer.request.files.direct
        if transfer.path == BOUNCE:
            align = transfer.request.align
            page = self._pages[slot]
            if page is None or page.nbytes < align:
                page = self._pages[slot] = Mapping(align)
            block.buf, block.nbytes = page.address, align
            block.offset = transfer.offset // align * align
        else:
            block.buf, block.nbytes = transfer.address, transfer.nbytes
            block.offset = transfer.offset
        self._pointers[i] = ctypes.pointer(block)

    def _reap(self) -> None:
        got = self._calls(
            "io_getevents", self._context, 1, self._depth + 1, self._events, None
        )  # fmt: skip
        self.system_calls += 1
        for i in range(max(0, got)):
            event = self._events[i]
            if event.data == _WAKEUP:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
                self._watch()
                continue
            slot = event.data
            transfer = self._owners[slot]
            assert transfer is not None
            self._owners[slot] = None
            self._free.append(slot)
            self._settle(transfer, self._copied(slot, transfer, event.res))
        if len(self._free) == self._depth:
            self._draining = False

    def _copied(self, slot: int, transfer: Transfer, result: int) -> int:
        if transfer.path != BOUNCE or result < 0:
            return result
        page = self._pages[slot]
        assert page is not None
        skip = transfer.offset % transfer.request.align
        kept = max(0, min(result - skip, transfer.nbytes))
        ctypes.memmove(transfer.address, page.address + skip, kept)
        return kept

    def _settle(self, transfer: Transfer, result: int) -> None:
        left = settle(transfer, result)
        if left is None:
            return
        if left.again:
            time.sleep(0.005)
        if left.path == BUFFERED:
            self._reroute(left)
        else:
            self._ready.append(left)
