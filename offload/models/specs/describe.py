"""From a transformers model to its specification, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.models.modules import find_layers
from offload.models.quantized.modules import quantised_forward, whole_parameters
from offload.models.specs.families import FAMILIES, Names
from offload.models.specs.spec import CannotExpress, LayerSpec, ModelSpec, NormSpec
from offload.models.watched import is_foreign

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def describe(model: PreTrainedModel) -> ModelSpec:
    """What the fused engine needs to know of `model`; raises CannotExpress with the reason."""
    found = describe_layers(model)
    layers, holder = found.layers, found.holder
    config: Any = getattr(holder, "config", model.config)
    family = FAMILIES[config.model_type]
    around = ModelSpec(
        family=config.model_type,
        holder=found.holder_name,
        layers=found.specs,
        layer_names=tuple(layers),
        hidden=_hidden(config),
        cache_copies=family.cache_copies(config),
        attention=getattr(config, "_attn_implementation", None),
        last_norm=_last_norm(holder, family.around["final_norm"], found.specs[0]),
        **family.around,
    )
    _check_parameters(model, holder, around, list(layers.values()))
    _check_angles(holder, around)
    return around


@dataclass(frozen=True)
class DescribedLayers:
    """The layers of a model, what holds them, and their specifications."""

    layers: dict[str, nn.Module]
    holder_name: str
    holder: nn.Module
    specs: tuple[LayerSpec, ...]


def describe_layers(model: PreTrainedModel) -> DescribedLayers:
    """The blocks alone, whose parameters may be anywhere, on the meta device too. Raises
    CannotExpress with the reason.
    """
    layers = find_layers(model)
    holders = {name.rpartition(".")[0].rpartition(".")[0] for name in layers}
    lists = {name.rpartition(".")[0] for name in layers}
    if len(lists) != 1:
        raise CannotExpress(f"layers in several lists ({', '.join(sorted(lists))})")
    holder_name = holders.pop()
    holder = model.get_submodule(holder_name)
    config: Any = getattr(holder, "config", model.config)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise CannotExpress(f"the family {config.model_type!r}")
    _check_modules(holder, family.holder, layers)
    if len(layers) != config.num_hidden_layers:
        raise CannotExpress(
            f"{len(layers)} layers where the config says {config.num_hidden_layers}"
        )
    if getattr(config, "is_causal", None) is False:
        raise CannotExpress("attention that is not causal")
    parameters = [dict(whole_parameters(layer)) for layer in layers.values()]
    hidden = _hidden(config)
    specs = []
    for index, (name, own) in enumerate(zip(layers, parameters, strict=True)):
        spec = family.layer(config, Names(name, own), index)
        spare = sorted(own.keys() - spec.names())
        if spare:
            raise CannotExpress(
                f"{name} has the parameter {spare[0]}, which its block has no use for"
            )
        spec.check(name, {n: tuple(p.shape) for n, p in own.items()}, hidden)
        specs.append(spec)
    return DescribedLayers(layers, holder_name, holder, tuple(specs))


def _last_norm(holder: nn.Module, name: str, layer: LayerSpec) -> NormSpec | None:
    """The normalisation behind the last layer; of the layers' own kind."""
    module: Any = getattr(holder, name, None)
    if module is None:
        return None
    like = next(norm for norm in layer.norms().values() if norm is not None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if isinstance(module, nn.LayerNorm) != (like.kind == "layer") or not isinstance(eps, float):
        raise CannotExpress(f"{name} of the class {type(module).__name__}")
    parameters = dict(module.named_parameters())
    weight, bias = ("weight" if "weight" in parameters else None, "bias" in parameters)
    return replace(like, eps=eps, weight=weight, bias="bias" if bias else None)


def _check_modules(holder: nn.Module, expected: str, layers: dict[str, nn.Module]) -> None:
    """Refuse modules that are not transformers' own, or whose forward is not their class's."""
    cls = type(holder)
    if cls.__name__ != expected or not cls.__module__.startswith("transformers.models."):
        raise CannotExpress(f"the class {cls.__module__}.{cls.__name__}")
    for name, layer in layers.items():
        for inner, module in layer.named_modules():
            where, cls = f"{name}.{inner}".rstrip("."), type(module)
            if not cls.__module__.startswith(("transformers.", "torch.nn.")):
                raise CannotExpress(f"{where} of the class {cls.__module__}.{cls.__name__}")
            hooks = (module._forward_pre_hooks, module._forward_hooks)
            quantised = quantised_forward(module)
            if vars(module).get("forward") is not quantised or any(map(is_foreign, hooks)):
                raise CannotExpress(f"{where} with hooks or a forward of its own")
            if quantised is not None and quantised.base:
                raise CannotExpress(f"{where} inside of a module with quantised weights of its own")


def _check_parameters(
    model: nn.Module, holder: nn.Module, spec: ModelSpec, layers: Sequence[nn.Module]
) -> None:
    """Refuse dtypes that differ, and weights that stand in more than one place."""
    tokens: Any = holder.get_submodule(spec.tokens)
    dtype = tokens.weight.dtype
    if dtype not in DTYPES:
        raise CannotExpress(f"the dtype {dtype}")
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, layer in zip(spec.layer_names, layers, strict=True):
        for key, whole in whole_parameters(layer):
            if whole.dtype != dtype:
                raise CannotExpress(f"{name}.{key} in {whole.dtype} beside {dtype}")
        for key, parameter in layer.named_parameters():
            if uses[id(parameter)] > 1:
                raise CannotExpress(f"{name}.{key}, which is shared with another place")


def _check_angles(holder: nn.Module, spec: ModelSpec) -> None:
    """Refuse a rotary table that does not fit the heads."""
    with torch.no_grad():
        positions = torch.zeros(1, 1, dtype=torch.int64)
        for layer in spec.layers[:1] if len(spec.tables) == 1 else spec.layers:
            if layer.rotary is None:
                continue
            cos, sin = spec.angles(holder, positions, layer.rotary)
            turned, head_dim = 2 * cos.shape[-1], layer.layout.head_dim
            if cos.shape != sin.shape or cos.dim() != 3 or not 0 < turned <= head_dim:
                raise CannotExpress(f"a rotation of {turned} elements in heads of {head_dim}")


def _hidden(config: Any) -> int:
    return getattr(config, "hidden_size", None) or config.n_embd
