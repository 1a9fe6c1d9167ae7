"""What a transformers model is made of: its layer lists, what stands outside them, and which
tensors are tied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.errors import UnsupportedError

# Of a model that declares no blocks, lists of modules below this share of the largest list's stay.
_SMALL = 1 / 8


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
    indivisible (`_no_split_modules`); in a model that declares none, of a list of equal modules.
    A block that stands in several places has the name of the first.
    """
    declared = set(_no_split(model))
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    }
    chosen = _outermost(
        {n: m for n, m in lists.items() if all(type(child).__name__ in declared for child in m)}
    )
    layers = {
        f"{name}.{i}": child
        for name, module in (chosen or _look_like_blocks(lists)).items()
        for i, child in enumerate(module)
    }
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of transformer blocks to stream: it declares no "
            "`_no_split_modules` and has no ModuleList of equal modules"
        )
    first = {id(module): name for name, module in reversed(layers.items())}
    return {name: module for name, module in layers.items() if first[id(module)] == name}


def _look_like_blocks(lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    """The outermost lists of equal modules, but for those of small ones beside others' blocks."""
    equal = {
        name: module
        for name, module in lists.items()
        if len({type(child) for child in module}) == 1
        and not isinstance(module[0], (nn.ModuleList, nn.ModuleDict))  # nobody calls these
    }
    # Where blocks are made of modules, a list of bare ones holds heads or embeddings.
    equal = {n: m for n, m in equal.items() if any(True for _ in m[0].children())} or equal
    longer = [name for name, module in equal.items() if len(module) > 1]
    found = _outermost(
        {
            name: module
            for name, module in equal.items()
            if len(module) > 1 or not any(other.startswith(f"{name}.") for other in longer)
        }
    )
    size = {name: sum(map(_size, module)) / len(module) for name, module in found.items()}
    least = max(size.values(), default=0) * _SMALL
    return {name: module for name, module in found.items() if size[name] >= least > 0}


def _outermost(lists: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    return {
        name: module
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists)
    }


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
