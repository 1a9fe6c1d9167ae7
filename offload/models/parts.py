"""A model taken apart for streaming: what moves, layer by layer, and what stays on the compute
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.checkpoint.expressions import Expression, Held
from offload.checkpoint.lazy import LazyTensor
from offload.models.modules import Binding, Shared, find_layers, shared_buffers, shared_parameters
from offload.models.placeholder import Placeholder
from offload.store.layout import Layer


@dataclass(slots=True)
class Part:
    """A layer and its places in the model: `bindings[i]` hold the layer's i-th tensor."""

    layer: Layer
    # Those whose forwards use the layer: one, or more where weights are tied.
    modules: tuple[nn.Module, ...]
    bindings: tuple[tuple[Binding, ...], ...] = ()
    placeholders: list[nn.Parameter] = field(default_factory=list)
    adjacent: tuple[tuple[str, ...], ...] = ()  # names of tensors that lie without a gap

    def detach(self) -> None:
        """Put placeholders in the model where this layer's tensors were."""
        for bindings, placeholder in zip(self.bindings, self.placeholders, strict=True):
            for b in bindings:
                b.module._parameters[b.key] = placeholder

    def release(self) -> None:
        """Let go of tensors of a live model that this layer was made from."""
        for place in self.layer.places:
            if isinstance(place.source, Held):
                place.source.release()


@dataclass(slots=True)
class ModelParts:
    """Everything that `model` holds. `outside` stands outside the layers and stays on the compute
    device.
    """

    model: PreTrainedModel
    layers: list[Part]
    outside: Part
    outside_buffers: frozenset[str]  # names in `outside` that are buffers
    buffers: list[Shared]  # real ones

    @property
    def outside_bytes(self) -> int:
        """Bytes that stay on the compute device whatever the plan."""
        return self.outside.layer.nbytes + sum(b.tensor.nbytes for b in self.buffers)


def take_apart(
    model: PreTrainedModel,
    own_tier: Sequence[str] = (),
    adjacent: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> ModelParts:
    """The parts of `model`; modules named in `own_tier` move like layers although they stand
    outside the blocks. `adjacent` names, layer by layer, tensors that are to lie without a gap.

    A tensor that several layers share, or a layer and what stands outside, belongs to the outside:
    it has one owner. A tensor that a module of `own_tier` shares with others outside (a tied
    embedding and head) moves with that module, and every module that holds it becomes a place of
    use.
    """
    units = find_layers(model)
    names = {name: i for i, (name, _) in enumerate(model.named_modules())}
    for name in own_tier:
        units[name] = model.get_submodule(name)
    units = dict(sorted(units.items(), key=lambda item: names[item[0]]))
    owner_of: dict[int, str | None] = {}
    for unit, unit_module in units.items():
        for m in unit_module.modules():
            in_two_layers = id(m) in owner_of and unit not in own_tier
            owner_of[id(m)] = None if in_two_layers else unit
    tensors: dict[str, list[Shared]] = {unit: [] for unit in units}
    users: dict[str, list[nn.Module]] = {unit: [module] for unit, module in units.items()}
    outside: list[Shared] = []
    for shared in shared_parameters(model):
        owners = {owner_of.get(id(b.module)) for b in shared.bindings}
        named = owners - {None}
        owner = next(iter(named)) if len(named) == 1 else None
        if owner is not None and None in owners and owner not in own_tier:
            owner = None
        if owner is None:
            outside.append(shared)
            continue
        tensors[owner].append(shared)
        for b in shared.bindings:
            if owner_of.get(id(b.module)) is None and b.module not in users[owner]:
                users[owner].append(b.module)
    together = adjacent or {}
    layers = [
        _part(unit, tensors[unit], users[unit], together.get(unit, ()))
        for unit in units
        if tensors[unit]
    ]
    buffers = shared_buffers(model)
    stored = [b for b in buffers if isinstance(b.tensor, LazyTensor)]
    return ModelParts(
        model=model,
        layers=layers,
        outside=_part("outside the layers", [*outside, *stored], []),
        outside_buffers=frozenset(b.name for b in stored),
        buffers=[b for b in buffers if not isinstance(b.tensor, LazyTensor)],
    )


def _part(
    name: str,
    tensors: Sequence[Shared],
    users: Sequence[nn.Module],
    adjacent: Sequence[Sequence[str]] = (),
) -> Part:
    layer = Layer.lay_out(name, [(s.name, _expression(s.tensor)) for s in tensors], adjacent)
    with torch.inference_mode(False):
        placeholders = [Placeholder.parameter(s.name, s.tensor) for s in tensors]
    return Part(
        layer,
        tuple(users),
        tuple(s.bindings for s in tensors),
        placeholders,
        tuple(tuple(group) for group in adjacent),
    )


def _expression(tensor: torch.Tensor) -> Expression:
    return tensor.expression if isinstance(tensor, LazyTensor) else Held(tensor.data)
