"""The CPU cores' part of a decode step: attention for sequences whose keys and values are in CPU
memory.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.kernels.host_attention import MOST_HEAD_DIM, HostAttention
from offload.kernels.host_library import QUERY_DTYPES
from offload.kernels.qkv import QkvLayout
from offload.kernels.scores import Scores
from offload.models.fused.entry import Entry
from offload.models.fused.padding import Padding
from offload.models.kv.layer import KvLayer
from offload.models.kv.streamed_kv import KEPT_STEPS
from offload.models.specs.spec import LayerSpec, ModelSpec
from offload.row_copies import RowCopies
from offload.sizes import format_size
from offload.trace import Trace, Track


def why_not_on_cpu(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Why attention on the CPU cannot serve the model; None if it can."""
    if dtype not in QUERY_DTYPES:
        return f"attention on the CPU is in float32, float16 or bfloat16, not {dtype}"
    widest = max(layer.layout.head_dim for layer in spec.layers)
    if widest > MOST_HEAD_DIM:
        return f"attention on the CPU takes heads of up to {MOST_HEAD_DIM} elements, not {widest}"
    return None


@dataclass(slots=True)
class CpuStep:
    """One decode step, all layers together."""

    sequences: int
    micro_batches: int  # that shared them
    attention: float = 0.0  # seconds in which cores attended
    waiting: float = 0.0  # seconds in which they were idle between layers
    nbytes: int = 0  # of keys and values that were read


@dataclass(slots=True)
class CpuWork:
    """What CPU cores did for an engine so far."""

    steps: int = 0  # decode steps that had such rows
    latest: deque[CpuStep] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    trace: Callable[[], Trace | None] = lambda: None  # the trace to tell, if there is one
    ended: float = 0.0  # when cores had done what was waited for last, by time.perf_counter

    @property
    def typical(self) -> CpuStep | None:
        """Medians of the latest steps; None before there was one."""
        steps = list(self.latest)
        if not steps:
            return None
        return CpuStep(
            sequences=steps[-1].sequences,
            micro_batches=steps[-1].micro_batches,
            attention=statistics.median(x.attention for x in steps),
            waiting=statistics.median(x.waiting for x in steps),
            nbytes=int(statistics.median(x.nbytes for x in steps)),
        )

    def __str__(self) -> str:
        """One line; empty before there was a step."""
        step = self.typical
        if step is None:
            return ""
        rate = f" at {step.nbytes / step.attention / 1e9:.1f} GB/s" if step.attention else ""
        parts = ", in two micro-batches that take turns" if step.micro_batches > 1 else ""
        return (
            f"attention on the CPU: {step.sequences} sequences{parts}, {format_size(step.nbytes)} "
            f"in {step.attention * 1e3:.1f} ms a step{rate}; between layers cores were idle for "
            f"{step.waiting * 1e3:.1f} ms (medians of {len(self.latest)} steps)"
        )


class CpuSteps:
    """The decode steps of one session, of so many sequences in CPU memory and micro-batches."""

    def __init__(self, work: CpuWork, sequences: int, micro_batches: int) -> None:
        self.work, self._kind = work, (sequences, micro_batches)
        self._step: CpuStep | None = None

    def begin(self) -> None:
        """What cores do from now on is for another step."""
        self._step = None

    def add(self, started: float, attention: HostAttention) -> None:
        """Cores have done `attention`, which was started at that time, behind what was before."""
        work, step = self.work, self._step
        began = max(started, work.ended)
        if step is None:
            step = self._step = CpuStep(*self._kind)
            work.steps += 1
            work.latest.append(step)
        else:
            step.waiting += began - work.ended
        work.ended = began + attention.seconds
        step.attention += attention.seconds
        step.nbytes += attention.bytes_read
        trace = work.trace()
        if trace is not None:
            nbytes = attention.bytes_read
            trace.host(Track.CPU_ATTENTION, "attention", began, nbytes, stop=work.ended)


class HostRows:
    """`CpuRows` to which CPU cores attend: queries, keys and values go down, and the result of
    attention comes up.

    One set of buffers serves all layers of a shape, since each layer's result is waited for before
    the next layer's queries are made.
    """

    def __init__(
        self,
        layers: Sequence[KvLayer],
        rows: slice,
        entry: Entry,
        padded: bool,
        copies: RowCopies,
        steps: CpuSteps,
    ) -> None:
        """`rows`: of the batch."""
        first = layers[0].batch_size - layers[0].rows_on_cpu
        own = slice(rows.start - first, rows.stop - first)
        self.steps = steps
        self._rows, self._count, self._first = rows, rows.stop - rows.start, not own.start
        self._layers = [
            (x.host_keys[own], x.host_values[own])
            for x in layers
            if x.host_keys is not None and x.host_values is not None
        ]
        self._like = entry.hidden
        self._entry = entry
        self._copies = copies
        self._exchanges: dict[tuple[int, int, int], Exchange] = {}
        self._jobs: dict[int, HostJob] = {}
        self._length = torch.zeros(self._count, dtype=torch.int32)
        self._start = torch.zeros_like(self._length) if padded else None
        self.column = torch.zeros(1, dtype=torch.int32, device=entry.hidden.device)

    def expect(self, padding: Padding | None) -> None:
        if self._start is not None and padding is not None:
            self._start.copy_(padding.start[self._rows])

    def staging(self, index: int, spec: LayerSpec) -> Exchange:
        """The buffers of the layer `index`, and of others of its layout."""
        layout = spec.layout
        key = layout.heads, layout.kv_heads, layout.head_dim
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(layout, self._count, self._like, self._copies)
        return self._exchanges[key]

    def starting(self, index: int, spec: LayerSpec, scores: Scores) -> HostStart:
        first = not index and self._first
        return HostStart(self, self._job(index, spec, scores), first)

    def attention(self, index: int, spec: LayerSpec, scores: Scores, out: torch.Tensor) -> HostJoin:
        return HostJoin(self, self._job(index, spec, scores), out)

    def settle(self) -> None:
        for job in self._jobs.values():
            job.attention.wait()

    def _job(self, index: int, spec: LayerSpec, scores: Scores) -> HostJob:
        if index not in self._jobs:  # one for all slots
            exchange = self.staging(index, spec)
            self._jobs[index] = HostJob(exchange, self._make(index, scores, exchange))
        return self._jobs[index]

    def _make(self, index: int, scores: Scores, exchange: Exchange) -> HostAttention:
        keys, values = self._layers[index]
        query, new_key, new_value = exchange.sent
        return HostAttention(
            query,
            keys.stored,
            values.stored,
            exchange.result,
            key_scales=keys.scales,
            value_scales=values.scales,
            length=self._length,
            start=self._start,
            new_key=new_key,
            new_value=new_value,
            scores=scores.on_cpu(),
            beside_stream=True,
        )

    def expect_column(self) -> None:
        """The next attention is that of the step under way."""
        self._length.fill_(self._entry.past + 1)


@dataclass(slots=True)
class HostJob:
    """A layer's attention."""

    exchange: Exchange
    attention: HostAttention
    started: float = 0.0  # by time.perf_counter


class Exchange:
    """What goes down for some rows of a layer, and what comes up."""

    def __init__(
        self, layout: QkvLayout, count: int, like: torch.Tensor, copies: RowCopies
    ) -> None:
        heads, kv_heads, width = layout.heads, layout.kv_heads, layout.head_dim
        self.copies = copies
        shape = (count, heads + 2 * kv_heads, width)
        with torch.inference_mode(False):
            self._staged = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._memory = copies.buffer(shape, like.dtype)
            self.result = copies.buffer((count, heads, width), like.dtype)
            self.mapped = copies.mapped(self.result).view(count, heads * width)
        sizes = [heads, kv_heads, kv_heads]
        # Query, key and value of every row: [count, heads, head_dim], as they were sent.
        self.sent = self._memory.split(sizes, dim=1)
        query, keys, values = (x[:, None] for x in self._staged.split(sizes, dim=1))
        # As a token's queries, [count, 1, heads, head_dim], and caches of one column.
        self.staged = query, keys.transpose(1, 2), values.transpose(1, 2)
        self.point: Any = None

    def launch(self, stream: int = 0) -> None:
        """Send down what was staged, on a queue of its own."""
        self.point = self.copies.down(self._memory.flatten(1), self._staged.flatten(1))


class HostStart:
    """Waits for what was sent, and lets cores attend once they are done with what was before."""

    def __init__(self, rows: HostRows, job: HostJob, first: bool) -> None:
        """`first`: it is the first of a step."""
        self._rows, self._job, self._first = rows, job, first

    def launch(self, stream: int = 0) -> None:
        """While the host waits here, cores may be at work for other rows."""
        exchange = self._job.exchange
        exchange.copies.synchronize(exchange.point)
        if self._first:
            self._rows.steps.begin()
        self._rows.expect_column()
        self._job.started = time.perf_counter()
        self._job.attention.start()


class HostJoin:
    """Waits for cores, and brings the result up."""

    def __init__(self, rows: HostRows, job: HostJob, out: torch.Tensor) -> None:
        self._rows, self._job, self._out = rows, job, out

    def launch(self, stream: int = 0) -> None:
        """The host waits here, while the compute device works on what was issued before: other
        rows' attention or all of their part, and the next layers' weights are on their way.
        """
        job, steps = self._job, self._rows.steps
        trace = steps.work.trace()
        if trace is not None:
            trace.joins()
        job.attention.poll()
        job.attention.wait()
        steps.add(job.started, job.attention)
        if trace is not None:
            trace.joined()
        # A kernel that reads CPU memory: the result does not queue up behind a layer of weights. It
        # is not overwritten before the next layer's queries are down, which this kernel precedes.
        torch.mul(job.exchange.mapped, 1, out=self._out)
