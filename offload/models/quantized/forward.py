"""Modules over quantised weights: the stored tensors move and rest, and a weight stands whole only
while its module's forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from offload.checkpoint.lazy import Coded, LazyTensor
from offload.errors import UnsupportedError
from offload.kernels.call import current_stream
from offload.kernels.dequantize import dequantise
from offload.kernels.int8_linear import Int8Linear, why_not_int8
from offload.models.modules import shared_parameters
from offload.models.placeholder import Placeholder
from offload.models.quantized.coded import Decoder
from offload.models.quantized.scratch import Scratch
from offload.models.quantized.whole import Fill, WholeWeight, leaves_of, parts_of
from offload.store.layout import align

_STORED = "quantised_forward"  # where a module keeps its `QuantisedForward`


class QuantisedForward:
    """Stands in for a module's `forward`: its weights are made, used, and overwritten by the next
    module's.

    Where they are made is the model's scratch, from the byte `base` on; the modules that this one
    contains have theirs behind it.
    """

    def __init__(
        self, module: nn.Module, weights: Sequence[WholeWeight], scratch: Scratch, base: int
    ) -> None:
        functools.update_wrapper(self, module.forward)
        self.weights = tuple(weights)
        self.scratch = scratch
        self._forward = module.forward
        self._module = module
        self.base = base
        self._end = base + room(weights)
        self._made: dict[tuple[int, ...], _Made] = {}  # by the addresses of what is stored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scratch = self.scratch
        # A graph for gradients keeps the weight; and no two threads fill the same memory.
        if torch.is_grad_enabled() or not scratch.lock.acquire(blocking=False):
            return self._run_apart(args, kwargs)
        top = scratch.top
        try:
            if top > self.base:  # in the middle of another module, which does not contain this one
                return self._run_apart(args, kwargs)
            scratch.top = self._end
            scratch.holds.clear()
            parameters = self._module._parameters
            self._check_kept(parameters)
            parts = [parameters[part] for weight in self.weights for part in weight.parts]
            key = tuple([part.data_ptr() for part in parts])  # type: ignore[union-attr]
            made = self._made.get(key)
            if made is None:
                made = self._made[key] = self._make()
            made.fill()
            return self._run(made.parameters, args, kwargs)
        finally:
            scratch.top = top
            scratch.lock.release()

    def _check_kept(self, parameters: Mapping[str, Any]) -> None:
        """Refuse weights of the user's own: they would not be computed with."""
        for weight in self.weights:
            if weight.key in parameters:
                raise UnsupportedError(
                    f"{weight.placeholder.data.weight} was replaced after offload.run, which "  # type: ignore[attr-defined]
                    "computes with the stored weight: change weights before, or replace the module "
                    "that holds it"
                )

    def _run(self, values: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        # What stands in the object's own dict is found before parameters are looked for.
        holder = self._module.__dict__
        try:
            for weight, value in zip(self.weights, values, strict=True):
                holder[weight.key] = value
            return self._forward(*args, **kwargs)
        finally:
            for weight in self.weights:
                holder[weight.key] = weight.placeholder

    def _run_apart(self, args: Any, kwargs: Any) -> Any:
        """With weights in memory of their own."""
        values = []
        self._check_kept(self._module._parameters)
        with torch.inference_mode(False), torch.no_grad():
            for weight in self.weights:
                value = weight.make([self._module._parameters[p] for p in weight.parts])  # type: ignore[misc]
                values.append(nn.Parameter(value, weight.placeholder.requires_grad))
        return self._run(values, args, kwargs)

    def _make(self) -> _Made:
        values, fills = [], []
        at = self.base
        device = torch.device("meta")
        with torch.inference_mode(False), torch.no_grad():
            for weight in self.weights:
                # `data` keeps the memory that is stored in now, whatever the parameter becomes.
                parts = [self._module._parameters[p].data for p in weight.parts]  # type: ignore[union-attr]
                if any(part.is_meta for part in parts):
                    weight.make(parts)  # which says what is not in its place
                device = parts[0].device
                like = weight.placeholder
                out = self.scratch.view(at, like.shape, like.dtype, device)
                fills.append(weight.filler(parts, out))
                values.append(nn.Parameter(out, like.requires_grad))
                at += align(weight.nbytes)
        return _Made(values, fills, device, self.scratch)

    def release(self) -> None:
        """Let go of the memory of stored and whole weights."""
        self._made.clear()
        self.scratch.release()
        parameters = self._module._parameters
        for weight in self.weights:
            module = weight.placeholder.data.weight.removesuffix(weight.key)  # type: ignore[attr-defined]
            for part in weight.parts:
                stored = parameters.get(part)
                if stored is not None and not stored.is_meta:
                    parameters[part] = Placeholder.parameter(f"{module}{part}", stored)


class _Made:
    """The weights of a module whose stored tensors lie in one place, and what makes them."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        fills: Sequence[Fill],
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        self.parameters = tuple(parameters)
        self._fills = tuple(fills)
        self._device = device
        self._scratch = scratch

    def fill(self) -> None:
        """Make them, on the current stream of their device."""
        with _current(self._device):
            stream = self._scratch.stream(self._device)
            for fill in self._fills:
                fill(stream)


class QuantisedLookup(QuantisedForward):
    """Of an embedding that is stored row by row: the rows that are asked for are made, no other."""

    @staticmethod
    def serves(module: nn.Module, weights: Sequence[WholeWeight]) -> bool:
        """Whether `module` is such an embedding."""
        expression = weights[0].expression
        decode = getattr(expression, "decode", None)
        return (
            isinstance(module, nn.Embedding)
            and type(module).forward is nn.Embedding.forward
            and module.max_norm is None
            and len(weights) == 1
            and isinstance(expression, Coded)
            and isinstance(decode, Decoder)
            and decode.form.by_rows
        )

    def __call__(self, input: torch.Tensor) -> Any:
        parameters, (weight,) = self._module._parameters, self.weights
        if torch.is_grad_enabled():
            return self._run_apart((input,), {})
        self._check_kept(parameters)
        expression: Any = weight.expression
        rows = input.flatten()
        stored = {
            end: _pick(parameters[part], rows)  # type: ignore[arg-type]
            for (end, _), part in zip(expression.parts, weight.parts, strict=True)
        }
        shape = (rows.numel(), weight.placeholder.shape[1])
        if not rows.numel():
            return torch.empty(*input.shape, shape[1], dtype=expression.dtype, device=input.device)
        with _current(input.device):
            made = dequantise(expression.decode.form, stored, shape, expression.dtype)
        return made.view(*input.shape, shape[1])


class QuantisedLinear(QuantisedForward):
    """A Linear that rounds what it is given to int8, token by token, and multiplies that with the
    int8 weight as it is stored.
    """

    @staticmethod
    def serves(module: nn.Module, weights: Sequence[WholeWeight]) -> bool:
        """Whether `module` is such a Linear."""
        expression = weights[0].expression
        decode = getattr(expression, "decode", None)
        return (
            isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward
            and len(weights) == 1
            and isinstance(expression, Coded)
            and isinstance(decode, Decoder)
            and not why_not_int8(decode.form, expression.dtype, *decode.shape)
        )

    def __call__(self, input: torch.Tensor) -> Any:
        parameters, (weight,) = self._module._parameters, self.weights
        expression: Any = weight.expression
        away = any(parameters[part].is_meta for part in weight.parts)  # type: ignore[union-attr]
        cast = input.dtype != expression.dtype or torch.is_autocast_enabled(input.device.type)
        if torch.is_grad_enabled() or cast or away:
            return super().__call__(input)
        self._check_kept(parameters)
        stored: dict[str, Any] = {
            end: parameters[part]
            for (end, _), part in zip(expression.parts, weight.parts, strict=True)
        }
        out = input.new_empty(*input.shape[:-1], weight.placeholder.shape[0])
        bias = parameters.get("bias")
        with _current(input.device):
            Int8Linear(input.contiguous(), expression.decode.form, stored, out, bias=bias).launch(
                current_stream(input.device)
            )
        return out


def _kind(module: nn.Module, weights: Sequence[WholeWeight]) -> type[QuantisedForward]:
    for kind in (QuantisedLookup, QuantisedLinear):
        if kind.serves(module, weights):
            return kind
    return QuantisedForward


def _pick(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a stored tensor [n, ...] of any dtype."""
    lines = tensor.detach().reshape(tensor.shape[0], -1).view(torch.uint8)
    return lines.index_select(0, rows).view(tensor.dtype)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, where it is not."""
    elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if elsewhere else nullcontext()


def keep_quantised(model: nn.Module) -> None:
    """Give every module of `model` whose parameters are made of quantised weights the stored
    tensors as parameters, and a forward that makes the weights of them.

    A parameter that is more than a rearrangement of such weights stays as it is: it is computed
    once, as any other that loading changed.
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
                    stored[f"{prefix}{end}"] = nn.Parameter(part, requires_grad=False)
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


def room(weights: Sequence[WholeWeight]) -> int:
    """Bytes of a module's weights, one behind the other."""
    return sum(align(weight.nbytes) for weight in weights)


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
    """What makes the weights of `module`, itself, where it has quantised ones."""
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
    """Bytes at most that weights of `model` that stand whole take at one time."""
    scratches = {id(f.scratch): f.scratch for _, f in quantised_forwards(model)}
    return sum(scratch.peak for scratch in scratches.values())


def release_quantised(model: nn.Module) -> None:
    """Let go of the memory of every weight that stood whole, and of what it was made of."""
    for _, forward in quantised_forwards(model):
        forward.release()
