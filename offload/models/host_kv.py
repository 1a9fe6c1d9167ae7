"""CPU memory for keys and values: whose they are that go there, and the blocks that it comes in."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Literal

import torch

from offload import aio
from offload.errors import BudgetError
from offload.memory_limits import host_memory_available
from offload.row_copies import RowCopies
from offload.sizes import format_size


class HostKv:
    """The first `gpu_sequences` of every batch keep keys and values on the compute device, the
    others in CPU memory.

    That comes in blocks, one for a layer of a cache, of `block_bytes` at least, so that a cache
    after another finds the same ones again: pinning takes longer than a pass over the weights.
    """

    def __init__(
        self,
        gpu_sequences: int,
        block_bytes: int,
        copies: RowCopies,
        lock: Literal["auto", False],
    ) -> None:
        self.gpu_sequences = gpu_sequences
        self.copies = copies
        self._block_bytes = block_bytes
        self._lock = lock
        self._free: list[aio.AlignedBuffer] = []
        self._closed = False

    def below(self, batch: int) -> int:
        """How many of so many sequences keep theirs in CPU memory."""
        return max(0, batch - self.gpu_sequences)

    def borrow(self, nbytes: int) -> HostBlock:
        """A block of at least so many bytes, with any content. Raises BudgetError, MemoryError."""
        buffer = self._find(nbytes)
        if buffer is None:
            gc.collect()  # a cache that nobody has may not be known to be so
            buffer = self._find(nbytes)
        if buffer is None:
            while self._free:  # too small, all of them
                self._free.pop().close()
            buffer = self._new(max(nbytes, self._block_bytes))
        return HostBlock(self, buffer)

    def take_back(self, buffer: aio.AlignedBuffer) -> None:
        """What was borrowed; may be called by whichever thread the collector runs in."""
        if self._closed:
            buffer.close()
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Give free blocks back to the system, and others when they come back."""
        self._closed = True
        self.copies.drain()
        while self._free:
            self._free.pop().close()

    @property
    def pageable_reason(self) -> str:
        """Why a block that is free now could not be pinned, if so."""
        loose = [b for b in list(self._free) if not b.registered]
        return loose[0].lock_reason if self._lock and loose else ""

    def _find(self, nbytes: int) -> aio.AlignedBuffer | None:
        for i, buffer in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                return self._free.pop(i)
        return None

    def _new(self, nbytes: int) -> aio.AlignedBuffer:
        free = host_memory_available()
        if nbytes > free:
            raise BudgetError(
                f"keys and values of one layer need {format_size(nbytes)} of CPU memory and "
                f"{format_size(free)} are free: lower kv_on_cpu, batch_size or the length"
            )
        return aio.alloc(nbytes, lock=self._lock)


class HostBlock:
    """Memory that is given back when this object goes."""

    def __init__(self, home: HostKv, buffer: aio.AlignedBuffer) -> None:
        self._buffer = buffer
        weakref.finalize(self, home.take_back, buffer).atexit = False

    def halves(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of that shape."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        memory = self._buffer.tensor()
        keys, values = (memory[i * nbytes :][:nbytes].view(dtype).view(shape) for i in (0, 1))
        return keys, values

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a cache has tensors of its own, and no block."""
