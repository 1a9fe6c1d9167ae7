"""Decoding one token a sequence: calls that were made once for a cache, launched token by token."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from offload.kernels import Norm
from offload.kernels.call import Launchable, current_stream
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.step_inputs import StepInputs
from offload.kernels.workspace import Workspace
from offload.models.fused.cpu_rows import CpuRows
from offload.models.fused.decode_graph import LaunchGraph
from offload.models.fused.entry import Entry
from offload.models.fused.host_rows import CpuWork, HostRows
from offload.models.fused.layer_calls import LayerCalls, Rows
from offload.models.fused.layer_weights import LayerWeights
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
    ) -> None:
        """For rows whose keys and values are in CPU memory: CPU cores attend to them, and `work`
        counts what they do; with `streamed` the keys and values come up to the compute device
        instead.
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
        self._calls: dict[tuple[int, int | None], list[Launchable]] = {}
        self._last_norm: ResidualNorm | None = None
        self._rows = rows = Rows(self.batch, first.dtype, self.device)
        with torch.inference_mode(False):
            self.entry = Entry(rows("hidden", spec.hidden))
            self._start = torch.zeros_like(self.entry.length) if padded else None
            self._on_cpu: CpuRows | None = None
            host = layers[0].common.host
            if layers[0].rows_on_cpu and streamed is not None:
                self._on_cpu = StreamedRows(
                    layers, spec, self.entry, self._start, streamed, workspace
                )
            elif layers[0].rows_on_cpu and host is not None:
                self._on_cpu = HostRows(layers, self.entry, padded, host.copies, work or CpuWork())
            slopes = {
                each: torch.tensor(each, dtype=torch.float32, device=self.device)
                for each in {layer.slopes for layer in spec.layers}
                if each is not None
            }
        self._calls_of = LayerCalls(
            spec=spec,
            entry=self.entry,
            keys=self._keys,
            values=self._values,
            start=self._start,
            slopes=slopes,
            on_cpu=self._on_cpu,
            rows=rows,
            workspace=workspace,
        )
        self._expect(None)

    @property
    def repeatable(self) -> bool:
        """Whether graphs of its calls do what the calls do."""
        return self._on_cpu is None

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
            if self._on_cpu is not None:
                self._on_cpu.expect(padding)
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
        calls = self._calls.get((index, slot))
        if calls is None:
            with torch.inference_mode(False):
                # A resident layer comes right behind another one, whatever is issued.
                ahead = self._calls.get((index - 1, None)) if slot is None else None
                calls = self._calls_of.layer(index, weights, ahead[-1] if ahead else None)
            self._calls[index, slot] = calls
        stream = current_stream(self.device)  # another one while a graph is captured
        for call in calls:
            call.launch(stream)

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
        self._calls.clear()
        self._last_norm = None
        self.graphs.clear()
        self.issued.clear()


def buffers_of(layer: KvLayer) -> Buffers:
    """The layer's keys and values, [batch, kv_heads, capacity, head_dim] each."""
    assert layer.key_buffer is not None and layer.value_buffer is not None
    return layer.key_buffer, layer.value_buffer
