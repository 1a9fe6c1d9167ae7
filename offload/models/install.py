"""Puts a model's tensors where the plan says, and its layers' forwards on the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from offload.checkpoint.expressions import Held
from offload.device import ComputeDevice
from offload.errors import BudgetError, UnsupportedError
from offload.memory_limits import host_memory_available
from offload.models.hooked import LayerForward, NotCopied, PassForward, PassOwner
from offload.models.modules import Binding, ancestors
from offload.models.parts import ModelParts, Part
from offload.scheduler.plan import Plan, Tier
from offload.sizes import format_size
from offload.store import WeightStore
from offload.store.layout import Layer


def install(
    parts: ModelParts,
    layers: Sequence[Layer],
    plan: Plan,
    store: WeightStore,
    owner: PassOwner,
    device: ComputeDevice,
) -> None:
    """Load what is resident, begin to load the CPU tier, and make every streamed layer run from the
    store's slots.

    `layers` are those of the parts, with sources in files for the NVMe tier.
    """
    _place_resident(parts.outside, store, device, parts.outside_buffers)
    for buffer in parts.buffers:
        moved = buffer.tensor.to(device.torch_device)
        for b in buffer.bindings:
            b.module._buffers[b.key] = moved
    streamed = []
    for index, (part, tier) in enumerate(zip(parts.layers, plan.tiers, strict=True)):
        if tier is Tier.DEVICE:
            _place_resident(part, store, device)
        else:
            streamed.append((index, part))
    for index, part in streamed:
        part.detach()
        if plan.tiers[index] is Tier.NVME:
            part.release()
    store.open(on_layer=lambda index: parts.layers[index].release())
    site = 0
    for index, part in streamed:
        parameters = [layers[index].parameters(slot, part.placeholders) for slot in store.slots]
        for module in part.modules:
            module.forward = LayerForward(module.forward, owner, site, part, parameters)
            module._apply = refuse_move  # type: ignore[method-assign]
            site += 1
        _keep_state_dict(store, index, part)
    for _, module in ancestors(parts.model, [part.layer.name for part in parts.layers]):
        module.forward = PassForward(module.forward, owner)
        module._apply = refuse_move  # type: ignore[method-assign]


def refuse_move(*_: Any, **__: Any) -> NoReturn:
    """Stands in for what `to`, `half`, `cuda` and the like come down to."""
    raise UnsupportedError(
        "an offloaded model cannot be moved or cast: pass device= or dtype= to offload.run instead"
    )


def _place_resident(
    part: Part, store: WeightStore, device: ComputeDevice, buffers: frozenset[str] = frozenset()
) -> None:
    """The part's tensors on the compute device for good; those of a live model stay the objects'
    own.
    """
    stored = [p for p in part.layer.places if not isinstance(p.source, Held)]
    layer = Layer.lay_out(part.layer.name, [(p.name, p.source) for p in stored], part.adjacent)
    memory = store.resident(layer)
    views = {p.name: p.view(memory) for p in layer.places}
    for place, bindings, placeholder in zip(
        part.layer.places, part.bindings, part.placeholders, strict=True
    ):
        with torch.inference_mode(False):
            value = views.get(place.name)
            if value is None:
                first = bindings[0]
                value = first.module.get_parameter(first.key).detach().to(device.torch_device)
            for b in bindings:
                if place.name in buffers:
                    b.module._buffers[b.key] = value
            if place.name not in buffers:
                parameter = nn.Parameter(value, requires_grad=placeholder.requires_grad)
                for b in bindings:
                    b.module._parameters[b.key] = parameter


def _keep_state_dict(store: WeightStore, index: int, part: Part) -> None:
    """`state_dict` reads this part's tensors from where they rest; loading into them is refused."""
    places: dict[nn.Module, list[tuple[str, int]]] = {}
    for i, bindings in enumerate(part.bindings):
        for b in bindings:
            places.setdefault(b.module, []).append((b.key, i))
    for module, keys in places.items():
        module.register_state_dict_post_hook(_StateDict(store, index, keys))
        module.register_load_state_dict_pre_hook(_refuse_load)


class _StateDict(NotCopied):
    """Fills a module's entries of a state dict with CPU tensors read from the store."""

    def __init__(self, store: WeightStore, index: int, keys: list[tuple[str, int]]) -> None:
        self._store, self._index, self._keys = store, index, keys

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for key, i in self._keys:
            needed, free = module._parameters[key].nbytes, host_memory_available()  # type: ignore[union-attr]
            if needed > free:
                raise BudgetError(
                    f"state_dict() would read {prefix}{key} ({format_size(needed)}) and "
                    f"{format_size(free)} of CPU memory are free; the weights of an offloaded "
                    "model are in its checkpoint folder"
                )
            state[prefix + key] = self._store.read_tensor(self._index, i)


def _refuse_load(module: nn.Module, *args: Any) -> NoReturn:
    raise UnsupportedError(
        "load_state_dict() into an offloaded model: its weights rest in the store and cannot be "
        "replaced; load them into the plain model and call offload.run on that"
    )


def all_bindings(parts: ModelParts) -> list[tuple[Binding, nn.Parameter]]:
    """Every place of a parameter in the model, with the placeholder that frees it."""
    return [
        (b, placeholder)
        for part in (*parts.layers, parts.outside)
        for bindings, placeholder in zip(part.bindings, part.placeholders, strict=True)
        for b in bindings
        if b.key in b.module._parameters
    ]
