"""CPU memory for keys and values: which sequences use it, and the blocks that are given out."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, Literal, NoReturn

import torch

from offload import aio
from offload.errors import BudgetError
from offload.memory_limits import host_memory_available
from offload.models.kv.host_columns import HostColumns, halves
from offload.row_copies import RowCopies
from offload.sizes import format_size


class HostKv:
    """Of all sequences in caches, `gpu_sequences` keep their keys and values on the compute device:
    the first ones of each batch, while there is room. The others keep theirs in CPU memory, in
    blocks: one for each layer of a cache, of `row_bytes` a sequence at least.

    Blocks that are given back serve later caches, since pinning them takes longer than a pass over
    the weights.
    """

    def __init__(
        self,
        gpu_sequences: int,
        row_bytes: int,
        copies: RowCopies,
        lock: Literal["auto", False],
        int8: bool = False,
        streamed: bool = False,
    ) -> None:
        """`int8`: codes are kept, with a scale a token and head, instead of the model's numbers.
        `streamed`: keys and values come up to the compute device for attention; else CPU cores
        attend to them.
        """
        self.int8, self.streamed = int8, streamed
        self.gpu_sequences = gpu_sequences
        self.copies = copies
        self.pageable = ""  # why a block could not be pinned, if so
        self._row_bytes = row_bytes
        self._lock = lock
        self._free: list[aio.AlignedBuffer] = []
        self._taking = threading.Lock()  # caches are reordered beside another thread's pass
        self._shares: weakref.WeakSet[GpuShare] = weakref.WeakSet()
        self._closed = False

    def share(self, batch: int) -> GpuShare:
        """Room on the compute device for a cache's first sequences, for as long as it is held."""
        with self._taking:
            room = self.gpu_sequences - sum(share.rows for share in self._shares)
            share = GpuShare(batch, min(batch, max(0, room)))
            self._shares.add(share)
        return share

    def borrow(self, nbytes: int, rows: int, share: GpuShare | None = None) -> HostBlock:
        """A block of so many bytes, for so many sequences, its content undefined. `share`: of the
        cache that it is for. Raises BudgetError, MemoryError.
        """
        buffer = self._find(nbytes)
        if buffer is None and (share is None or share.collected_for < nbytes):
            # Caches that nobody holds may not be collected yet. That takes a fifth of a second, and
            # frees the blocks of all their layers: once for a cache's layers is enough.
            gc.collect()
            if share is not None:
                share.collected_for = nbytes
            buffer = self._find(nbytes)
        if buffer is None:
            self._give_back()  # all of them are too small
            buffer = self._new(max(nbytes, rows * self._row_bytes))
        return HostBlock(self, buffer)

    def take_back(self, buffer: aio.AlignedBuffer) -> None:
        """Take a block back. Called from whichever thread the garbage collector runs in."""
        if self._closed:
            buffer.close()
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Give free blocks back to the system, and the others as they are returned."""
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        """Give free blocks back to the system, after the copies into caches that are gone."""
        with self._taking:
            free, self._free = self._free, []
        self.copies.drain()
        while free:
            free.pop().close()

    def _find(self, nbytes: int) -> aio.AlignedBuffer | None:
        """The smallest free block that is large enough."""
        with self._taking:
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            if not fitting:
                return None
            found = min(fitting, key=lambda buffer: buffer.nbytes)
            self._free.remove(found)
            return found

    def _new(self, nbytes: int) -> aio.AlignedBuffer:
        free = host_memory_available()
        if nbytes > free:
            raise BudgetError(
                f"keys and values of one layer need {format_size(nbytes)} of CPU memory and "
                f"{format_size(free)} are free: lower kv_on_cpu, batch_size or the length"
            )
        buffer = aio.alloc(nbytes, lock=self._lock)
        if self._lock and not buffer.registered:
            self.pageable = buffer.lock_reason
        return buffer


class GpuShare:
    """The first `rows` rows of a batch are on the compute device."""

    def __init__(self, batch: int, rows: int) -> None:
        self.batch, self.rows = batch, rows
        self.collected_for = 0  # bytes of a block for which garbage was last collected


class HostBlock:
    """A block that is given back when this object is collected."""

    def __init__(self, home: HostKv, buffer: aio.AlignedBuffer) -> None:
        self._buffer = buffer
        weakref.finalize(self, home.take_back, buffer).atexit = False

    def halves(
        self, shape: tuple[int, ...], dtype: torch.dtype, int8: bool = False
    ) -> tuple[HostColumns, HostColumns]:
        """Keys and values of that shape, their content undefined."""
        return halves(self._buffer.tensor(), shape, dtype, int8)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a cache has tensors of its own, and no block."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a cache with keys and values in CPU memory cannot be pickled: fill it without "
            "kv_on_cpu, or pickle the tokens and run them again"
        )
