"""GPTQ's and AWQ's weights of resident layers, rearranged where they lie: so a few rows can be
multiplied with them as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.checkpoint.lazy import Coded, Held, LazyTensor
from offload.kernels.quant_gemm import why_not_fused
from offload.kernels.row_order import RENAMED, by_rows, in_rows
from offload.models.quantized.coded import Decoder
from offload.models.quantized.modules import quantised_forwards
from offload.models.quantized.whole import WholeWeight


def rearranged(weight: WholeWeight) -> WholeWeight | None:
    """What `weight` becomes, part for part in the same memory; None where it stays as it is."""
    expression = weight.expression
    decode = getattr(expression, "decode", None)
    if not isinstance(expression, Coded) or not isinstance(decode, Decoder):
        return None
    form = by_rows(decode.form, decode.shape)
    if form is None:
        return None
    scale = dict(expression.parts)["scales"].dtype
    if why_not_fused(form, expression.dtype, scale, decode.shape[1]):
        return None
    names, parts = [], []
    for (end, _), part in zip(expression.parts, weight.parts, strict=True):
        dtype, size = form.stored(decode.shape, scale)[RENAMED[end]]
        like = torch.empty(size, dtype=dtype, device="meta")  # its module holds the tensor itself
        parts.append((RENAMED[end], LazyTensor(Held(like))))
        names.append(f"{part.removesuffix(end)}{RENAMED[end]}")
    coded = Coded(tuple(parts), Decoder(form, decode.shape), expression.shape, expression.dtype)
    return WholeWeight(weight.key, tuple(names), coded, weight.placeholder)


def rearrange(layer: nn.Module) -> None:
    """Rearrange what is stored in the modules of a layer that stays where it is."""
    for name, forward in quantised_forwards(layer):
        module, kept = layer.get_submodule(name), []
        for weight in forward.weights:
            new = rearranged(weight)
            if new is not None:
                _move(module._parameters, weight, new)
            kept.append(new or weight)
        forward.weights = tuple(kept)


def _move(parameters: dict[str, Any], old: WholeWeight, new: WholeWeight) -> None:
    """Put what is stored for `new` where that for `old` lies."""
    before: Any = old.expression
    after: Any = new.expression
    ends = [end for end, _ in before.parts]
    stored = {end: parameters.pop(part).detach() for end, part in zip(ends, old.parts, strict=True)}
    values = in_rows(before.decode.form, stored)
    for end, part, (_, like) in zip(ends, new.parts, after.parts, strict=True):
        memory, value = stored[end].view(-1).view(like.shape), values[RENAMED[end]]
        if value.data_ptr() != memory.data_ptr():  # else it is one row or column, and stays
            memory.copy_(value)
        parameters[part] = nn.Parameter(memory, requires_grad=False)
