"""Decoding one token a sequence: calls that were made once for a cache, launched token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter, is_

import torch

from offload.kernels import Norm
from offload.kernels.call import current_stream
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.step_inputs import StepInputs
from offload.kernels.workspace import Workspace
from offload.models.fused.cpu_rows import CpuRows
from offload.models.fused.decode_graph import LaunchGraph
from offload.models.fused.entry import Entry
from offload.models.fused.host_rows import CpuSteps, CpuWork, HostRows
from offload.models.fused.layer_calls import LayerCalls, Rows
from offload.models.fused.layer_weights import LayerWeights
from offload.models.fused.micro_batch import MicroBatch
from offload.models.fused.padding import Padding, PaddingCheck
from offload.models.fused.streamed_rows import StreamedRows
from offload.models.kv.layer import KvLayer
from offload.models.kv.streamed_kv import StreamedKv
from offload.models.specs.spec import ModelSpec

Buffers = tuple[torch.Tensor, torch.Tensor]  # keys, values
_KEYS, _VALUES = attrgetter("key_buffer"), attrgetter("value_buffer")


class DecodeSession:
    """The buffers that calls read and write, for one cache as it lies now, and those calls.

    `entry` is where a token comes in; its `hidden` goes from layer to layer. What changes from
    token to token is in its small tensors, so that calls, and graphs of them, stay good.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[KvLayer],
        padded: bool,
        stream: int,
        workspace: Workspace,
        work: CpuWork | None = None,
        streamed: StreamedKv | None = None,
        micro_batches: int = 1,
    ) -> None:
        """For rows whose keys and values are in CPU memory: CPU cores attend to them, and `work`
        counts what they do; with `streamed` the keys and values come up to the compute device
        instead. `micro_batches`: 1, or 2 that share the rows to which cores attend.
        """
        self._made_for = (padded, stream)
        # By the first layer of a stretch, and whether the entry is part of it.
        self.graphs: dict[tuple[int, bool], LaunchGraph] = {}
        self.issued: set[tuple[int, bool]] = set()  # stretches that were launched without one
        self._spec = spec
        self._keys = [buffers_of(layer)[0] for layer in layers]
        self._values = [buffers_of(layer)[1] for layer in layers]
        first = self._keys[0]
        self.batch, self.device = layers[0].batch_size, first.device
        self.capacity = min(keys.shape[2] for keys in self._keys)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        self._last_norm: ResidualNorm | None = None
        self._rows = rows = Rows(self.batch, first.dtype, self.device)
        with torch.inference_mode(False):
            self.entry = Entry(rows("hidden", spec.hidden))
            self._start = torch.zeros_like(self.entry.length) if padded else None
            self._on_cpu: list[CpuRows] = []  # one for each micro-batch, or none
            host, count = layers[0].common.host, layers[0].rows_on_cpu
            parts = _parts(self.batch, count, micro_batches)
            if count and streamed is not None:
                self._on_cpu.append(
                    StreamedRows(layers, spec, self.entry, self._start, streamed, workspace)
                )
            elif count and host is not None:
                steps = CpuSteps(work or CpuWork(), count, len(parts))
                self._on_cpu += [
                    HostRows(
                        layers,
                        slice(max(part.start, self.batch - count), part.stop),
                        self.entry,
                        padded,
                        host.copies,
                        steps,
                    )
                    for part in parts
                ]
            slopes = {
                each: torch.tensor(each, dtype=torch.float32, device=self.device)
                for each in {layer.slopes for layer in spec.layers}
                if each is not None
            }
            # The first has all rows of the compute device.
            self.micro_batches = [
                MicroBatch(
                    LayerCalls(
                        spec=spec,
                        part=part,
                        entry=self.entry,
                        keys=[keys[part] for keys in self._keys],
                        values=[values[part] for values in self._values],
                        start=self._start,
                        slopes=slopes,
                        on_cpu=on_cpu,
                        rows=rows,
                        workspace=workspace,
                    ),
                    self.device,
                )
                for part, on_cpu in zip_longest(parts, self._on_cpu)
            ]
        self._expect(None)

    @property
    def repeatable(self) -> bool:
        """Whether graphs of its calls do what the calls do."""
        return not self._on_cpu

    @property
    def padded(self) -> bool:
        """Whether rows may begin behind column 0."""
        return self._made_for[0]

    def serves(self, layers: Sequence[KvLayer], padded: bool, stream: int) -> bool:
        """Whether the calls are still good: the buffers are the same, and where they were."""
        return (
            self._made_for == (padded, stream)
            and len(layers) == len(self._keys)
            and all(map(is_, map(_KEYS, layers), self._keys))
            and all(map(is_, map(_VALUES, layers), self._values))
        )

    def expect(self, padding: Padding | None) -> None:
        """The next steps' padding."""
        if padding is self.padding:
            return
        if self._start is not None and padding is not None:
            self._start.copy_(padding.start)
            for rows in self._on_cpu:
                rows.expect(padding)
        self._expect(padding)

    def _expect(self, padding: Padding | None) -> None:
        self.padding = padding  # of the step before
        self.check = PaddingCheck(padding, self.capacity, self.device)  # of that padding
        with torch.inference_mode(False):
            entry = self.entry
            self._inputs = StepInputs(entry.ids, entry.positions, self.check.answer)

    def begin(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        past: int,
    ) -> None:
        """Take in the token for column `past`, and issue the check of the mask with it, on the
        stream that the session is for.

        The arguments are those of `StepInputs.take`.
        """
        self.check.begin()
        self._inputs.take(ids, positions, past, mask, self.check.start)
        self._inputs.launch(self._made_for[1])
        if mask is not None:
            self.check.asked(self._stream)
        self.entry.taken(past)

    def launch(self, index: int, slot: int | None, weights: LayerWeights) -> None:
        """Issue a layer whose weights are in `slot`, or resident (None)."""
        for micro_batch in self.micro_batches:
            micro_batch.begin(index, slot, weights)
        for micro_batch in self.micro_batches:
            micro_batch.finish()

    def settle(self) -> None:
        """Return when CPU cores are at work on nothing, after a step that broke off."""
        for rows in self._on_cpu:
            rows.settle()

    def normed(self, norm: Norm) -> torch.Tensor:
        """The model's last norm of `entry.hidden`, [batch, width], overwritten by the next step."""
        with torch.inference_mode(False):  # the next step may be in another mode
            out = self._rows("out", self._spec.hidden)
            if self._last_norm is None:
                self._last_norm = ResidualNorm(residual=self.entry.hidden, norm=norm, out=out)
        self._last_norm.launch(current_stream(self.device))
        return out

    def forget(self) -> None:
        """Let go of the weights, and of the graphs that read them."""
        for micro_batch in self.micro_batches:
            micro_batch.forget()
        self._last_norm = None
        self.graphs.clear()
        self.issued.clear()


def _parts(batch: int, on_cpu: int, count: int) -> list[slice]:
    """The rows of 1 or 2 micro-batches, each with half of the last `on_cpu` rows."""
    cut = batch - on_cpu // 2
    return [slice(0, batch)] if count == 1 else [slice(0, cut), slice(cut, batch)]


def buffers_of(layer: KvLayer) -> Buffers:
    """The layer's keys and values, [batch, kv_heads, capacity, head_dim] each."""
    assert layer.key_buffer is not None and layer.value_buffer is not None
    return layer.key_buffer, layer.value_buffer
