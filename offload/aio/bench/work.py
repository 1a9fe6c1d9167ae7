"""One trial of this package's engine: what is to be moved, and how fast it went."""

from __future__ import annotations

import errno
import resource
import time
from dataclasses import dataclass

from ..buffer import AlignedBuffer
from ..file import AioFile
from ..future import IOFuture
from ..handle import AioHandle

GIB = 1 << 30
PAGE = 4096
_REQUEST = 1 << 20


@dataclass(frozen=True)
class Work:
    """What is moved, and in which pieces."""

    path: str
    nbytes: int  # in all; a multiple of the block
    block: int  # bytes of one transfer
    depth: int  # transfers in flight for each thread
    threads: int = 1  # I/O threads
    write: bool = False
    pattern: str = "sequential"  # or "layers"
    layer: int = 64 << 20  # of pattern "layers": bytes of one request, two in flight

    @property
    def pool(self) -> int:
        """Bytes of memory that the data passes through: the footprint that peers get too."""
        if self.pattern == "layers":
            return 2 * (self.layer + PAGE)
        return self.block * self.depth * self.threads


@dataclass(frozen=True)
class Trial:
    """How one run of a work went."""

    gbps: float  # 10^9 bytes a second
    cpu: float  # milliseconds of CPU (user and system, all threads) for each GiB
    pages: str  # what backs the memory


def run(work: Work, backend: str, pool: AlignedBuffer) -> Trial:
    """Move the work's bytes once through `pool`."""
    with (
        AioFile(work.path, "rw" if work.write else "r") as file,
        AioHandle(work.block, work.depth, backend, intra_op_parallelism=work.threads) as handle,
    ):
        ranges = _layers(work) if work.pattern == "layers" else _requests(work)
        # A first request sets up what is set up once: registered memory, threads.
        _move(handle, work.write, pool.view(0, min(work.block, PAGE)), file, 0).result()
        before, start = _cpu(), time.perf_counter()
        if work.pattern == "sequential" and not work.write:
            _read_in_order(work, handle, file, pool, ranges)
        else:
            _move_all(work, handle, file, pool, ranges)
        if work.write:
            file.fsync()
        seconds = time.perf_counter() - start
        used = _cpu() - before
    pages = pool.page_kind if pool.page_kind != "thp" else f"thp {pool.huge_share:.0%}"
    moved = sum(nbytes for _, nbytes in ranges.spans)
    return Trial(moved / seconds / 1e9, used * 1e3 / (moved / GIB), pages)


def _read_in_order(
    work: Work, handle: AioHandle, file: AioFile, pool: AlignedBuffer, ranges: _Ranges
) -> None:
    with handle.stream(pool, file, [(0, work.nbytes)], chunk=ranges.slots[0][1]) as stream:
        for _, view in stream:
            view.release()
        if stream.nbytes != work.nbytes:
            raise OSError(errno.EIO, f"{stream.nbytes} of {work.nbytes} bytes were read")


def _move_all(
    work: Work, handle: AioHandle, file: AioFile, pool: AlignedBuffer, ranges: _Ranges
) -> None:
    in_flight: list[tuple[int, IOFuture]] = []
    free = [at for at, _ in ranges.slots]
    for offset, nbytes in ranges.spans:
        if not free:
            slot, future = in_flight.pop(0)
            future.result()
            free.append(slot)
        slot = free.pop()
        view = pool.view(slot, slot + nbytes)
        in_flight.append((slot, _move(handle, work.write, view, file, offset)))
    for _, future in in_flight:
        future.result()


@dataclass(frozen=True)
class _Ranges:
    slots: list[tuple[int, int]]  # start and bytes of the pool's parts
    spans: list[tuple[int, int]]  # offset and bytes of each request, in order


def _requests(work: Work) -> _Ranges:
    """Requests of one block; where blocks are small, of up to 1 MiB and a quarter of the pool.

    One block a request is what fio does; from Python, 128 KiB blocks would then measure Python.
    """
    each = max(1, min(work.depth * work.threads // 4, _REQUEST // work.block))
    size = work.block * each
    slots = [(at, size) for at in range(0, work.pool - size + 1, size)]
    return _Ranges(slots, [(at, min(size, work.nbytes - at)) for at in range(0, work.nbytes, size)])


def _layers(work: Work) -> _Ranges:
    """Requests as the weight stream makes them: the page-aligned superset of odd runs."""
    slots = [(0, work.layer + PAGE), (work.layer + PAGE, work.layer + PAGE)]
    spans = []
    for at in range(0, work.nbytes, work.layer):
        start = at // PAGE * PAGE
        stop = min(-(-(at + work.layer + 848) // PAGE) * PAGE, work.nbytes)
        spans.append((start, min(stop - start, work.layer + PAGE)))
    return _Ranges(slots, spans)


def _move(handle: AioHandle, write: bool, view: memoryview, file: AioFile, offset: int) -> IOFuture:
    return (handle.async_pwrite if write else handle.async_pread)(view, file, offset)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
