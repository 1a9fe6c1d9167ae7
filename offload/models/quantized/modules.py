"""A model's modules with quantised weights: given their stored tensors, which move and rest, found,
counted and released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from offload.checkpoint.expressions import Coded
from offload.checkpoint.lazy import LazyTensor
from offload.models.modules import shared_parameters
from offload.models.placeholder import Placeholder
from offload.models.quantized.forward import (
    QuantisedForward,
    QuantisedLinear,
    QuantisedLookup,
    room,
)
from offload.models.quantized.scratch import Scratch
from offload.models.quantized.whole import WholeWeight, leaves_of, parts_of

_STORED = "quantised_forward"  # where a module keeps its `QuantisedForward`


def keep_quantised(model: nn.Module) -> None:
    """Give every module of `model` whose parameters are made of quantised weights the stored
    tensors as parameters, and a forward that makes the weights of them.

    A parameter that is more than a rearrangement of such weights stays as it is: it is computed
    once, like any other that loading changed.
    """
    found: dict[int, list[WholeWeight]] = {}
    for shared in shared_parameters(model):
        if not isinstance(shared.tensor, LazyTensor):
            continue
        expression = shared.tensor.expression
        leaves = leaves_of(expression)
        if leaves is None or not any(isinstance(leaf, Coded) for leaf in leaves):
            continue
        stored: dict[str, nn.Parameter] = {}
        key = shared.bindings[0].key
        for i, leaf in enumerate(leaves):
            prefix = f"{key}_{i}_" if len(leaves) > 1 else "" if key == "weight" else f"{key}_"
            for end, part in parts_of(leaf):
                with torch.inference_mode(False):
                    stored[f"{prefix}{end}"] = nn.Parameter(LazyTensor(part), requires_grad=False)
        for b in shared.bindings:
            # The codes of some formats have the weight's own name.
            renamed = {(f"{b.key}_codes" if n == b.key else n): p for n, p in stored.items()}
            placeholder = Placeholder.parameter(b.name, shared.tensor)
            del b.module._parameters[b.key]
            b.module._parameters.update(renamed)
            b.module.__dict__[b.key] = placeholder
            weights = found.setdefault(id(b.module), [])
            weights.append(WholeWeight(b.key, tuple(renamed), expression, placeholder))
    scratch = Scratch()
    bases = _bases(model, found)
    for module in list(model.modules()):
        if id(module) in found:
            weights, base = found[id(module)], bases[id(module)]
            kind = _kind(module, weights)
            if kind is not QuantisedLookup:
                scratch.need(base + room(weights), max(w.beside for w in weights))
            forward = kind(module, weights, scratch, base)
            module.__dict__[_STORED] = module.forward = forward


def _kind(module: nn.Module, weights: Sequence[WholeWeight]) -> type[QuantisedForward]:
    for kind in (QuantisedLookup, QuantisedLinear):
        if kind.serves(module, weights):
            return kind
    return QuantisedForward


def _bases(model: nn.Module, found: dict[int, list[WholeWeight]]) -> dict[int, int]:
    """Where each module's weights begin: behind those of the modules that contain it."""
    bases: dict[int, int] = {}

    def visit(module: nn.Module, base: int) -> None:
        if bases.get(id(module), -1) >= base:
            return
        bases[id(module)] = base
        end = base + room(found.get(id(module), ()))
        for child in module.children():
            visit(child, end)

    visit(model, 0)
    return bases


def quantised_forwards(model: nn.Module) -> Iterator[tuple[str, QuantisedForward]]:
    """Every module whose weights are made where they are used, by its name."""
    for name, module in model.named_modules():
        forward = quantised_forward(module)
        if forward is not None:
            yield name, forward


def quantised_forward(module: nn.Module) -> QuantisedForward | None:
    """The forward of `module` that makes its weights, if it has quantised ones."""
    return module.__dict__.get(_STORED)


def whole_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of `module` by its name, and for what is stored the placeholders of the
    weights that it stands for.
    """
    stored = set()
    for name, weight in quantised_weights(module):
        yield name, weight.placeholder
        stored |= {f"{name.removesuffix(weight.key)}{part}" for part in weight.parts}
    yield from ((name, p) for name, p in module.named_parameters() if name not in stored)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, WholeWeight]]:
    """Every weight that is made where it is used, with its full name."""
    for name, forward in quantised_forwards(model):
        for weight in forward.weights:
            yield f"{name}.{weight.key}" if name else weight.key, weight


def linears_in_int8(model: nn.Module) -> int:
    """How many modules round what they are given to int8."""
    return sum(isinstance(forward, QuantisedLinear) for _, forward in quantised_forwards(model))


def scratch_bytes(model: nn.Module) -> int:
    """The most bytes that weights of `model` made whole take at one time."""
    scratches = {id(f.scratch): f.scratch for _, f in quantised_forwards(model)}
    return sum(scratch.peak for scratch in scratches.values())


def release_quantised(model: nn.Module) -> None:
    """Give back the memory of all weights, stored and whole."""
    for _, forward in quantised_forwards(model):
        forward.release()
