"""Models with random codes in place of quantised weights: nothing is quantised, nothing waits."""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.bench.random_model import STD
from offload.checkpoint.expressions import Deferred
from offload.errors import UnsupportedError
from offload.kernels.weight_format import SHAPE, WeightFormat
from offload.models.modules import find_layers, shared_parameters
from offload.models.quantized.coded import stand_for
from offload.models.quantized.modules import keep_quantised, quantised_weights
from offload.models.quantized.wanted import Wishes

# Standard deviations of codes that are drawn evenly; with zero points two such are subtracted.
_SPREAD = {"int4": math.sqrt(255 / 12), "int8": math.sqrt(65535 / 12), "fp8": 64.0}
_MX_EXPONENT = 127 - 7  # codes of e2m1 spread by 2.9, which 2^-7 brings near STD


def random_stored(
    name: str,
    form: WeightFormat,
    end: str,
    shape: torch.Size,
    dtype: torch.dtype,
    maker: torch.device,
) -> torch.Tensor:
    """One stored tensor of a weight, by its name alone, made by `maker`; a CPU tensor, pinned where
    `maker` is a GPU. The weights that are made of it have a standard deviation near STD.

    Scales differ, as they do in a model, and half of them are negative: the mean of symmetric codes
    is not zero, and layers of weights with such a mean give every token the same activations, which
    a GPU at its power limit multiplies faster than a model's.
    """
    generator = torch.Generator(maker).manual_seed(zlib.crc32(name.encode()))
    made = torch.empty(shape, dtype=dtype, device=maker)
    if end == form.scale_name and form.kind == "mxfp4":
        made.random_(_MX_EXPONENT - 1, _MX_EXPONENT + 1, generator=generator)
    elif end == form.scale_name:
        mean = STD / _SPREAD[form.kind] / (math.sqrt(2) if form.zero_points else 1)
        made.uniform_(-mean, mean, generator=generator)
        made += made.sign() * (mean / 2)
    elif dtype == torch.float8_e4m3fn:
        made = torch.randn(shape, generator=generator, device=maker).mul_(_SPREAD["fp8"]).to(dtype)
    else:
        made.view(torch.uint8).random_(0, 256, generator=generator)
    if maker.type == "cpu":
        return made
    return torch.empty(shape, dtype=dtype, pin_memory=True).copy_(made)


def with_random_codes(
    model: PreTrainedModel, wishes: Wishes, maker: torch.device
) -> PreTrainedModel:
    """`model`, whose weights are lazy, with the Linears that `wishes` name quantised."""
    inside = {id(m) for layer in find_layers(model).values() for m in layer.modules()}
    for shared in shared_parameters(model):
        first = shared.bindings[0]
        wanted, pattern = wishes.find([first.name.rpartition(".")[0]])
        if wanted is None or (pattern is None and id(first.module) not in inside):
            continue
        if shared.tensor.ndim == 3:
            raise UnsupportedError(
                f"{first.name}: random weights of experts are not made quantised; measure a "
                "checkpoint (--model)"
            )
        if not isinstance(first.module, nn.Linear) or first.key != "weight":
            continue
        form, dtype = wanted.form, shared.tensor.dtype
        parts = {}
        for end, (kind, size) in form.stored(tuple(shared.tensor.shape), dtype).items():
            if end != SHAPE:
                shape = torch.Size(size)
                arguments = (f"{first.name}.{end}", form, end, shape, kind, maker)
                parts[end] = Deferred(random_stored, arguments, {}, None, shape, kind)
        weight = stand_for(form, parts, tuple(shared.tensor.shape), dtype)
        parameter = nn.Parameter(weight, requires_grad=shared.tensor.requires_grad)
        for b in shared.bindings:
            b.module._parameters[b.key] = parameter
    keep_quantised(model)
    if not any(True for _ in quantised_weights(model)):
        raise UnsupportedError(f"{type(model).__name__} has no Linear in its layers to quantise")
    return model
