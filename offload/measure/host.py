"""CPU memory read by cores, and attention over keys and values that lie there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from offload import aio
from offload.kernels.choices import dtype_name
from offload.kernels.host_attention import HostAttention
from offload.kernels.host_library import why_not_host
from offload.kernels.scores import Scores
from offload.memory_limits import host_memory_available
from offload.scheduler.hardware import Curve

KV_HEADS, HEAD_DIM, LENGTH = 8, 128, 512
# Of keys and values, at most: more than any cache of a CPU, and than what it keeps of page tables,
# since those of a job are tens of gigabytes.
BYTES = 8 << 30
# Of one call: about a layer's, since threads begin and end a call at times of their own.
CALL_BYTES = 512 << 20
SECONDS = 0.5
GROUPS = (1, 4, 8, 16)  # queries a KV head
# Of keys and values that models leave there: tiles (AMX) know one of the two and not the other.
DTYPES = (torch.bfloat16, torch.float16)


class Reader(Protocol):
    """Something that reads the same bytes of memory again and again."""

    how: str

    def read(self) -> int:
        """Read all or a part, in turns; the bytes that were read."""


class PlainReader:
    """A reduction by all of torch's threads, each with a run of memory of its own as in decode
    attention. For machines without the host library.
    """

    how = "plain reads by torch"

    def __init__(self, memory: torch.Tensor) -> None:
        self._words = memory.view(-1).view(torch.int64)

    def read(self) -> int:
        """Read all once; the bytes that were read."""
        self._words.max()
        return self._words.nbytes


class AttentionReader:
    """The host library's own walk over keys and values, a part of the sequences at a time, as the
    engine attends layer by layer. Nothing is computed where `group` is 0.
    """

    def __init__(self, cache: torch.Tensor, group: int) -> None:
        at_once = max(1, CALL_BYTES // cache[:, :1].nbytes)
        parts = cache.split(at_once, dim=1)
        self._calls = itertools.cycle([self._call(part, group) for part in parts])
        self.how = "reads by the host library" if group == 0 else "the host library"

    @staticmethod
    def _call(cache: torch.Tensor, group: int) -> HostAttention:
        keys, values = cache
        batch, kv_heads, length, head_dim = keys.shape
        dtype = torch.bfloat16 if cache.dtype == torch.int8 else cache.dtype
        query = torch.ones(batch, kv_heads * max(1, group), head_dim, dtype=dtype)
        scales = None
        if cache.dtype == torch.int8:
            scales = torch.full(cache.shape[:-1], 0.01)
        return HostAttention(
            query,
            keys,
            values,
            torch.empty_like(query),
            key_scales=None if scales is None else scales[0],
            value_scales=None if scales is None else scales[1],
            length=torch.full((batch,), length, dtype=torch.int32),
            scores=Scores(head_dim**-0.5),
            beside_stream=True,  # as the engine attends, and its reads are measured
            read_only=group == 0,
        )

    def read(self) -> int:
        """Read the next part; the bytes that were read."""
        call = next(self._calls)
        call.launch()
        return call.bytes_read


class HostMemory:
    """Keys and values in CPU memory, touched, and ways to read them."""

    def __init__(self, nbytes: int | None = None) -> None:
        most = min(BYTES, host_memory_available() // 8) if nbytes is None else nbytes
        sequence = 2 * KV_HEADS * LENGTH * HEAD_DIM * 4  # of the widest numbers
        # As the engine's keys and values lie: in huge pages, which are read up to a tenth faster.
        memory = aio.alloc(max(1, most // sequence) * sequence, lock=False).tensor()
        self._memory = memory
        self._cache(torch.bfloat16).fill_(0.5)  # in any dtype numbers of a plain size

    def _cache(self, dtype: torch.dtype) -> torch.Tensor:
        """Keys and values of as many sequences as there is memory for: [2, sequences, ...]."""
        return self._memory.view(dtype).view(2, -1, KV_HEADS, LENGTH, HEAD_DIM)

    def reader(self) -> Reader:
        """Reads alone."""
        if why_not_host() is not None:
            return PlainReader(self._memory)
        return AttentionReader(self._cache(torch.bfloat16), 0)

    def attention(self, group: int, dtype: torch.dtype) -> Reader:
        """Attention of `group` queries a KV head to keys and values of `dtype` (int8: codes, and
        scales beside them), or where there is no host library reads alone, which no attention
        passes.
        """
        if why_not_host() is not None:
            return PlainReader(self._memory)
        return AttentionReader(self._cache(dtype), group)


def attention_rates(
    memory: HostMemory,
    dtypes: Sequence[torch.dtype],
    groups: Sequence[int],
    seconds: float = SECONDS,
) -> dict[str, Curve]:
    """`Hardware.cpu_attention`: bytes per second by dtype and queries a KV head."""
    return {
        dtype_name(dtype): tuple(
            (group, read_rate(memory.attention(group, dtype), seconds)) for group in groups
        )
        for dtype in dtypes
    }


def read_rate(reader: Reader, seconds: float = SECONDS) -> float:
    """Bytes per second over about `seconds`, after one reading that is not counted."""
    reader.read()
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not done:
        done += reader.read()
    return done / elapsed


def rates_beside(reader: Reader, other: Callable[[], float]) -> tuple[float, float]:
    """The reader's rate while `other` runs, and what `other` gave while the reader read."""
    ended = threading.Event()
    marks: list[tuple[float, int]] = []

    def read() -> None:
        reader.read()
        done = 0
        marks.append((time.perf_counter(), 0))
        while not ended.is_set():
            done += reader.read()
            marks.append((time.perf_counter(), done))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            while not (marks or reading.done()):
                time.sleep(0.001)
            start = time.perf_counter()
            found = other()
            stop = time.perf_counter()
        finally:
            ended.set()
        reading.result()  # raises what made it fail
    inside = [mark for mark in marks if start <= mark[0] <= stop]
    if len(inside) < 2:
        raise RuntimeError("no two readings ended while the other work ran: it was too short")
    (begin, before), (end, after) = inside[0], inside[-1]
    return (after - before) / (end - begin), found
