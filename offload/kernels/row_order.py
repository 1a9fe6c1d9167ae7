"""GPTQ's and AWQ's tensors in the order of `packed`: what stands for one output lies together."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels.packing import pack_words, unpack_awq, unpack_words
from offload.kernels.weight_format import WeightFormat

# What each of their tensors becomes, of as many bytes.
RENAMED = {"qweight": "weight_packed", "qzeros": "weight_zero_point", "scales": "weight_scale"}


def by_rows(form: WeightFormat, shape: tuple[int, ...]) -> WeightFormat | None:
    """The format of such a weight [N, K] in rows; None where it has no such order."""
    if form.layout not in ("gptq", "gptq_v2", "awq") or form.act_order:
        return None
    if len(shape) != 2 or shape[1] % form.per_word:
        return None
    try:
        packed = WeightFormat(form.kind, "packed", form.block, True)
        packed.check_shape(shape)
    except ValueError:
        return None
    return packed


def in_rows(form: WeightFormat, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the same weight as `by_rows` has it, by the ends of their names."""
    codes, zeros, bits = stored["qweight"], stored["qzeros"], form.bits
    outputs = stored["scales"].shape[1]
    if form.layout == "awq":
        codes = pack_words(unpack_awq(codes).T.contiguous(), bits)
        zeros = pack_words(unpack_awq(zeros), bits)
    else:
        codes = codes.T  # their words run along the inputs already
        if form.layout == "gptq":
            plain = (unpack_words(zeros, bits, outputs) + 1) & ((1 << bits) - 1)
            zeros = pack_words(plain, bits)
    found = {"qweight": codes, "qzeros": zeros.T, "scales": stored["scales"].T}
    return {RENAMED[end]: tensor.contiguous() for end, tensor in found.items()}
