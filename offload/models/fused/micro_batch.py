"""Rows of a decode step that go through the layers together, or beside another micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.kernels.call import Launchable, current_stream
from offload.models.fused.layer_calls import LayerCalls
from offload.models.fused.layer_weights import LayerWeights
from offload.models.kv.layer import KvLayer
from offload.models.specs.spec import ModelSpec

# Without a plan, a step to whose sequences CPU cores attend has two micro-batches if the cores read
# in a layer at least this share of the bytes of its whole weights (they read memory at a fiftieth
# of a GPU's rate, or less), and so many bytes (some 0.8 ms, as the host takes half a millisecond to
# issue a layer for both). On the safe side: steps that read less were not measured.
CPU_SHARE, CPU_BYTES = 1 / 16, 64 << 20


class MicroBatch:
    """The calls of every layer for these rows, made once and issued step by step.

    A layer is issued in two pieces: what lies between them may be issued while CPU cores attend.
    """

    def __init__(self, calls: LayerCalls, device: torch.device) -> None:
        self._calls, self._device = calls, device
        # By layer and slot.
        self._made: dict[tuple[int, int | None], tuple[list[Launchable], list[Launchable]]] = {}
        self._rest: Sequence[Launchable] = ()

    def begin(self, index: int, slot: int | None, weights: LayerWeights) -> None:
        """Issue a layer, whose weights are in `slot` or resident (None), as far as it goes without
        what CPU cores do.
        """
        made = self._made.get((index, slot))
        if made is None:
            with torch.inference_mode(False):
                # A resident layer comes right behind another one, whatever is issued.
                ahead = self._made.get((index - 1, None)) if slot is None else None
                made = self._calls.layer(index, weights, ahead[1][-1] if ahead else None)
            self._made[index, slot] = made
        first, self._rest = made
        self._issue(first)

    def finish(self) -> None:
        """Issue the rest of the layer."""
        self._issue(self._rest)

    def _issue(self, calls: Sequence[Launchable]) -> None:
        stream = current_stream(self._device)  # another one while a graph is captured
        for call in calls:
            call.launch(stream)

    def forget(self) -> None:
        """Let go of the weights."""
        self._made.clear()
        self._rest = ()


def worth_two(kept: Sequence[KvLayer], spec: ModelSpec, whole_bytes: int) -> bool:
    """Whether cores attend to a cache for much longer than a GPU computes; `whole_bytes`: of all
    layers' weights.
    """
    layers = zip(kept, spec.layers, strict=True)
    read = sum(layer.host_bytes(own.window) for layer, own in layers)
    return read >= max(CPU_SHARE * whole_bytes, CPU_BYTES * len(kept))
