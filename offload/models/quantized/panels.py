"""int4 and int8 weights of layers that stay on the compute device, arranged in panels where they
lie: so a few rows are multiplied with them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from offload.checkpoint.expressions import Coded, Held
from offload.errors import UnsupportedError
from offload.kernels.arrange import Arrange
from offload.kernels.call import current_stream
from offload.kernels.panels import RENAMED, in_rows, panels_of, scales_in_panels
from offload.kernels.quant_gemm import why_not_fused
from offload.models.hooked import NotCopied
from offload.models.install import refuse_move
from offload.models.quantized.coded import Decoder
from offload.models.quantized.forward import QuantisedForward
from offload.models.quantized.modules import quantised_forwards
from offload.models.quantized.whole import WholeWeight
from offload.models.specs.spec import LayerSpec


def panel_weights(weights: Mapping[str, WholeWeight]) -> dict[str, WholeWeight] | None:
    """What each of the weights that act as one becomes, in the same memory; None where one of them
    stays as it is, or their formats differ.
    """
    found: dict[str, WholeWeight] = {}
    formats = set()
    for name, weight in weights.items():
        arranged = _panel_weight(weight)
        if arranged is None:
            return None
        found[name] = arranged
        expression: Any = arranged.expression
        formats.add((expression.decode.form, expression.decode.shape[1]))
    return found if len(formats) == 1 else None


def _panel_weight(weight: WholeWeight) -> WholeWeight | None:
    """The same for one weight; None where it stays as it is, since no kernel would multiply with
    it.
    """
    expression = weight.expression
    decode = getattr(expression, "decode", None)
    if not isinstance(expression, Coded) or not isinstance(decode, Decoder):
        return None
    form = panels_of(decode.form, decode.shape)
    if form is None:
        return None
    scale = dict(expression.parts)[decode.form.scale_name].dtype
    if why_not_fused(form, expression.dtype, scale, decode.shape[1]):
        return None
    names, parts = [], []
    for (end, _), part in zip(expression.parts, weight.parts, strict=True):
        dtype, size = form.stored(decode.shape, scale)[RENAMED[end]]
        like = torch.empty(size, dtype=dtype, device="meta")  # its module holds the tensor itself
        parts.append((RENAMED[end], Held(like)))
        names.append(f"{part.removesuffix(end)}{RENAMED[end]}")
    coded = Coded(tuple(parts), Decoder(form, decode.shape), expression.shape, expression.dtype)
    return WholeWeight(weight.key, tuple(names), coded, weight.placeholder)


def arrange(spec: LayerSpec, layer: nn.Module) -> None:
    """Arrange in panels what is stored for the products of a layer that stays where it is.

    A state dict shows such weights in rows. Loading into them, casting and moving them is refused.
    """
    holders: dict[nn.Module, QuantisedForward] = {}
    found = {
        f"{name}.{weight.key}": (layer.get_submodule(name), forward, weight)
        for name, forward in quantised_forwards(layer)
        for weight in forward.weights
    }
    for linear in spec.linears().values():
        if linear.transposed or not all(name in found for name in linear.weights):
            continue
        arranged = panel_weights({name: found[name][2] for name in linear.weights})
        for name, new in (arranged or {}).items():
            module, forward, old = found[name]
            _rearrange(module, forward, old, new)
            forward.become(old, new)
            holders[module] = forward
    for module, forward in holders.items():
        module.register_state_dict_post_hook(_InRows(forward))
        module.register_load_state_dict_pre_hook(_refuse_load)
        layer._apply = module._apply = refuse_move  # type: ignore[method-assign]


def _rearrange(
    module: nn.Module, forward: QuantisedForward, old: WholeWeight, new: WholeWeight
) -> None:
    """Put what is stored for `new` in the place of what is stored for `old`, by way of the scratch:
    panels take as many bytes, but each byte has another place.
    """
    before: Any = old.expression
    after: Any = new.expression
    ends = [end for end, _ in before.parts]
    parameters: dict[str, Any] = module._parameters
    stored = {end: parameters[part].detach() for end, part in zip(ends, old.parts, strict=True)}
    form, shape, scratch = before.decode.form, before.decode.shape, forward.scratch
    device = stored[form.scale_name].device
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, scratch.taken(device):
        values = scales_in_panels(form, stored)
        size = dict(after.parts)["weight_panels"].shape
        panels = values["weight_panels"] = scratch.view(0, size, torch.uint8, device)
        Arrange(form, stored, shape, panels).launch(current_stream(device))
        for part in old.parts:  # now that nothing more can run out of memory
            del parameters[part]
        for end, part, (name, like) in zip(ends, new.parts, after.parts, strict=True):
            memory = stored[end].view(-1).view(torch.uint8).view(like.dtype).view(like.shape)
            memory.copy_(values[name])
            parameters[part] = nn.Parameter(memory, requires_grad=False)
        scratch.poison()


class _InRows(NotCopied):
    """Shows a module's weights in a state dict as rows, which others can read."""

    def __init__(self, forward: QuantisedForward) -> None:
        self._forward = forward

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for weight in self._forward.weights:
            decode = getattr(weight.expression, "decode", None)
            if not isinstance(decode, Decoder) or decode.form.layout != "panels":
                continue
            expression: Any = weight.expression
            ends = [end for end, _ in expression.parts]
            stored = {
                end: state.pop(f"{prefix}{part}").detach()
                for end, part in zip(ends, weight.parts, strict=True)
            }
            start = weight.parts[0].removesuffix(ends[0])
            for end, tensor in in_rows(decode.form, stored).items():
                state[f"{prefix}{start}{end}"] = tensor


def _refuse_load(module: nn.Module, *args: Any) -> NoReturn:
    raise UnsupportedError(
        "load_state_dict() into an offloaded model: its quantised weights that stay on the device "
        "are arranged for it and cannot be replaced; load them into the plain model and call "
        "offload.run on that"
    )
