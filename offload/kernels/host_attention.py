"""Decode attention on CPU cores, for sequences whose keys and values are in host memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from offload.kernels.host_library import (
    PATHS,
    PREFETCHES,
    HostLibrary,
    host_library,
    why_not_host,
)
from offload.kernels.host_pool import HostPool, default_pool
from offload.kernels.host_tensors import MOST_HEAD_DIM, OP, HostTensors
from offload.kernels.library import KernelError
from offload.kernels.scores import Scores

__all__ = ["MOST_HEAD_DIM", "HostAttention"]

Tensors = Sequence[torch.Tensor] | torch.Tensor


class HostAttention:
    """out = softmax(scores of the columns that each query sees) @ values, one query a sequence.

    query: [batch, heads, head_dim], float32, float16 or bfloat16, any strides but the last
    dimension's. keys, values: a tensor a sequence, [kv_heads, capacity of that sequence, head_dim],
    a head's columns next to each other, keys and values of a sequence with equal strides (or one
    tensor [batch, kv_heads, capacity, head_dim] each); all of one dtype: float32, float16,
    bfloat16, or int8 with key_scales and value_scales, float32 [kv_heads, capacity] a sequence,
    where value = scale * int. Query head h reads KV head h // (heads // kv_heads). out: as query,
    contiguous. All on the CPU; head_dim up to 512.

    length, start (default: zeros): int32 [batch], read when the call is started. Row b sees column
    j if start[b] <= j < length[b] and, with a window, j >= length[b] - window. A row that sees
    nothing gives zeros. Columns that are not seen may hold anything, NaN included. new_key,
    new_value: [batch, kv_heads, head_dim] of the query's dtype, any strides but the last
    dimension's; they become column length[b] - 1 of the caches first, rounded to their dtype (int8:
    symmetric, scale = largest magnitude / 127).

    `start()` returns at once, `wait()` when the result is there; `launch()` is both. Tensors must
    keep their places; what they hold may change between calls, not during one (but for length and
    start). The caches' bytes are read once whatever the group, split over the threads of `pool`
    (default: the process's own) in pieces that depend on shapes and lengths alone, and added in
    float32 in a fixed order: the same bits whatever the threads. Without the host library `start`
    runs the reference.

    `beside_stream`: copies from CPU memory run meanwhile, so only as many threads take part as
    HostPool.beside_stream says; else all do. `threads` tells how many.

    `path`, one of host_library.PATHS, forces the instructions; `chunk` the columns of a piece,
    `prefetch` and `prefetch_distance` (bytes) what is asked for ahead, for measurements; so is
    `read_only`: nothing is attended to, `checksum` is the sum of all 8-byte words of the keys and
    values that would be read, and for each 64 bytes so many `products` of vectors are made, of
    nothing: what arithmetic costs beside reading.

    Raises ValueError or TypeError for arguments that do not fit; `start` raises KernelError for a
    length beyond its sequence's capacity, or while the call is still running.
    """

    def __init__(
        self,
        query: torch.Tensor,
        keys: Tensors,
        values: Tensors,
        out: torch.Tensor,
        *,
        length: torch.Tensor,
        scores: Scores,
        start: torch.Tensor | None = None,
        key_scales: Tensors | None = None,
        value_scales: Tensors | None = None,
        new_key: torch.Tensor | None = None,
        new_value: torch.Tensor | None = None,
        pool: HostPool | None = None,
        beside_stream: bool = False,
        path: str = "auto",
        chunk: int = 0,
        prefetch: str = "auto",
        prefetch_distance: int = 0,
        read_only: bool = False,
        products: int = 0,
    ) -> None:
        self._tensors = HostTensors(
            query=query,
            keys=list(keys),
            values=list(values),
            out=out,
            length=length,
            scores=scores,
            start=start,
            key_scales=None if key_scales is None else list(key_scales),
            value_scales=None if value_scales is None else list(value_scales),
            new_key=new_key,
            new_value=new_value,
        )
        _check_how(path, chunk, prefetch, prefetch_distance)
        if products and not read_only:
            raise ValueError(f"{OP}: products={products} go with read_only alone")
        self._lock = threading.Lock()
        self._library: HostLibrary | None = None
        self._reference_seconds = 0.0
        self.threads = 1
        if why_not_host() is not None:
            if path != "auto" or pool is not None or read_only:
                host_library()  # raises: what was asked for cannot be had
            return
        self._library = host_library()
        self.pool = default_pool() if pool is None else pool
        self.threads = self.pool.threads
        if beside_stream:
            tensors = self._tensors
            self.threads = self.pool.beside_stream(tensors.group, tensors.cache_dtype)
        self.arguments = self._tensors.arguments()
        self.arguments.path = PATHS[path]
        self.arguments.chunk = chunk
        self.arguments.prefetch = PREFETCHES[prefetch]
        self.arguments.prefetch_distance = prefetch_distance
        self.arguments.threads = self.threads
        self.arguments.read_only = read_only
        self.arguments.products = products
        self._job = self._library.job_create()
        # A call that is dropped while it runs keeps its tensors until it is done.
        kept = (self.pool, self._tensors, self.arguments)
        weakref.finalize(self, _drop, self._library, self._job, kept)

    def start(self) -> None:
        """Begin; returns while the pool's threads work.

        Raises KernelError where lengths do not fit the caches, or the call is still running.
        """
        if self._library is None:
            begin = time.perf_counter()
            self._tensors.compute()
            self._reference_seconds = time.perf_counter() - begin
            return
        with self._lock:
            self._library.start(self.pool.handle, self._job, self.arguments)

    def wait(self) -> None:
        """Return when the result of the latest `start` is there; at once if nothing was started."""
        if self._library is not None:
            self._library.wait(self._job)

    def poll(self) -> None:
        """Return when `wait` would return at once, without sleeping until then; at once if no core
        is free for that. A host that sleeps meanwhile is slow at what it does next, by 0.2 ms a
        layer of a step on a virtual machine. Between two looks other threads may run.
        """
        spare = self.threads < len(os.sched_getaffinity(0))
        while spare and not self.done:
            pass

    def launch(self, stream: int = 0) -> None:
        """Start and wait; `stream` is for calls on a GPU."""
        self.start()
        self.wait()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._library is None or self._library.is_done(self._job)

    @property
    def seconds(self) -> float:
        """Of the latest call: from the first thread's begin to the last one's end."""
        if self._library is None:
            return self._reference_seconds
        return self._library.seconds(self._job)

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and scales that the latest call saw; 0 of a reference's."""
        return 0 if self._library is None else self._library.bytes_read(self._job)

    @property
    def checksum(self) -> int:
        """What the latest `read_only` call added up."""
        return 0 if self._library is None else self._library.checksum(self._job)


def _check_how(path: str, chunk: int, prefetch: str, prefetch_distance: int) -> None:
    if not 0 <= chunk < 2**31 or not 0 <= prefetch_distance < 2**31:
        raise ValueError(
            f"{OP}: chunk and prefetch_distance must be 0 (chosen) or more, not {chunk} and "
            f"{prefetch_distance}"
        )
    for name, value, known in (("path", path, PATHS), ("prefetch", prefetch, PREFETCHES)):
        if value not in known:
            raise ValueError(f"{OP}: {name} must be one of {', '.join(known)}, not {value!r}")


def _drop(library: HostLibrary, job: int, kept: Any) -> None:
    with contextlib.suppress(KernelError):  # forked: it runs in the other process
        library.wait(job)
    library.job_destroy(job)
