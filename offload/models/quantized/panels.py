"""int4 and int8 weights of layers that stay on the compute device, arranged in panels where they
lie: so a few rows are multiplied with them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from offload.checkpoint.expressions import Coded, Held
from offload.errors import UnsupportedError
from offload.kernels.arrange import Arrange
from offload.kernels.call import current_stream, on_device
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
        if arranged.decoder is not None:
            formats.add((arranged.decoder.form, arranged.decoder.shape[1]))
    return found if len(formats) == 1 else None


def _panel_weight(weight: WholeWeight) -> WholeWeight | None:
    """The same for one weight; None where it stays as it is, since no kernel would multiply with
    it.
    """
    decoder, dtype = weight.decoder, weight.expression.dtype
    form = None if decoder is None else panels_of(decoder.form, decoder.shape)
    if decoder is None or form is None:
        return None
    shape = decoder.shape
    scale = weight.stored[decoder.form.scale_name].dtype
    if why_not_fused(form, dtype, scale, shape[1]):
        return None
    names, parts = [], []
    for end, part in zip(weight.stored, weight.parts, strict=True):
        kind, size = form.stored(shape, scale)[RENAMED[end]]
        like = torch.empty(size, dtype=kind, device="meta")  # its module holds the tensor itself
        parts.append((RENAMED[end], Held(like)))
        names.append(f"{part.removesuffix(end)}{RENAMED[end]}")
    coded = Coded(tuple(parts), Decoder(form, shape), weight.expression.shape, dtype)
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
    assert old.decoder is not None
    parameters: dict[str, Any] = module._parameters
    stored = {end: tensor.detach() for end, tensor in old.by_end(parameters).items()}
    form, (n, k), scratch = old.decoder.form, old.decoder.shape, forward.scratch
    device = stored[form.scale_name].device
    with on_device(device), scratch.taken(device):
        values = scales_in_panels(form, stored)
        size = new.stored["weight_panels"].shape
        panels = values["weight_panels"] = scratch.view(0, size, torch.uint8, device)
        Arrange(form, stored, (n, k), panels).launch(current_stream(device))
        for part in old.parts:  # now that nothing more can run out of memory
            del parameters[part]
        for (name, like), part, rows in zip(
            new.stored.items(), new.parts, stored.values(), strict=True
        ):
            memory = rows.view(-1).view(torch.uint8).view(like.dtype).view(like.shape)
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
            decoder = weight.decoder
            if decoder is None or decoder.form.layout != "panels":
                continue
            panels = {part: state.pop(f"{prefix}{part}").detach() for part in weight.parts}
            start = weight.parts[0].removesuffix(next(iter(weight.stored)))
            for end, tensor in in_rows(decoder.form, weight.by_end(panels)).items():
                state[f"{prefix}{start}{end}"] = tensor


def _refuse_load(module: nn.Module, *args: Any) -> NoReturn:
    raise UnsupportedError(
        "load_state_dict() into an offloaded model: its quantised weights that stay on the device "
        "are arranged for it and cannot be replaced; load them into the plain model and call "
        "offload.run on that"
    )
