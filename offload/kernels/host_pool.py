"""The threads that compute on CPU cores: pinned, waiting for work, one job after another."""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Sequence

import torch

from offload.kernels.cores import worker_cpus
from offload.kernels.host_library import host_library

__all__ = ["HostPool", "default_pool"]

SPIN_US = 50
# Shares of the threads by products per two bytes of the caches, and at most so many. On 16 cores of
# an Emerald Rapids (14 threads), beside a stream of 55 GB/s: 1 (bf16) 10 threads read 100 GB/s and
# leave 0.96 of it, 12 read 109 and leave 0.89, 14 read 96 and leave 0.87; 2 (int8) 12 read 84 and
# leave 0.96, 10 read 76, 14 read 84 and leave 0.92.
BESIDE = ((1, 0.7), (2, 0.85))
WIDE = ("avx512", "avx512_bf16", "amx")  # paths whose arithmetic is that cheap
# Groups of so many queries go through tiles where there are any. Up to eight over bf16 go in
# blocks, whose arithmetic adds to what memory takes: on average of six runs 10 threads read 75 GB/s
# and leave 0.95 of the stream, 11 read 79 and leave 0.94, 12 read 83 and leave 0.91, 14 read 92 and
# leave 0.89. A whole model waited for its cores where 10 attended.
TILES_FROM, BESIDE_TILES = 4, 0.85
BLOCKS_TO, BESIDE_BLOCKS = 8, 0.75


class HostPool:
    """Threads of the host library, each pinned to a CPU.

    cpus: a thread on each (default: one on every physical core that the process may use, by
    affinity and cgroup, but for `spare` ones; see cores.worker_cpus). Between jobs a thread spins
    for `spin_us` microseconds and then sleeps. Jobs run in the order in which they were started,
    from whichever Python thread. A process that was forked has none of the pool's threads: starting
    something on it there raises KernelError, and `default_pool` makes a new one.

    Raises KernelError where there is no host library or a CPU may not be used.
    """

    def __init__(
        self,
        cpus: Sequence[int] | None = None,
        *,
        spare: int | None = None,
        spin_us: int = SPIN_US,
    ) -> None:
        self._library = host_library()
        self.cpus = tuple(worker_cpus(spare) if cpus is None else cpus)
        self.handle = self._library.pool_create(self.cpus, spin_us)
        # At exit pools are closed only: a daemon thread may still hold one.
        weakref.finalize(self, self._library.pool_destroy, self.handle).atexit = False
        _open.add(self)

    @property
    def threads(self) -> int:
        """How many there are."""
        return len(self.cpus)

    def beside_stream(self, group: int, dtype: torch.dtype) -> int:
        """How many of the threads a call of `group` queries a KV head over caches of `dtype` takes
        while copies from CPU memory run. Where memory and not arithmetic is the limit, more threads
        than it takes to keep memory busy only delay the copies, and each other.
        """
        path = self._library.paths()[-1]
        if path == "amx" and group >= TILES_FROM and dtype in (torch.bfloat16, torch.int8):
            blocks = group <= BLOCKS_TO and dtype == torch.bfloat16
            return math.ceil((BESIDE_BLOCKS if blocks else BESIDE_TILES) * self.threads)
        if path in WIDE:
            work = group * 2 / dtype.itemsize
            for most, share in BESIDE:
                if work <= most:
                    return math.ceil(share * self.threads)
        return self.threads

    def close(self) -> None:
        """Let what was started finish, and end the threads; the pool takes no more then."""
        self._library.pool_close(self.handle)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostPool(cpus={list(self.cpus)})"


_open: weakref.WeakSet[HostPool] = weakref.WeakSet()
_lock = threading.Lock()
_default: HostPool | None = None


def default_pool() -> HostPool:
    """The process's own pool, made when it is first asked for."""
    global _default
    with _lock:
        if _default is None:
            _default = HostPool()
        return _default


def _close_all() -> None:
    for pool in list(_open):
        pool.close()


def _forget() -> None:
    """In a forked process: no thread came along, and whoever held the lock is not there."""
    global _default, _lock
    _default, _lock = None, threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget)
