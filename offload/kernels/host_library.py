"""The compiled host library by ctypes: attention on CPU cores. Its interface is
csrc/cpu/offload_host.h.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import torch

from offload.kernels.library import KernelError

FILE = Path(__file__).with_name("_host_kernels.so")
ABI = 4

QUERY_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_DTYPES = {**QUERY_DTYPES, torch.int8: 3}
# Instructions that a call may be told to use; "auto": the last that the CPU can run.
PATHS = {"auto": 0, "portable": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "amx": 5}
# Where lines that are asked for ahead go; "auto": the library's choice.
PREFETCHES = {"auto": -1, "none": 0, "l1": 1, "l2": 2, "nta": 3}


class HostAttentionStruct(Structure):
    """Arguments of offload_host_start."""

    _fields_ = (
        ("query", c_void_p),
        ("output", c_void_p),
        ("new_key", c_void_p),
        ("new_value", c_void_p),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("key_scales", POINTER(c_void_p)),
        ("value_scales", POINTER(c_void_p)),
        ("head_strides", POINTER(c_int64)),
        ("scale_strides", POINTER(c_int64)),
        ("capacities", POINTER(c_int32)),
        ("length", c_void_p),
        ("start", c_void_p),
        ("slopes", c_void_p),
        ("sinks", c_void_p),
        ("query_batch_stride", c_int64),
        ("query_head_stride", c_int64),
        ("new_batch_stride", c_int64),
        ("new_head_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("batch", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("query_dtype", c_int32),
        ("cache_dtype", c_int32),
        ("path", c_int32),
        ("chunk", c_int32),
        ("prefetch", c_int32),
        ("prefetch_distance", c_int32),
        ("threads", c_int32),
        ("read_only", c_int32),
        ("products", c_int32),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, arguments
    "offload_host_last_error": (c_char_p,),
    "offload_host_abi": (c_int32,),
    "offload_host_struct_size": (c_int64,),
    "offload_host_paths": (c_int32,),
    "offload_host_pool_create": (c_void_p, POINTER(c_int32), c_int32, c_int32),
    "offload_host_pool_close": (None, c_void_p),
    "offload_host_pool_destroy": (None, c_void_p),
    "offload_host_job_create": (c_void_p,),
    "offload_host_job_destroy": (None, c_void_p),
    "offload_host_start": (c_int, c_void_p, c_void_p, POINTER(HostAttentionStruct)),
    "offload_host_wait": (c_int, c_void_p),
    "offload_host_is_done": (c_int, c_void_p),
    "offload_host_seconds": (c_double, c_void_p),
    "offload_host_checksum": (ctypes.c_uint64, c_void_p),
    "offload_host_bytes_read": (c_int64, c_void_p),
}


class HostLibrary:
    """The loaded library: one method a C function. A failed call raises KernelError.

    ctypes gives the GIL back for the time of every call.
    """

    def __init__(self, file: Path) -> None:
        """Load `file`; raises OSError where it cannot be used, saying why."""
        c = ctypes.CDLL(str(file))
        for name, (result, *arguments) in _FUNCTIONS.items():
            try:
                function = getattr(c, name)
            except AttributeError:
                raise OSError(f"{file} has no {name}; install offload again") from None
            function.restype = result
            function.argtypes = arguments
        self._c: Any = c
        size = ctypes.sizeof(HostAttentionStruct)
        found = c.offload_host_abi(), c.offload_host_struct_size()
        if found != (ABI, size):
            raise OSError(
                f"{file} was built from other sources than this package (interface {found}, wanted "
                f"{(ABI, size)}); install offload again"
            )

    def _error(self) -> KernelError:
        return KernelError(self._c.offload_host_last_error().decode(errors="replace"))

    def paths(self) -> tuple[str, ...]:
        """The names in PATHS that this CPU can run, slowest first."""
        mask = self._c.offload_host_paths()
        return tuple(name for name, bit in PATHS.items() if mask >> bit & 1)

    def pool_create(self, cpus: Sequence[int], spin_us: int) -> int:
        """A pool with one thread on each of `cpus`."""
        pool = self._c.offload_host_pool_create((c_int32 * len(cpus))(*cpus), len(cpus), spin_us)
        if not pool:
            raise self._error()
        return pool

    def pool_close(self, pool: int) -> None:
        """End the threads, once what was started is done."""
        self._c.offload_host_pool_close(pool)

    def pool_destroy(self, pool: int) -> None:
        """Close the pool and free it."""
        self._c.offload_host_pool_destroy(pool)

    def job_create(self) -> int:
        """The memory of a call that is made again and again."""
        job = self._c.offload_host_job_create()
        if not job:
            raise self._error()
        return job

    def job_destroy(self, job: int) -> None:
        """Free it; it must not be running."""
        self._c.offload_host_job_destroy(job)

    def start(self, pool: int, job: int, arguments: HostAttentionStruct) -> None:
        """Plan the work and return while the pool does it."""
        if self._c.offload_host_start(pool, job, arguments):
            raise self._error()

    def wait(self, job: int) -> None:
        """Return when it is done."""
        if self._c.offload_host_wait(job):
            raise self._error()

    def is_done(self, job: int) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._c.offload_host_is_done(job))

    def seconds(self, job: int) -> float:
        """Of the latest call that is done: from its first thread's begin to its last one's end."""
        return self._c.offload_host_seconds(job)

    def checksum(self, job: int) -> int:
        """Of the latest read-only call: the sum of the 8-byte words that it read, modulo 2^64."""
        return self._c.offload_host_checksum(job)

    def bytes_read(self, job: int) -> int:
        """Keys, values and scales that the latest call saw."""
        return self._c.offload_host_bytes_read(job)


@functools.cache
def _loaded() -> tuple[HostLibrary | None, str]:
    if not FILE.exists():
        return None, "the host library was not built (`python -m offload info` says why)"
    try:
        return HostLibrary(FILE), ""
    except OSError as error:
        return None, str(error)


def host_library() -> HostLibrary:
    """The library; raises KernelError where there is none, saying why."""
    loaded, reason = _loaded()
    if loaded is None:
        raise KernelError(reason)
    return loaded


def why_not_host() -> str | None:
    """Why there is no host library (its ops then run their references); None where there is."""
    return _loaded()[1] or None
