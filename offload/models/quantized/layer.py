"""A layer's quantised weights as the fused block multiplies with them: made whole in the scratch,
or as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from offload.kernels.int8_linear import why_not_int8
from offload.models.quantized.coded import Decoder
from offload.models.quantized.modules import quantised_forwards
from offload.models.quantized.scratch import Scratch
from offload.models.quantized.stack import Stack, StoredWeight, stored_together
from offload.models.quantized.whole import Fill
from offload.models.specs.spec import LayerSpec, LinearSpec, ModelSpec
from offload.models.watched import Place
from offload.store.layout import align


class Filling:
    """Makes the weight of a product whole, once each time that its layer is entered.

    `launch(stream)` issues it, like a `Call`, on the stream of that number, the current one.
    """

    def __init__(self, fills: Sequence[Fill], scratch: Scratch) -> None:
        self._fills = tuple(fills)
        self._scratch = scratch

    def launch(self, stream: int = 0) -> None:
        """Issue it, unless it was issued since the layer was entered."""
        if self not in self._scratch.holds:
            self._scratch.holds.add(self)
            for fill in self._fills:
                fill(stream)


class QuantisedLayer:
    """The quantised weights of one layer of a model, by their names in it.

    Weights that are made whole lie side by side in the model's scratch, which is told how much that
    takes.
    """

    def __init__(self, spec: LayerSpec, module: nn.Module) -> None:
        forwards = dict(quantised_forwards(module))
        self.scratch: Scratch = next(iter(forwards.values())).scratch
        self._weights = {
            f"{name}.{weight.key}": weight
            for name, forward in forwards.items()
            for weight in forward.weights
        }
        self._modules = {name: module.get_submodule(name) for name in forwards}
        self._offsets: dict[LinearSpec, int] = {}
        self._stacks: dict[LinearSpec, Stack] = {}
        self._adjacent: dict[LinearSpec, list[tuple[str, ...]]] = {}
        at = 0
        for linear in spec.linears().values():
            own = {n: self._weights[n] for n in linear.weights if n in self._weights}
            if not own:
                continue
            self._offsets[linear] = at
            if len(own) == len(linear.weights):
                stack = Stack.of(own)
                if stack is not None:
                    self._stacks[linear] = stack
                self._adjacent[linear] = stored_together(own)
            if not self.in_int8(linear):  # else it never stands whole
                at = align(at + sum(_whole(module, name).nbytes for name in linear.weights))
        self.scratch.need(at, max(weight.beside for weight in self._weights.values()))

    @classmethod
    def of(cls, spec: LayerSpec, module: nn.Module) -> QuantisedLayer | None:
        """The quantised weights of the layer `module`; None where it has none."""
        return cls(spec, module) if any(True for _ in quantised_forwards(module)) else None

    def __contains__(self, linear: LinearSpec) -> bool:
        return linear in self._offsets

    def adjacent(self, linear: LinearSpec) -> list[tuple[str, ...]]:
        """Stored tensors of that product, by name, that are to lie without a gap."""
        return [names for names in self._adjacent.get(linear, ()) if len(names) > 1]

    def placeholders(self) -> Iterator[Place]:
        """What stands for the weights in the model while the layer is not in use."""
        for name, weight in self._weights.items():
            module = self._modules[name.removesuffix(weight.key).rstrip(".")]
            yield vars(module), weight.key, weight.placeholder

    def enter(self) -> None:
        """The layer's weights are in their places; none is whole."""
        self.scratch.holds.clear()

    def leave(self) -> None:
        """The layer's weights may be replaced by others, and are made whole again for others who
        are still to use them.
        """
        self.scratch.holds.clear()
        self.scratch.poison()

    def whole(
        self, linear: LinearSpec, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Filling]:
        """Where the weight of a product will stand whole, and what makes it of the layer's
        `tensors`.
        """
        like = next(self._weights[n].placeholder for n in linear.weights if n in self._weights)
        shapes = [
            self._weights[n].placeholder.shape if n in self._weights else tensors[n].shape
            for n in linear.weights
        ]
        shape = torch.Size((sum(s[0] for s in shapes), *shapes[0][1:]))
        device = next(iter(tensors.values())).device
        weight = self.scratch.view(self._offsets[linear], shape, like.dtype, device)
        stack = self._stacks.get(linear)
        if stack is not None:
            fill = Decoder(stack.form, stack.shape).filler(stack.stored(tensors).tensors, weight)
            return weight, Filling([fill], self.scratch)
        targets = weight.split([s[0] for s in shapes])
        fills: list[Fill] = []
        for name, target in zip(linear.weights, targets, strict=True):
            own = self._weights.get(name)
            if own is None:
                fills.append(partial(_put, tensors[name], target))
                continue
            prefix = name.removesuffix(own.key)
            fills.append(own.filler([tensors[f"{prefix}{part}"] for part in own.parts], target))
        return weight, Filling(fills, self.scratch)

    def in_int8(self, linear: LinearSpec) -> bool:
        """Whether rows are rounded to int8 for the product with that weight."""
        stack = self._stacks.get(linear)
        if stack is None or linear.transposed:
            return False
        dtype = self._weights[linear.weights[0]].placeholder.dtype
        return not why_not_int8(stack.form, dtype, *stack.shape)

    def nowhere(self, linear: LinearSpec) -> torch.Tensor:
        """A stand-in for the weight of a product `in_int8`: a shape and dtype, without memory."""
        dtype = self._weights[linear.weights[0]].placeholder.dtype
        return torch.empty(self._stacks[linear].shape, dtype=dtype, device="meta")

    def multiplied_as_it_is(
        self, linear: LinearSpec, tensors: Mapping[str, torch.Tensor]
    ) -> StoredWeight | None:
        """What is stored for a product's weight, if rows are multiplied with that: a few rows with
        panels, any number with int8, to which they are rounded.
        """
        stack = self._stacks.get(linear)
        if stack is None or not (stack.form.layout == "panels" or self.in_int8(linear)):
            return None
        return stack.stored(tensors)


def _put(source: torch.Tensor, target: torch.Tensor, stream: int) -> None:
    target.copy_(source)


def _whole(layer: nn.Module, name: str) -> torch.Tensor:
    """The layer's parameter of that name; a placeholder for one that is quantised."""
    module, _, key = name.rpartition(".")
    return getattr(layer.get_submodule(module), key)


def adjacent_of(spec: LayerSpec, quantised: QuantisedLayer | None) -> list[tuple[str, ...]]:
    """Names of a layer's tensors that must lie without a gap between them."""
    found = []
    for linear in spec.linears().values():
        if quantised is None or linear not in quantised:
            found += list(linear.groups())
            continue
        found += quantised.adjacent(linear)
        found += [linear.biases] if len(linear.biases) > 1 else []
    return found


def adjacent(model: nn.Module, spec: ModelSpec) -> dict[str, list[tuple[str, ...]]]:
    """For every layer the tensors, by their full names, that must lie without a gap."""
    return {
        name: [
            tuple(f"{name}.{part}" for part in group)
            for group in adjacent_of(layer, QuantisedLayer.of(layer, model.get_submodule(name)))
        ]
        for name, layer in zip(spec.layer_names, spec.layers, strict=True)
    }
