"""Attention on CPU cores beside a plain read of the same bytes, and beside a weight stream."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from offload import aio
from offload.bench.table import format_table, number
from offload.device import ComputeDevice
from offload.kernels.host_attention import HostAttention
from offload.kernels.host_library import host_library
from offload.kernels.host_pool import TILES_FROM, HostPool
from offload.kernels.scores import Scores

# More than the last-level cache, so that all is read from memory each time.
LEAST_BYTES = 2 << 30
ROUNDS = 5
KEPT = 0.94  # of a stream's rate, that attention is to leave it
# A turn takes so long at least beside a stream, whose copies are counted whole.
TURN_SECONDS = 0.25
COPY_BYTES = 32 << 20  # of one copy of the stream; there are COPIES different ones
COPIES = 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
DISTANCES = (1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Shape:
    """One layer's heads, and how many sequences of how many tokens decode at once."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    tokens: int

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of the keys and values."""
        elements = self.sequences * self.kv_heads * self.tokens * self.head_dim
        return 2 * elements * dtype.itemsize


SHAPES = (
    Shape("opt-30b", 56, 56, 128, 80, 544),
    Shape("llama-2-70b", 64, 8, 128, 80, 2048),
    Shape("llama-2-7b", 32, 32, 128, 64, 544),
    Shape("llama-2-70b one long", 64, 8, 128, 1, 32768),
    Shape("llama-2-70b few", 64, 8, 128, 8, 544),
)


@dataclass
class Measured:
    """Rates in bytes per second."""

    shape: str
    dtype: str
    prefetch: str
    seconds: float  # of one call
    attention: float
    read: float  # the same bytes by the same threads, added up
    multiplied: float | None = None  # that, with as many products of vectors as attention makes
    threads: int = 0
    stream: float | None = None  # copies to the device: alone, and beside the other two
    stream_beside_attention: float | None = None
    stream_beside_read: float | None = None


@dataclass
class HostAttentionResult:
    """What was measured, and with what."""

    path: str
    cpus: Sequence[int]  # of the largest pool
    rows: list[Measured] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it, in plain types."""
        return {**asdict(self), "cpus": list(self.cpus)}

    def beside_streams(self) -> Iterator[str]:
        """Of each shape measured with several numbers of threads beside a stream: the fastest
        attention and the fastest read that leave the stream KEPT of its rate.
        """
        for shape, dtype in dict.fromkeys((row.shape, row.dtype) for row in self.rows):
            rows = [row for row in self.rows if (row.shape, row.dtype) == (shape, dtype)]
            if len({row.threads for row in rows}) == 1 or rows[0].stream is None:
                continue
            best = []
            for kind in ("attention", "read"):
                kept = [
                    (getattr(row, kind), row.threads)
                    for row in rows
                    if getattr(row, f"stream_beside_{kind}") >= KEPT * (row.stream or 0)
                ]
                best.append(max(kept, default=(0.0, 0)))
            (attention, some), (read, others) = best
            line = f"{shape} {dtype}, the stream at {KEPT} of its rate or more: attention "
            line += f"{number(attention, 1e9)} GB/s ({some} threads), " if some else "never, "
            line += f"read {number(read, 1e9)} GB/s ({others})" if others else "read never"
            yield line + (f": {attention / read:.3f}" if some and others else "")

    def __str__(self) -> str:
        head: tuple[str, ...] = ("shape", "KV", "prefetch", "threads", "ms", "GB/s", "read GB/s")
        head += ("of read", "with products", "of that")
        streamed = any(row.stream for row in self.rows)
        if streamed:
            head += ("stream", "beside it", "beside read")
        table: list[tuple[str, ...]] = [head]
        for row in self.rows:
            cells = (
                row.shape,
                row.dtype,
                row.prefetch,
                str(row.threads),
                number(row.seconds, 1e-3),
                number(row.attention, 1e9),
                number(row.read, 1e9),
                f"{row.attention / row.read:.3f}",
                number(row.multiplied, 1e9) if row.multiplied else "",
                f"{row.attention / row.multiplied:.3f}" if row.multiplied else "",
            )
            rates = (row.stream, row.stream_beside_attention, row.stream_beside_read)
            table.append(cells + tuple(number(x, 1e9) for x in rates) if streamed else cells)
        title = f"{self.path}, a pool of {len(self.cpus)} threads, CPUs {list(self.cpus)}"
        return "\n".join([title, *format_table(table), *self.beside_streams()])


def measure_host_attention(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    *,
    pools: Sequence[HostPool],
    path: str = "auto",
    all_threads: bool = True,
    sweep: bool = False,
    device: ComputeDevice | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> HostAttentionResult:
    """Each shape with each dtype by each pool; `sweep`: with every way to ask for lines ahead.

    With a `device`, while copies run to it at full rate; then `all_threads` of a pool take part,
    or as many as the engine uses.
    """
    paths = host_library().paths()
    cpus = max((pool.cpus for pool in pools), key=len)
    result = HostAttentionResult(paths[-1] if path == "auto" else path, cpus)
    ahead = [("auto", 0)]
    if sweep:
        ahead += [("none", 0), *((to, n) for to in ("l1", "l2", "nta") for n in DISTANCES)]
    with Stream(device) if device else contextlib.nullcontext() as stream:
        for shape in shapes:
            for dtype in dtypes:
                nbytes = _layers(shape, DTYPES[dtype]) * shape.nbytes(DTYPES[dtype])
                buffer = aio.alloc(nbytes, lock=False)
                caches = _caches(shape, DTYPES[dtype], buffer)
                for pool, (to, distance) in itertools.product(pools, ahead):
                    options: dict[str, Any] = {"pool": pool, "path": path}
                    options["beside_stream"] = not all_threads
                    options |= {"prefetch": to, "prefetch_distance": distance}
                    calls = _calls(shape, caches, options)
                    reads = _calls(shape, caches, {**options, "read_only": True})
                    kinds = {"attention": calls, "read": reads}
                    if products := vector_products(shape, dtype, result.path):
                        more = {"read_only": True, "products": products}
                        kinds["multiplied"] = _calls(shape, caches, {**options, **more})
                    name = f"{to} {distance}" if distance else to
                    row = _measure(kinds, stream, Measured(shape.name, dtype, name, 0, 0, 0))
                    result.rows.append(row)
                    say(f"{row.shape} {dtype} {name}: {row.attention / row.read:.3f} of read")
                del caches, calls, reads, kinds
                buffer.close()
    return result


def vector_products(shape: Shape, dtype: str, path: str) -> int:
    """How many products of vectors a group's queries take for each 64 bytes of 16-bit keys and
    values, on average of both: for values two a query, for keys two, one by products of pairs, none
    by tiles. 0: they are not AVX-512's.
    """
    if dtype == "int8" or path not in ("avx512", "avx512_bf16", "amx"):
        return 0
    group = shape.heads // shape.kv_heads
    of_key = 2 if dtype == "fp16" or path == "avx512" else 1
    if path == "amx" and dtype == "bf16" and group >= TILES_FROM:
        of_key = 0
    return max(1, (of_key + 2) * group // 2)


def _measure(
    kinds: Mapping[str, list[HostAttention]], stream: Stream | None, row: Measured
) -> Measured:
    calls = kinds["attention"]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    streamed: dict[str, list[float]] = {kind: [] for kind in kinds}
    if stream is not None:
        with stream.measured() as rate:
            time.sleep(0.5)
        row.stream = rate()
    for turn in range(ROUNDS + 1):
        for kind, some in kinds.items():
            with stream.measured() if stream else contextlib.nullcontext(lambda: 0.0) as rate:
                start = time.perf_counter()
                passes, seconds = 0, 0.0
                while not passes or (stream and seconds < TURN_SECONDS):
                    for call in some:
                        call.launch()
                    seconds = time.perf_counter() - start
                    passes += 1
                seconds /= passes
            if turn:  # the first one warms up
                found[kind].append(seconds)
                streamed[kind].append(rate())
    nbytes = sum(call.bytes_read for call in calls)
    for kind, times in found.items():
        setattr(row, kind, nbytes / statistics.median(times))
    row.seconds = statistics.median(found["attention"]) / len(calls)
    row.threads = calls[0].threads
    if stream is not None:
        row.stream_beside_attention = statistics.median(streamed["attention"])
        row.stream_beside_read = statistics.median(streamed["read"])
    return row


def _layers(shape: Shape, dtype: torch.dtype) -> int:
    return -(-LEAST_BYTES // shape.nbytes(dtype))


def _caches(shape: Shape, dtype: torch.dtype, buffer: aio.AlignedBuffer) -> torch.Tensor:
    """[layers, 2, sequences, kv_heads, tokens, head_dim]: as many layers as it takes."""
    layers = _layers(shape, dtype)
    sizes = (layers, 2, shape.sequences, shape.kv_heads, shape.tokens, shape.head_dim)
    caches = buffer.tensor().view(dtype).view(sizes)
    some = torch.randn(shape.tokens, shape.head_dim)
    caches.copy_(some.mul(30).to(dtype) if dtype == torch.int8 else some)
    return caches


def _calls(shape: Shape, caches: torch.Tensor, options: dict[str, Any]) -> list[HostAttention]:
    torch.manual_seed(0)
    query = torch.randn(shape.sequences, shape.heads, shape.head_dim).bfloat16()
    options = {**options, "scores": Scores(shape.head_dim**-0.5)}
    options["length"] = torch.full((shape.sequences,), shape.tokens, dtype=torch.int32)
    if caches.dtype == torch.int8:
        for name in ("key_scales", "value_scales"):
            # Of values about as large as those of other dtypes.
            options[name] = torch.rand(shape.sequences, shape.kv_heads, shape.tokens) / 15
    return [
        HostAttention(query, keys, values, torch.empty_like(query), **options)
        for keys, values in caches
    ]


class Stream:
    """Pinned copies to a device, one after another without a pause, by a thread of their own."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._buffer = aio.alloc(COPIES * COPY_BYTES, lock="auto")
        source = self._buffer.tensor()
        self._sources = [source[i * COPY_BYTES :][:COPY_BYTES] for i in range(COPIES)]
        self._targets = [device.allocate(COPY_BYTES) for _ in range(2)]
        self._done = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        waiting = []
        for i in range(1 << 62):
            if self._stop:
                break
            self._device.copy(self._targets[i % 2], self._sources[i % COPIES])
            waiting.append(self._device.copied())
            if len(waiting) == 3:  # the link never waits for this thread
                self._device.synchronize(waiting.pop(0))
                self._done += 1
        for event in waiting:
            self._device.synchronize(event)

    @contextlib.contextmanager
    def measured(self) -> Iterator[Callable[[], float]]:
        """Gives what tells the rate over the block, to a copy's length at both ends."""
        done, start = self._done, time.perf_counter()
        found: list[float] = []
        yield lambda: found[0]
        found.append((self._done - done) * COPY_BYTES / (time.perf_counter() - start))

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self._sources, self._targets = [], []
