"""Memory that cannot be swapped out, pinned for the GPU where there is one; and its giving back."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Literal

from . import regions, system
from .cudart import Cudart, cuda_state
from .hints import memlock_hint
from .mapping import Mapping

Lock = Literal["auto", "cuda", "mlock", False]


@dataclass(frozen=True)
class Chunk:
    """A populated range of a buffer: one registration, so one copy may lie anywhere inside it."""

    start: int
    stop: int
    registered: bool  # pinned for the GPU (cudaHostRegister)
    locked: bool  # cannot be swapped out (registered, or mlock)
    reason: str  # how, or why not


class Pin:
    """How one buffer's chunks are locked; remembers what to undo."""

    def __init__(self, kind: Lock) -> None:
        self.runtime: Cudart | None = None
        self.device: int | None = None
        self.why_not_cuda = "pinning for the GPU was not asked for"
        self.mlock = kind in ("auto", "mlock")
        self.pid = os.getpid()
        self.registered: list[int] = []
        self.regions: list[int] = []
        if kind in ("auto", "cuda"):
            self.runtime, self.device, self.why_not_cuda = cuda_state()

    def pin(self, base: int, start: int, stop: int, end: int) -> Chunk:
        """Lock [start, end) of the memory at `base`, whole pages, as the chunk [start, stop)."""
        address, nbytes = base + start, end - start
        reason = self.why_not_cuda
        if self.runtime is not None:
            failed = self.runtime.register(address, nbytes, self.device)
            if failed is None:
                self.registered.append(address)
                return Chunk(start, stop, True, True, "cudaHostRegister")
            reason = failed
        if not self.mlock:
            return Chunk(start, stop, False, False, reason)
        if system.libc.mlock(address, nbytes) == 0:
            return Chunk(start, stop, False, True, f"mlock ({reason})")
        why = os.strerror(ctypes.get_errno())
        return Chunk(
            start, stop, False, False, f"{reason}; mlock of {nbytes} bytes: {why}; {memlock_hint()}"
        )


def release(mapping: Mapping, pin: Pin) -> None:
    """Give memory back once nothing holds it: unannounced, unregistered, unmapped."""
    for region in pin.regions:
        regions.remove(region)
    if os.getpid() != pin.pid:
        return  # a forked child never had these pages (MADV_DONTFORK), nor the CUDA context
    _kept.append((mapping, pin))
    _give_back()


# Memory that CUDA has not let go of yet; asked for again whenever a buffer goes.
_kept: list[tuple[Mapping, Pin]] = []


def _give_back() -> None:
    for _ in range(len(_kept)):
        try:
            mapping, pin = _kept.pop(0)
        except IndexError:  # another thread's
            return
        runtime = pin.runtime
        if runtime is not None:
            pin.registered = [a for a in pin.registered if not runtime.unregister(a)]
        if pin.registered:
            _kept.append((mapping, pin))
        else:
            mapping.close()
