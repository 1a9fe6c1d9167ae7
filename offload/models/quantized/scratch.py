"""The memory in which weights are made whole while they are used, one module's after another's."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.kernels.call import current_stream
from offload.store import POISON, POISON_BYTE
from offload.store.layout import align


class Scratch:
    """Memory that the modules of one model share.

    Filling it and reading it are work of one stream, in whose order one module's weights follow
    another's; a stream that takes over waits for the one before. `lock` is held by the thread that
    uses it, and `top` is the end of what it uses. `holds` are the objects whose weights are in it.
    """

    def __init__(self) -> None:
        self.nbytes = 0  # that it takes
        self.peak = 0  # the same, and what filling it takes besides
        self.lock = threading.RLock()
        self.top = 0
        self.holds: set[object] = set()
        self._poison = os.environ.get(POISON) == "1"
        self._memory: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        _scratches.add(self)

    def need(self, nbytes: int, beside: int = 0) -> None:
        """Announce, before its first use, a use of `nbytes` that takes `beside` more while it is
        filled.
        """
        self.nbytes = max(self.nbytes, align(nbytes))
        self.peak = max(self.peak, align(nbytes) + beside)

    def view(
        self, offset: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of this shape, `offset` bytes from the start, its content undefined."""
        memory = self._memory
        if memory is None or memory.device != device or memory.numel() < self.nbytes:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()  # what stays must be no part of a cached block
            self._memory = memory = None  # first: both would be there at once
            raw = torch.empty(self.nbytes + align(1), dtype=torch.uint8, device=device)
            skip = -raw.data_ptr() % align(1)
            memory = self._memory = raw[skip : skip + self.nbytes]
            self.poison()
        return memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def poison(self) -> None:
        """In tests: fill it with NaN, which reads of anything not made since then find."""
        if self._poison and self._memory is not None:
            self._memory.fill_(POISON_BYTE)

    @contextmanager
    def taken(self, device: torch.device) -> Iterator[None]:
        """Reserve it for this thread and the current stream of `device` in this block."""
        with self.lock:
            self.stream(device)
            yield

    def stream(self, device: torch.device) -> int:
        """The number of the current stream, which may use the memory from now on."""
        number, before = current_stream(device), self._stream
        if device.type != "cuda" or (before is not None and before.cuda_stream == number):
            return number
        if not torch.cuda.is_current_stream_capturing():  # nothing runs yet then
            stream = torch.cuda.current_stream(device)
            if before is not None and before.device == stream.device:
                stream.wait_stream(before)
                if self._memory is not None:
                    self._memory.record_stream(stream)
            self._stream = stream
        return number

    def release(self) -> None:
        """Give the memory back."""
        self._memory = self._stream = None
        self.holds.clear()


_scratches: weakref.WeakSet[Scratch] = weakref.WeakSet()


def _unlock_after_fork() -> None:
    """A thread that held a lock does not come along into a forked process to release it."""
    for scratch in list(_scratches):
        scratch.lock = threading.RLock()
        scratch.top = 0


os.register_at_fork(after_in_child=_unlock_after_fork)
