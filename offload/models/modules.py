"""What a transformers model is made of: its layer lists, what stands outside them, and which
tensors are tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Binding:
    """A place where a module holds a parameter or buffer: `module._parameters[key]` or
    `module._buffers[key]`.
    """

    module: nn.Module
    key: str
    name: str  # the full name: model.layers.3.mlp.up_proj.weight


@dataclass(frozen=True, slots=True)
class Shared:
    """One tensor and every place that holds it; more than one place means tied."""

    tensor: torch.Tensor
    bindings: tuple[Binding, ...]

    @property
    def name(self) -> str:
        """The first place's name."""
        return self.bindings[0].name


def find_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The model's blocks by name, in the order of the model: what moves at once.

    A block is a child of a ModuleList whose children are all of classes that the model declares
    indivisible (`_no_split_modules`); a model that declares none is searched for its largest list
    of equal children.
    """
    declared = set(_no_split(model))
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    chosen = [
        (name, module)
        for name, module in lists
        if all(type(child).__name__ in declared for child in module)
    ]
    if not chosen:
        equal = [
            (n, m)
            for n, m in lists
            if len(m) > 1
            and len({type(c) for c in m}) == 1
            and not isinstance(m[0], (nn.ModuleList, nn.ModuleDict))  # nobody calls these
        ]
        chosen = sorted(equal, key=lambda item: -_size(item[1]))[:1]
    outermost = [
        (name, module)
        for name, module in chosen
        if not any(name.startswith(f"{other}.") for other, _ in chosen if other != name)
    ]
    layers = {f"{name}.{i}": child for name, module in outermost for i, child in enumerate(module)}
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of transformer blocks to stream: it declares no "
            "`_no_split_modules` and has no ModuleList of equal modules"
        )
    if len({id(m) for m in layers.values()}) != len(layers):
        raise UnsupportedError(
            f"{type(model).__name__} runs one block several times (shared layers); such a model is "
            "small enough to stay resident"
        )
    return layers


def _no_split(model: PreTrainedModel) -> Iterator[str]:
    for module in model.modules():
        yield from getattr(module, "_no_split_modules", None) or ()


def _size(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def shared_parameters(model: nn.Module) -> list[Shared]:
    """Every parameter once, with all the places that hold it, in the order of the model."""
    return _shared(model, "_parameters")


def shared_buffers(model: nn.Module) -> list[Shared]:
    """Every buffer once, with all the places that hold it."""
    return _shared(model, "_buffers")


def _shared(model: nn.Module, holder: str) -> list[Shared]:
    places: dict[int, tuple[torch.Tensor, list[Binding]]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in getattr(module, holder).items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                places.setdefault(id(tensor), (tensor, []))[1].append(Binding(module, key, name))
    return [Shared(tensor, tuple(bindings)) for tensor, bindings in places.values()]


def ancestors(model: nn.Module, names: Iterator[str] | list[str]) -> list[tuple[str, nn.Module]]:
    """The model and every module on the way down to the named ones, lists left out."""
    paths = {""}
    for name in names:
        parts = name.split(".")
        paths |= {".".join(parts[:i]) for i in range(1, len(parts))}
    return [
        (p, model.get_submodule(p))
        for p in sorted(paths)
        if not isinstance(model.get_submodule(p), nn.ModuleList)
    ]
