"""A decoder's layers where the plan put them: weights in each slot, or resident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from offload.models.adjacent import lie_together
from offload.models.fused.layer_weights import LayerWeights
from offload.models.hooked import LayerForward
from offload.models.parts import Part
from offload.models.quantized.layer import QuantisedLayer, adjacent_of
from offload.models.quantized.panels import arrange
from offload.models.quantized.scratch import Scratch
from offload.models.specs.spec import LayerSpec, ModelSpec
from offload.models.watched import Hooks, Structure, Watched, parameters_of
from offload.scheduler.stream import Stream
from offload.trace import Trace


class StreamedLayer:
    """A layer that comes through the slots: its weights in each of them."""

    streamed = True

    def __init__(self, spec: LayerSpec, part: Part) -> None:
        self.spec = spec
        forward: Any = part.modules[0].forward
        self._forward: LayerForward = forward
        self.quantised = QuantisedLayer.of(spec, part.modules[0])
        names = [place.name.removeprefix(f"{part.layer.name}.") for place in part.layer.places]
        self._in_slot = [
            LayerWeights.of(spec, dict(zip(names, parameters, strict=True)), self.quantised)
            for parameters in forward.in_slot
        ]
        self.like = self._in_slot[0]

    @contextmanager
    def in_place(self, stream: Stream | None) -> Iterator[tuple[int | None, LayerWeights]]:
        """The slot that the layer is in, and its weights there, for as long as it is used.

        Refuses weights of the user's own.
        """
        assert stream is not None
        self._forward.check_places()
        slot = stream.acquire(self._forward.site)
        try:
            if self.quantised is not None:
                self.quantised.enter()
            yield slot, self._in_slot[slot]
        finally:
            if self.quantised is not None:
                self.quantised.leave()
            stream.release(self._forward.site)


class ResidentLayer:
    """A layer that stays on the device."""

    streamed = False

    def __init__(self, spec: LayerSpec, part: Part) -> None:
        self.spec = spec
        module = part.modules[0]
        arrange(spec, module)
        self.quantised = QuantisedLayer.of(spec, module)
        for group in adjacent_of(spec, self.quantised):
            _lay_together(module, group)
        self._weights = LayerWeights.of(spec, dict(module.named_parameters()), self.quantised)
        self.like = self._weights

    @contextmanager
    def in_place(self, stream: Stream | None) -> Iterator[tuple[int | None, LayerWeights]]:
        """No slot, and the weights."""
        if self.quantised is not None:
            self.quantised.enter()
        try:
            yield None, self._weights
        finally:
            if self.quantised is not None:
                self.quantised.leave()


class DecoderLayers:
    """All layers of a decoder, in order; `stretches` are the first and last of runs of resident
    ones, and streamed ones singly.
    """

    def __init__(self, spec: ModelSpec, parts: Sequence[Part], holder: nn.Module) -> None:
        by_name = {part.layer.name: part for part in parts}
        own = [by_name[name] for name in spec.layer_names]
        self.layers: list[StreamedLayer | ResidentLayer] = [
            StreamedLayer(layer, part)
            if isinstance(part.modules[0].forward, LayerForward)
            else ResidentLayer(layer, part)
            for layer, part in zip(spec.layers, own, strict=True)
        ]
        self.dtype = self.layers[0].like.qkv.weight.dtype
        self.stretches = _stretches(self.layers)
        quantised = next((x.quantised for x in self.layers if x.quantised is not None), None)
        # Where quantised weights of layers stand whole, one layer's after another's.
        self.scratch: Scratch | None = None if quantised is None else quantised.scratch
        modules = [part.modules[0] for part in own]
        self._structure = Structure(holder.get_submodule(spec.layer_list))
        self._hooks = Hooks(inner for module in modules for inner in module.modules())
        self._resident = Watched(
            place
            for layer, module in zip(self.layers, modules, strict=True)
            if not layer.streamed  # `in_place` looks at those
            for place in parameters_of(module)
        )
        self._placeholders = Watched(
            place
            for layer in self.layers
            if layer.quantised is not None
            for place in layer.quantised.placeholders()
        )

    @property
    def multiplied_as_stored(self) -> tuple[int, int]:
        """How many products can take quantised weights as they are stored: those of few rows, and
        those of any number of rows, whose rows are rounded to int8.
        """
        products = [
            getattr(layer.like, name) for layer in self.layers for name in layer.spec.linears()
        ]
        in_int8 = sum(product.int8 for product in products)
        return sum(p.as_stored(1) is not None for p in products) - in_int8, in_int8

    @property
    def whole_bytes(self) -> int:
        """Bytes of all layers' products, of quantised weights as they stand whole."""
        weights = [
            getattr(layer.like, name).weight
            for layer in self.layers
            for name in layer.spec.linears()
        ]
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def told(self, trace: Trace | None, first: int, last: int) -> AbstractContextManager[None]:
        """Tells `trace` which resident layers are issued; of streamed ones the stream tells it."""
        if trace is None or self.layers[first].streamed:
            return nullcontext()
        return trace.layers(first, last)

    def why_not(self) -> str | None:
        """A change that the user made to a layer and that only transformers' modules respect; None:
        there is none.
        """
        if self._resident.changed() or self._placeholders.changed():
            return "a weight that was replaced"
        if self._structure.changed():
            return "a module of a layer that was replaced"
        if self._hooks.foreign():
            return "a hook on a module of a layer"
        return None

    def close(self) -> None:
        """Let go of the weights."""
        self.layers.clear()
        self.stretches.clear()
        self._resident = self._placeholders = Watched(())


def _lay_together(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Give parameters that act as one a common memory, where they lie apart (in a live model)."""
    old = [layer.get_parameter(name) for name in names]
    if lie_together(old):
        return
    memory = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in old])
    at = 0
    for name, parameter in zip(names, old, strict=True):
        owner, _, key = name.rpartition(".")
        view = memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        moved = nn.Parameter(view, requires_grad=parameter.requires_grad)
        layer.get_submodule(owner)._parameters[key] = moved
        at += parameter.nbytes


def _stretches(layers: Sequence[StreamedLayer | ResidentLayer]) -> list[tuple[int, int]]:
    """Runs of resident layers, and single streamed ones: the first and last of each."""
    found: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        if found and not layer.streamed and not layers[index - 1].streamed:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found
