"""Host memory that a drive can fill and a GPU can copy from: aligned, huge pages, pinned."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from . import regions
from .errors import AioClosedError, whole
from .extension import _aio
from .mapping import HUGE_PAGE, Huge, Mapping
from .pinning import Chunk, Lock, Pin, release

# Lends the memory to memoryview and NumPy also before Python 3.12, which knows `__buffer__`.
_Exporter: type = _aio.BufferExporter if _aio is not None else object


class AlignedBuffer(_Exporter):
    """Memory from `alloc`: 2 MiB aligned, of exact size, populated and pinned chunk by chunk.

    A chunk is what one `populate` call covered, and it is pinned as one registration. The GPU
    can copy from any range inside one chunk; a copy that spans two is refused by CUDA, so a
    caller populates what it copies at once (a layer) as one chunk. `chunks` tells the borders.
    """

    def __init__(self, nbytes: int, huge: Huge, lock: Lock) -> None:
        super().__init__()
        nbytes = whole("nbytes", nbytes)
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        if nbytes > sys.maxsize:  # which C's sizes would take for a smaller number
            raise MemoryError(f"{nbytes} bytes are more than a process can have")
        if lock not in ("auto", "cuda", "mlock", False):
            raise ValueError(f"lock must be 'auto', 'cuda', 'mlock' or False, not {lock!r}")
        self.nbytes = nbytes
        self._mapping = Mapping(nbytes, huge)
        self._huge = huge
        self._guard = threading.Lock()
        self._pin = Pin(lock)
        self._chunks: list[Chunk] = []
        self._open_array()

    def _open_array(self) -> None:
        # Every view of the memory holds this array; the memory goes when the last view has gone.
        array = (ctypes.c_ubyte * self.nbytes).from_address(self._mapping.address)
        self._array: ctypes.Array[ctypes.c_ubyte] | None = array
        self._release = weakref.finalize(array, release, self._mapping, self._pin)
        # At exit the kernel takes it, after every thread has stopped.
        self._release.atexit = False

    @property
    def address(self) -> int:
        """Where the memory begins, a multiple of 2 MiB (of a page for less than that)."""
        self._live()
        return self._mapping.address

    @property
    def closed(self) -> bool:
        """Whether the memory was given up; views may still keep it."""
        return self._array is None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The populated ranges, by start."""
        with self._guard:
            return tuple(sorted(self._chunks, key=lambda chunk: chunk.start))

    @property
    def registered(self) -> bool:
        """Whether all of the buffer is pinned for the GPU."""
        return self._all("registered")

    @property
    def locked(self) -> bool:
        """Whether no part of the buffer can be swapped out."""
        return self._all("locked")

    @property
    def lock_reason(self) -> str:
        """How the memory is locked, or why it is not: the first chunk that is not speaks."""
        chunks = self.chunks
        if not chunks:
            return "not populated yet"
        bad = [c for c in chunks if not c.locked] or [c for c in chunks if not c.registered]
        return (bad or chunks)[0].reason

    @property
    def huge_share(self) -> float:
        """Share of the populated memory that huge pages back (from /proc/self/smaps)."""
        self._live()
        return self._mapping.huge_share()

    @property
    def huge_reason(self) -> str:
        """Which huge pages were asked for, or why there are none."""
        return self._mapping.reason

    @property
    def page_kind(self) -> str:
        """'hugetlb', 'thp' (asked for; `huge_share` tells what was granted) or '4K'."""
        return self._mapping.kind

    def _all(self, field: str) -> bool:
        at = 0
        for chunk in self.chunks:
            if chunk.start != at or not getattr(chunk, field):
                return False
            at = chunk.stop
        return at >= self.nbytes

    def is_pinned(self, start: int = 0, stop: int | None = None) -> bool:
        """Whether one copy of [start, stop) to the GPU lies inside one registration."""
        stop = self.nbytes if stop is None else stop
        return any(c.registered and c.start <= start and stop <= c.stop for c in self.chunks)

    def populate(self, start: int = 0, stop: int | None = None) -> Chunk:
        """Touch [start, stop) by several threads, then pin it as one chunk; safe in any thread.

        `start` is a multiple of 2 MiB, `stop` too or the buffer's end, so that no huge page
        belongs to two chunks. A range that cannot be pinned is still usable memory; the chunk
        says so. Raises MemoryError where the memory itself cannot be had.
        """
        self._live()
        array = self._array  # the memory must not go while it is being touched
        stop = self.nbytes if stop is None else stop
        if not 0 <= start < stop <= self.nbytes:
            raise ValueError(f"[{start}, {stop}) is not a range of this {self.nbytes}-byte buffer")
        if start % HUGE_PAGE or (stop % HUGE_PAGE and stop != self.nbytes):
            raise ValueError(
                f"[{start}, {stop}) must begin and end at a multiple of {HUGE_PAGE} bytes "
                "(or end with the buffer): a huge page cannot belong to two registrations"
            )
        with self._guard:
            for chunk in self._chunks:
                if start < chunk.stop and chunk.start < stop:
                    raise ValueError(
                        f"[{start}, {stop}) overlaps [{chunk.start}, {chunk.stop}), "
                        "which is populated already"
                    )
            # Claimed before the work, so that two threads cannot populate one range twice.
            claim = Chunk(start, stop, False, False, "being populated")
            self._chunks.append(claim)
        try:
            # Whole pages: the slack behind the last byte belongs to this mapping too.
            end = self._mapping.nbytes if stop == self.nbytes else stop
            self._mapping.touch(start, end)
            done = self._pin.pin(self._mapping.address, start, stop, end)
        except BaseException:
            with self._guard:
                self._chunks.remove(claim)
            raise
        with self._guard:
            self._chunks[self._chunks.index(claim)] = done
        self._pin.regions.append(regions.add(self._mapping.address + start, end - start))
        del array
        return done

    def _populate_first(self, sizes: Sequence[int]) -> None:
        at = 0
        for size in sizes:
            stop = min(at + size, self.nbytes)
            try:
                self.populate(at, stop)
            except MemoryError:
                # Reserved huge pages that a cgroup withholds: ordinary ones take their place.
                if at or self._mapping.kind != "hugetlb" or self._huge == "hugetlb":
                    raise
                self._release.detach()
                self._mapping.fall_back_to_small()
                self._open_array()
                self.populate(at, stop)
            at = stop

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """A writable view of [start, stop); the memory stays as long as the view does."""
        return memoryview(self._live()).cast("B")[start:stop]

    def tensor(self, start: int = 0, stop: int | None = None) -> Any:
        """A torch.uint8 tensor over [start, stop); the memory stays as long as the tensor does."""
        import torch

        return torch.frombuffer(self.view(), dtype=torch.uint8)[start:stop]

    def __buffer__(self, flags: int) -> memoryview:
        return self.view()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,), "typestr": "|u1", "version": 3, "data": self.view(),
        }  # fmt: skip

    def __dlpack__(self, **options: Any) -> Any:
        if "torch" in sys.modules:
            return self.tensor().__dlpack__(**options)
        import numpy

        return numpy.frombuffer(self.view(), dtype=numpy.uint8).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __len__(self) -> int:
        return self.nbytes

    def _live(self) -> ctypes.Array[ctypes.c_ubyte]:
        if self._array is None:
            raise AioClosedError("the buffer is closed")
        return self._array

    def close(self) -> None:
        """Give the memory up; views, tensors and requests that still use it keep it alive."""
        self._array = None

    def __enter__(self) -> AlignedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"AlignedBuffer({self.nbytes} bytes, closed)"
        pinned = sum(c.stop - c.start for c in self.chunks if c.registered)
        return f"AlignedBuffer({self.nbytes} bytes, {self.page_kind}, {pinned} pinned)"


def alloc(
    nbytes: int,
    *,
    huge: Huge = "auto",
    lock: Lock = "auto",
    populate: bool = True,
    chunks: Sequence[int] | None = None,
) -> AlignedBuffer:
    """`nbytes` bytes of memory for direct I/O and device copies, their content undefined.

    huge: "auto" (reserved huge pages, else transparent ones), "hugetlb", "thp" or False.
    lock: "auto" (cudaHostRegister where torch sees a GPU, else mlock if it is allowed), "cuda",
        "mlock" or False.
    populate: touch and pin everything now, as one chunk; False: nothing yet, call
        `buffer.populate(start, stop)` for each piece, also from a thread beside the reading.
    chunks: with populate, the sizes of the pieces to pin as one registration each (multiples of
        2 MiB, but for the last); a device copy may not span two.

    Memory that cannot be locked is usable all the same: `lock_reason` says why. Raises MemoryError
    or OSError where the memory itself cannot be had, ValueError or TypeError for arguments that do
    not fit.
    """
    buffer = AlignedBuffer(nbytes, huge, lock)
    if populate:
        sizes = [buffer.nbytes] if chunks is None else [whole("a chunk", x) for x in chunks]
        if sum(sizes) < nbytes:
            raise ValueError(f"chunks add up to {sum(sizes)} bytes, the buffer has {nbytes}")
        buffer._populate_first(sizes)
    elif chunks is not None:
        raise ValueError("chunks needs populate=True; call populate(start, stop) for each instead")
    return buffer
