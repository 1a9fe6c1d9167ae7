"""Forwards of modules over quantised weights: a weight stands whole only while its module's forward
runs, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import UnsupportedError
from offload.kernels.call import current_stream, on_device
from offload.kernels.dequantize import dequantise
from offload.kernels.int8_linear import Int8Linear, why_not_int8
from offload.models.hooked import NotCopied
from offload.models.placeholder import Placeholder
from offload.models.quantized.scratch import Scratch
from offload.models.quantized.whole import Fill, WholeWeight
from offload.store.layout import align


class QuantisedForward(NotCopied):
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

    def become(self, old: WholeWeight, new: WholeWeight) -> None:
        """`old`, one of its weights, is stored as `new` from now on, in the same memory."""
        self.weights = tuple(new if weight is old else weight for weight in self.weights)
        self._made.clear()  # by its addresses alone the memory would look the same

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
        with on_device(self._device):
            stream = self._scratch.stream(self._device)
            for fill in self._fills:
                fill(stream)


class QuantisedLookup(QuantisedForward):
    """Of an embedding that is stored row by row: the rows that are asked for are made, no other."""

    @staticmethod
    def serves(module: nn.Module, weights: Sequence[WholeWeight]) -> bool:
        """Whether `module` is such an embedding."""
        decoder = weights[0].decoder
        return (
            isinstance(module, nn.Embedding)
            and type(module).forward is nn.Embedding.forward
            and module.max_norm is None
            and len(weights) == 1
            and decoder is not None
            and decoder.form.by_rows
        )

    def __call__(self, input: torch.Tensor) -> Any:
        parameters, (weight,) = self._module._parameters, self.weights
        if torch.is_grad_enabled():
            return self._run_apart((input,), {})
        self._check_kept(parameters)
        decoder, dtype = weight.decoder, weight.expression.dtype
        assert decoder is not None
        rows = input.flatten()
        stored = {
            end: _pick(tensor, rows)  # type: ignore[arg-type]
            for end, tensor in weight.by_end(parameters).items()
        }
        shape = (rows.numel(), weight.placeholder.shape[1])
        if not rows.numel():
            return torch.empty(*input.shape, shape[1], dtype=dtype, device=input.device)
        with on_device(input.device):
            made = dequantise(decoder.form, stored, shape, dtype)
        return made.view(*input.shape, shape[1])


class QuantisedLinear(QuantisedForward):
    """A Linear that rounds what it is given to int8, token by token, and multiplies that with the
    int8 weight as it is stored.
    """

    @staticmethod
    def serves(module: nn.Module, weights: Sequence[WholeWeight]) -> bool:
        """Whether `module` is such a Linear."""
        decoder = weights[0].decoder
        return (
            isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward
            and len(weights) == 1
            and decoder is not None
            and not why_not_int8(decoder.form, weights[0].expression.dtype, *decoder.shape)
        )

    def __call__(self, input: torch.Tensor) -> Any:
        parameters, (weight,) = self._module._parameters, self.weights
        decoder, dtype = weight.decoder, weight.expression.dtype
        assert decoder is not None
        away = any(parameters[part].is_meta for part in weight.parts)  # type: ignore[union-attr]
        cast = input.dtype != dtype or torch.is_autocast_enabled(input.device.type)
        if torch.is_grad_enabled() or cast or away:
            return super().__call__(input)
        self._check_kept(parameters)
        stored: dict[str, Any] = weight.by_end(parameters)
        out = input.new_empty(*input.shape[:-1], weight.placeholder.shape[0])
        bias = parameters.get("bias")
        with on_device(input.device):
            Int8Linear(input.contiguous(), decoder.form, stored, out, bias=bias).launch(
                current_stream(input.device)
            )
        return out


def room(weights: Sequence[WholeWeight]) -> int:
    """Bytes of a module's weights, one behind the other."""
    return sum(align(weight.nbytes) for weight in weights)


def _pick(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a stored tensor [n, ...] of any dtype."""
    lines = tensor.detach().reshape(tensor.shape[0], -1).view(torch.uint8)
    return lines.index_select(0, rows).view(tensor.dtype)
