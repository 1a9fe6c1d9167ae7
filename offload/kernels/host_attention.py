"""Decode attention on CPU cores, for sequences whose keys and values are in host memory."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import torch

from offload.kernels import reference
from offload.kernels.cache_checks import check_columns
from offload.kernels.call import check, check_equal_strides, pointer, stride_of
from offload.kernels.host_library import (
    CACHE_DTYPES,
    PATHS,
    PREFETCHES,
    QUERY_DTYPES,
    HostAttentionStruct,
    HostLibrary,
    host_library,
    why_not_host,
)
from offload.kernels.host_pool import HostPool, default_pool
from offload.kernels.library import KernelError
from offload.kernels.scores import Scores

__all__ = ["HostAttention"]

OP = "host_attention"
MOST_HEAD_DIM = 512

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
    `read_only`: nothing is computed, `checksum` is the sum of all 8-byte words of the keys and
    values that would be read.

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
    ) -> None:
        batch, heads, head_dim = _check_query(query)
        self._keys, self._values = list(keys), list(values)
        kv_heads, cache_dtype = _check_caches(query, self._keys, self._values)
        self._scales = _check_scales(self._keys, cache_dtype, key_scales, value_scales)
        check(OP, "out", out, (batch, heads, head_dim), query)
        check(OP, "length", length, (batch,), query, dtype=torch.int32)
        if start is not None:
            check(OP, "start", start, (batch,), query, dtype=torch.int32)
        scores.check(OP, heads, query)
        _check_new(query, kv_heads, new_key, new_value)
        if not 0 <= chunk < 2**31 or not 0 <= prefetch_distance < 2**31:
            raise ValueError(
                f"{OP}: chunk and prefetch_distance must be 0 (chosen) or more, not {chunk} and "
                f"{prefetch_distance}"
            )
        for name, value, known in (("path", path, PATHS), ("prefetch", prefetch, PREFETCHES)):
            if value not in known:
                raise ValueError(f"{OP}: {name} must be one of {', '.join(known)}, not {value!r}")

        self._query, self._out, self._length, self._start = query, out, length, start
        self._new, self._scores = (new_key, new_value), scores
        self._lock = threading.Lock()
        self._library: HostLibrary | None = None
        self.threads = 1
        if why_not_host() is not None:
            if path != "auto" or pool is not None or read_only:
                host_library()  # raises: what was asked for cannot be had
            return
        self._library = host_library()
        self.pool = default_pool() if pool is None else pool
        self.threads = self.pool.threads
        if beside_stream:
            self.threads = self.pool.beside_stream(heads // kv_heads, cache_dtype)
        arguments = HostAttentionStruct(
            query=pointer(query),
            output=pointer(out),
            new_key=pointer(new_key),
            new_value=pointer(new_value),
            keys=_addresses(self._keys),
            values=_addresses(self._values),
            head_strides=(c_int64 * batch)(*(stride_of(k, 0) for k in self._keys)),
            capacities=(c_int32 * batch)(*(k.shape[1] for k in self._keys)),
            length=pointer(length),
            start=pointer(start),
            slopes=pointer(scores.slopes),
            sinks=pointer(scores.sinks),
            query_batch_stride=stride_of(query, 0),
            query_head_stride=stride_of(query, 1),
            scale=scores.scale,
            softcap=scores.softcap,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=scores.window,
            query_dtype=QUERY_DTYPES[query.dtype],
            cache_dtype=CACHE_DTYPES[cache_dtype],
            path=PATHS[path],
            chunk=chunk,
            prefetch=PREFETCHES[prefetch],
            prefetch_distance=prefetch_distance,
            threads=self.threads,
            read_only=read_only,
        )
        if self._scales is not None:
            key_scales, value_scales = self._scales
            arguments.key_scales = _addresses(key_scales)
            arguments.value_scales = _addresses(value_scales)
            arguments.scale_strides = (c_int64 * batch)(*(stride_of(s, 0) for s in key_scales))
        if new_key is not None:
            arguments.new_batch_stride = stride_of(new_key, 0)
            arguments.new_head_stride = stride_of(new_key, 1)
        self.arguments = arguments
        self._job = self._library.job_create()
        # A call that is dropped while it runs keeps its tensors until it is done.
        kept = (query, out, length, scores, new_key, new_value, arguments)
        weakref.finalize(
            self, _drop, self._library, self._job, self.pool, self._keys, self._values, kept
        )

    def start(self) -> None:
        """Begin; returns while the pool's threads work.

        Raises KernelError where lengths do not fit the caches, or the call is still running.
        """
        if self._library is None:
            self._reference()
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
        """Of the latest call: from the first thread's begin to the last one's end; 0 of a
        reference's."""
        return 0.0 if self._library is None else self._library.seconds(self._job)

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and scales that the latest call saw; 0 of a reference's."""
        return 0 if self._library is None else self._library.bytes_read(self._job)

    @property
    def checksum(self) -> int:
        """What the latest `read_only` call added up."""
        return 0 if self._library is None else self._library.checksum(self._job)

    def _reference(self) -> None:
        for b, (n, keys) in enumerate(zip(self._length.tolist(), self._keys, strict=True)):
            if not 0 <= n <= keys.shape[1]:
                raise ValueError(
                    f"{OP}: length[{b}] is {n}: it must be 0 to {keys.shape[1]}, the capacity of "
                    "its cache"
                )
        key_scales, value_scales = self._scales or (None, None)
        new_key, new_value = self._new
        if new_key is not None and new_value is not None:
            reference.append_columns(new_key, self._keys, key_scales, self._length)
            reference.append_columns(new_value, self._values, value_scales, self._length)
        result = reference.host_attention(
            self._query,
            self._keys,
            self._values,
            key_scales=key_scales,
            value_scales=value_scales,
            length=self._length,
            start=self._start,
            scores=self._scores,
        )
        self._out.copy_(result)


def _drop(library: HostLibrary, job: int, pool: HostPool, *kept: Any) -> None:
    with contextlib.suppress(KernelError):  # forked: it runs in the other process
        library.wait(job)
    library.job_destroy(job)


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _check_query(query: Any) -> tuple[int, int, int]:
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"{OP}: query must be a tensor, not {type(query).__name__}")
    if query.dim() != 3 or query.shape[1] < 1 or query.shape[2] < 1:
        raise ValueError(f"{OP}: query must be [batch, heads, head_dim], not {list(query.shape)}")
    if query.device.type != "cpu":
        raise ValueError(f"{OP}: query must be on the CPU, not on {query.device}")
    if query.dtype not in QUERY_DTYPES:
        raise ValueError(f"{OP}: query must be float32, float16 or bfloat16, not {query.dtype}")
    batch, heads, head_dim = query.shape
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"{OP}: head_dim must be at most {MOST_HEAD_DIM}, not {head_dim}")
    check(OP, "query", query, (batch, heads, head_dim), query, contiguous=False)
    return batch, heads, head_dim


def _check_caches(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> tuple[int, torch.dtype]:
    """The number of KV heads, and the caches' dtype."""
    batch, heads, head_dim = query.shape
    for name, caches in (("keys", keys), ("values", values)):
        if len(caches) != batch:
            raise ValueError(
                f"{OP}: {name} must be {batch} tensors, one a sequence, not {len(caches)}"
            )
    if not batch:
        return 1, query.dtype
    first = keys[0]
    if not isinstance(first, torch.Tensor) or first.dim() != 3:
        what = list(first.shape) if isinstance(first, torch.Tensor) else first
        raise ValueError(
            f"{OP}: keys[0] must be a tensor [kv_heads, capacity, head_dim], not {what}"
        )
    kv_heads, dtype = first.shape[0], first.dtype
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{OP}: {heads} query heads must be a multiple of {kv_heads} KV heads")
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"{OP}: caches must be float32, float16, bfloat16 or int8, not {dtype}")
    for b, pair in enumerate(zip(keys, values, strict=True)):
        shape = (kv_heads, pair[0].shape[1] if pair[0].dim() == 3 else 0, head_dim)
        for name, cache in zip(("keys", "values"), pair, strict=True):
            check(OP, f"{name}[{b}]", cache, shape, query, dtype=dtype, contiguous=False)
            check_columns(OP, f"{name}[{b}]", cache)
        check_equal_strides(OP, {f"keys[{b}]": pair[0], f"values[{b}]": pair[1]}, (0,))
    return kv_heads, dtype


def _check_scales(
    keys: list[torch.Tensor],
    dtype: torch.dtype,
    key_scales: Tensors | None,
    value_scales: Tensors | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    if not keys:
        return None
    wanted = dtype == torch.int8
    if wanted != (key_scales is not None) or wanted != (value_scales is not None):
        raise ValueError(
            f"{OP}: key_scales and value_scales go with int8 caches, and with no others; the "
            f"caches are {dtype}"
        )
    if key_scales is None or value_scales is None:
        return None
    scales = list(key_scales), list(value_scales)
    for name, tensors in zip(("key_scales", "value_scales"), scales, strict=True):
        if len(tensors) != len(keys):
            raise ValueError(f"{OP}: {name} must be {len(keys)} tensors, not {len(tensors)}")
        for b, (tensor, cache) in enumerate(zip(tensors, keys, strict=True)):
            shape = tuple(cache.shape[:2])
            check(OP, f"{name}[{b}]", tensor, shape, cache, dtype=torch.float32, contiguous=False)
    for b, (of_keys, of_values) in enumerate(zip(*scales, strict=True)):
        named = {f"key_scales[{b}]": of_keys, f"value_scales[{b}]": of_values}
        check_equal_strides(OP, named, (0,))
    return scales


def _check_new(
    query: torch.Tensor,
    kv_heads: int,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
) -> None:
    if (new_key is None) != (new_value is None):
        missing = "new_key" if new_key is None else "new_value"
        raise ValueError(f"{OP}: new_key and new_value go together; {missing} is missing")
    if new_key is None or new_value is None or not query.shape[0]:
        return
    shape = (query.shape[0], kv_heads, query.shape[2])
    for name, tensor in (("new_key", new_key), ("new_value", new_value)):
        check(OP, name, tensor, shape, query, contiguous=False)
    check_equal_strides(OP, {"new_key": new_key, "new_value": new_value}, (0, 1))
