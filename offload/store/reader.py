"""Brings file ranges to their place in memory or on the device, through a small ring of pinned
chunks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.aio import AioFile, AioHandle, IOFuture
from offload.device import ComputeDevice
from offload.errors import ClosedError, OffloadError
from offload.store.reads import ReadOp
from offload.trace import Track


@dataclass(eq=False, slots=True)
class ReadLoad:
    """A layer on its way. `done` is set once nothing of it will be written any more."""

    ops: Sequence[ReadOp]
    target: torch.Tensor
    after: Any
    done: threading.Event = field(default_factory=threading.Event)
    copied: Any = None
    error: BaseException | None = None
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Chunk:
    memory: torch.Tensor
    busy_until: Any = None
    asked: float = 0.0  # when the read into it was asked for


_END = object()


class Reader:
    """Reads loads in the order in which they were asked for, with `chunks` requests in flight.

    One thread submits requests, another hands finished ones to the device, so the drive has work
    while the last bytes of a layer are still being copied and the first of the next are being asked
    for.
    """

    def __init__(
        self,
        handle: AioHandle,
        files: dict[str, AioFile],
        chunks: Sequence[torch.Tensor],
        device: ComputeDevice,
    ) -> None:
        self._handle = handle
        self._files = files
        self._device = device
        self._closed = False
        self._free: queue.SimpleQueue[_Chunk] = queue.SimpleQueue()
        for memory in chunks:
            self._free.put(_Chunk(memory))
        self._asked: queue.SimpleQueue[ReadLoad | None] = queue.SimpleQueue()
        self._reading: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"offload-{name}", daemon=True)
            for name, run in (("submit", self._submit), ("deliver", self._deliver))
        ]
        for thread in self._threads:
            thread.start()

    def load(self, ops: Sequence[ReadOp], target: torch.Tensor, after: Any = None) -> ReadLoad:
        """Begin to bring `ops` to `target` (uint8); nothing is written before the point `after`."""
        load = ReadLoad(ops, target, after)
        self.begin(load)
        return load

    def begin(self, load: ReadLoad) -> None:
        """Begin a load that the caller has noted already: Ctrl-C then cannot lose it."""
        if self._closed:
            raise ClosedError("the weights were released by close(); call offload.run again")
        self._asked.put(load)

    def finish(self, load: ReadLoad) -> Any:
        """Wait until the load is on the device's queue; the point at which it has arrived."""
        load.done.wait()
        if load.error is not None:
            raise load.error
        if load.cancelled:
            raise OffloadError("a load was waited for that had been given up")
        return load.copied

    def drop(self, load: ReadLoad) -> None:
        """Give the load up; on return nothing of it is written any more."""
        if not load.done.is_set():
            load.cancelled = True
            load.done.wait()

    def close(self) -> None:
        """End both threads; loads still under way are dropped, and who waits for one is told."""
        self._closed = True
        self._asked.put(None)
        for thread in self._threads:
            # A collected model may be closed by whichever thread the collector ran in.
            if thread is not threading.current_thread():
                thread.join()
        while not self._free.empty():  # or their memory would live as long as this object
            self._free.get()

    def _submit(self) -> None:
        while (load := self._asked.get()) is not None:
            for op in load.ops:
                if self._closed and load.error is None:
                    load.error = ClosedError("the weights were released while they were read")
                if load.cancelled or load.error is not None:
                    break
                self._submit_one(load, op)
            self._reading.put((load, _END, None, None))
        self._reading.put(None)

    def _submit_one(self, load: ReadLoad, op: ReadOp) -> None:
        chunk = self._free.get()
        try:
            self._device.synchronize(chunk.busy_until)
            chunk.asked = time.perf_counter()
            future = self._handle.async_pread(
                chunk.memory[: op.nbytes], self._files[op.file], op.offset, op.nbytes
            )
        except BaseException as error:  # it belongs to whoever waits for the load
            load.error = error
            self._free.put(chunk)
        else:
            self._reading.put((load, op, chunk, future))

    def _deliver(self) -> None:
        while (item := self._reading.get()) is not None:
            load, op, chunk, future = item
            if op is _END:
                try:
                    load.copied = self._device.copied()
                except BaseException as error:
                    load.error = load.error or error
                load.done.set()
                continue
            try:
                self._deliver_chunk(load, op, chunk, future)
            except BaseException as error:
                load.error = load.error or error
            finally:
                self._free.put(chunk)

    def _deliver_chunk(self, load: ReadLoad, op: ReadOp, chunk: _Chunk, future: IOFuture) -> None:
        future.result()
        trace = self._device.trace
        if trace is not None:
            trace.host(Track.DISK, "read", chunk.asked, op.nbytes)
        if load.cancelled or load.error is not None:
            return
        for move in op.moves:
            self._device.copy(
                load.target[move.target : move.target + move.nbytes],
                chunk.memory[move.source : move.source + move.nbytes],
                load.after,
            )
            load.after = None
        chunk.busy_until = self._device.copied()
