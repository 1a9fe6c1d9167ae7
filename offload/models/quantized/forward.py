"""Modules over quantised weights: the stored tensors move and rest, and a weight stands whole only
while its module's forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.checkpoint.lazy import Coded, Deferred, Expression, LazyTensor, Pieces
from offload.models.modules import shared_parameters
from offload.models.placeholder import Placeholder

_STORED = "quantised_weights"  # where a module keeps its `WholeWeight`s


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A weight of a module, and how it is made of the stored tensors that are the module's
    parameters.
    """

    key: str  # the attribute that the module's forward reads
    parts: tuple[str, ...]  # keys of `_parameters`
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    placeholder: nn.Parameter

    def whole(self, module: nn.Module) -> nn.Parameter:
        """The weight on the device of its parts, in memory of its own."""
        parts = [module._parameters[part] for part in self.parts]
        with torch.inference_mode(False), torch.no_grad():
            value = self.make(parts)  # type: ignore[arg-type]
            return nn.Parameter(value, requires_grad=self.placeholder.requires_grad)


class QuantisedForward:
    """Stands in for a module's `forward`: its weights are made, used and let go."""

    def __init__(self, module: nn.Module, weights: Sequence[WholeWeight]) -> None:
        functools.update_wrapper(self, module.forward)
        self._forward = module.forward
        self._module = module
        self._weights = tuple(weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What stands in the object's own dict is found before parameters are looked for.
        holder = self._module.__dict__
        try:
            for weight in self._weights:
                holder[weight.key] = weight.whole(self._module)
            return self._forward(*args, **kwargs)
        finally:
            for weight in self._weights:
                holder[weight.key] = weight.placeholder


def keep_quantised(model: nn.Module) -> None:
    """Give every module of `model` whose parameters are made of quantised weights the stored
    tensors as parameters, and a forward that makes the weights of them.

    A parameter that is more than a rearrangement of such weights stays as it is: it is computed
    once, as any other that loading changed.
    """
    found: dict[int, tuple[nn.Module, list[WholeWeight]]] = {}
    for shared in shared_parameters(model):
        if not isinstance(shared.tensor, LazyTensor):
            continue
        leaves = _leaves(shared.tensor.expression)
        if leaves is None or not any(isinstance(leaf, Coded) for leaf in leaves):
            continue
        stored: dict[str, nn.Parameter] = {}
        key = shared.bindings[0].key
        for i, leaf in enumerate(leaves):
            prefix = f"{key}_{i}_" if len(leaves) > 1 else "" if key == "weight" else f"{key}_"
            for end, part in _parts(leaf):
                with torch.inference_mode(False):
                    stored[f"{prefix}{end}"] = nn.Parameter(part, requires_grad=False)
        make = _maker(shared.tensor.expression, leaves)
        for b in shared.bindings:
            # The codes of some formats have the weight's own name.
            renamed = {(f"{b.key}_codes" if n == b.key else n): p for n, p in stored.items()}
            placeholder = Placeholder.parameter(b.name, shared.tensor)
            del b.module._parameters[b.key]
            b.module._parameters.update(renamed)
            b.module.__dict__[b.key] = placeholder
            weights = found.setdefault(id(b.module), (b.module, []))[1]
            weights.append(WholeWeight(b.key, tuple(renamed), make, placeholder))
    for module, weights in found.values():
        module.__dict__[_STORED] = tuple(weights)
        module.forward = QuantisedForward(module, weights)


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, WholeWeight]]:
    """Every weight that is made where it is used, with its full name."""
    for name, module in model.named_modules():
        for weight in module.__dict__.get(_STORED, ()):
            yield f"{name}.{weight.key}" if name else weight.key, weight


def scratch_bytes(model: nn.Module) -> int:
    """Bytes that the weights of one module take while its forward runs; the most of any."""
    return max(
        (
            sum(w.placeholder.nbytes for w in module.__dict__.get(_STORED, ()))
            for module in model.modules()
        ),
        default=0,
    )


def _leaves(expression: Expression) -> list[Coded | Pieces] | None:
    """The stored tensors that an expression rearranges, once each; None where it does more."""
    if isinstance(expression, (Coded, Pieces)):
        return [expression]
    if not isinstance(expression, Deferred) or expression.func not in _REARRANGING:
        return None
    found: list[Coded | Pieces] = []
    for leaf in tree_leaves((expression.args, expression.kwargs)):
        if isinstance(leaf, LazyTensor):
            inner = _leaves(leaf.expression)
            if inner is None:
                return None
            found += [x for x in inner if not any(x is y for y in found)]
        elif isinstance(leaf, torch.Tensor):
            return None
    return found


# They only move numbers or round them; the result of any other is worth keeping.
_aten = torch.ops.aten
_REARRANGING = {
    torch.Tensor.to,
    _aten.cat.default,
    _aten.stack.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.clone.default,
}


def _parts(leaf: Coded | Pieces) -> Iterator[tuple[str, LazyTensor]]:
    if isinstance(leaf, Coded):
        yield from leaf.parts
    else:
        yield "plain", LazyTensor(leaf)


def _maker(
    expression: Expression, leaves: Sequence[Coded | Pieces]
) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """What makes the value of `expression` of the leaves' stored tensors, in their order."""

    def make(stored: Sequence[torch.Tensor]) -> torch.Tensor:
        given = iter(stored)
        values = []
        for leaf in leaves:
            parts = {end: next(given) for end, _ in _parts(leaf)}
            values.append(
                leaf.decode(parts, leaf.dtype) if isinstance(leaf, Coded) else parts["plain"]
            )
        return _evaluate(expression, leaves, values).contiguous()

    return make


def _evaluate(
    expression: Expression, leaves: Sequence[Coded | Pieces], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    for leaf, value in zip(leaves, values, strict=True):
        if expression is leaf:
            return value
    assert isinstance(expression, Deferred)
    args, kwargs = tree_map_only(
        LazyTensor,
        lambda t: _evaluate(t.expression, leaves, values),
        (expression.args, expression.kwargs),
    )
    result = expression.func(*args, **kwargs)
    return result if expression.output is None else result[expression.output]
