"""A quantised checkpoint as transformers' loading code is to see it: tensors that stand for the
weights, and know the stored ones that they are made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from offload.checkpoint import Checkpoint
from offload.checkpoint.expressions import Expression
from offload.checkpoint.extent import Extent
from offload.checkpoint.lazy import LazyTensor
from offload.errors import CheckpointError, UnsupportedError
from offload.kernels.dequantize import check_values
from offload.kernels.weight_format import MX_GROUP, SHAPE, Stored, WeightFormat
from offload.models.quantized.coded import stand_for
from offload.models.quantized.methods import Method, read_method

ZEROS = "weight_zero_point"
# Names that only parts of quantised weights, caches and activations have.
_PARTS = re.compile(
    r"(weight_(packed|scale|scale_inv|zero_point|global_scale|g_idx|shape)|_scale_inv|qweight|qzeros"
    r"|g_idx|(input|output)_(scale|zero_point|global_scale)|[qkv]_(scale|zero_point)|_blocks"
    r"|weight_(bitmask|compressed|row_offsets))$"
)


def lazy_state(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """The checkpoint's tensors by name, every quantised weight as one tensor under the name that it
    has in a plain checkpoint; its dtype is `dtype`, else its scales' where they have 16 bits, else
    bfloat16. A cast of it later is one rounding of what was stored.

    Scales and group indices are read and checked, weights are not. Raises UnsupportedError or
    CheckpointError, naming tensor and file.
    """
    tensors = checkpoint.tensors
    if checkpoint.quantization is None:
        _refuse_codes(tensors)
        return {name: LazyTensor.of(extent) for name, extent in tensors.items()}
    method = read_method(checkpoint.folder, "quantization_config", checkpoint.quantization)
    state: dict[str, LazyTensor] = {}
    used: set[str] = set()
    for name, codes, scales in _quantised(method, tensors):
        module = name[: -len(codes)]
        members = {
            end: f"{module}{end}"
            for end in _ends(method.form(module.rstrip("._")), scales)
            if f"{module}{end}" in tensors
        }
        used |= set(members.values())
        weight = _coded(method, module, {end: tensors[n] for end, n in members.items()}, dtype)
        state[_plain_name(module)] = weight
    for name, extent in tensors.items():
        if name in used:
            continue
        if _PARTS.search(name) or _is_coded(name, extent):
            raise UnsupportedError(
                f"{name} ({extent.file}) is of no weight that can be read as {method.name}, which "
                "config.json names"
            )
        state[name] = LazyTensor.of(extent)
    return state


def _is_coded(name: str, extent: Extent) -> bool:
    """Whether it can only be the codes of a weight."""
    if "float8" in str(extent.dtype) or "float4" in str(extent.dtype):
        return True
    return name.endswith("weight") and not extent.dtype.is_floating_point


def _refuse_codes(tensors: Mapping[str, Extent]) -> None:
    """Raise UnsupportedError for codes beside their scales: without a config that says how they
    are stored they would be taken for the weight.
    """
    for name, extent in tensors.items():
        scales = [n for n in (f"{name}_scale", f"{name}_scale_inv") if n in tensors]
        if scales and _is_coded(name, extent):
            raise UnsupportedError(
                f"{name} ({extent.file}) is quantised, {scales[0]} lies beside it, and config.json "
                "has no quantization_config that says how: take that of the original checkpoint"
            )


def _quantised(method: Method, tensors: Mapping[str, Extent]) -> list[tuple[str, str, str]]:
    """Every quantised weight: its codes' name, and how the names of codes and scales end."""
    found = []
    for name in tensors:
        for codes, scales in method.pairs:
            head = name[: -len(codes)]
            if name.endswith(codes) and head.endswith((".", "_")) and f"{head}{scales}" in tensors:
                found.append((name, codes, scales))
    return found


def _ends(form: WeightFormat, scales: str) -> list[str]:
    """The ends of the names of all tensors that may stand for a weight."""
    if form.layout in ("gptq", "gptq_v2"):
        return ["qweight", "qzeros", "scales", "g_idx"]
    if form.layout == "awq":
        return ["qweight", "qzeros", "scales"]
    if form.layout == "gpt_oss":
        return ["blocks", "scales"]
    codes = "weight" if form.layout in ("plain", "fp8_block") else "weight_packed"
    extra = [ZEROS, "weight_g_idx", SHAPE] if scales == "weight_scale" else []
    return [codes, scales, *extra]


def _plain_name(module: str) -> str:
    """`layers.0.mlp.up_proj.` -> its weight's name; of experts, `gate_up_proj_` -> gate_up_proj."""
    return f"{module}weight" if module.endswith(".") else module[:-1]


def _coded(
    method: Method, module: str, extents: dict[str, Extent], dtype: torch.dtype | None
) -> LazyTensor:
    form = method.form(module.rstrip("._"))
    file = next(iter(extents.values())).file
    try:
        if form.act_order and not extents.keys() & {"g_idx", "weight_g_idx"}:
            raise ValueError("g_idx is missing, which config.json announces (desc_act)")
        shape = _shape(form, extents)
        form = _with_order(form, extents, shape)
        found: dict[str, Stored] = {e: (x.dtype, tuple(x.shape)) for e, x in extents.items()}
        form.check_stored(found, shape)
        checked = {
            end: extent.read()
            for end, extent in extents.items()
            if end in (form.scale_name, "g_idx", "weight_g_idx")
        }
        check_values(form, checked, form.groups(shape)[1])
        if ZEROS in extents and not form.zero_points and extents[ZEROS].read().float().any():
            raise ValueError(f"{ZEROS} holds zero points, and config.json says there are none")
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: {module}{error}") from None
    scale = extents[form.scale_name].dtype
    if dtype is None:
        dtype = scale if scale in (torch.float16, torch.bfloat16) else torch.bfloat16
    stored = form.stored(shape, scale).items()
    parts = {end: _in_shape(extents[end], size) for end, (_, size) in stored if end != SHAPE}
    return stand_for(form, parts, shape, dtype)


def _in_shape(extent: Extent, shape: tuple[int, ...]) -> Expression:
    """A stored tensor, whose dimensions of size 1 may be others, in the shape that is read."""
    tensor: Any = LazyTensor.of(extent).reshape(shape)
    return tensor.expression


def _shape(form: WeightFormat, extents: Mapping[str, Extent]) -> tuple[int, ...]:
    """The weight's shape by its codes, and where it is stored, by that."""
    if form.layout == "packed":
        if SHAPE not in extents:
            raise ValueError(f"{SHAPE} is missing")
        shape = extents[SHAPE].read().flatten().tolist()
        if len(shape) != 2 or not all(isinstance(x, int) and x > 0 for x in shape):
            raise ValueError(f"{SHAPE} holds {shape}, which is no shape of a matrix")
        return tuple(shape)
    codes = tuple(next(iter(extents.values())).shape)
    if len(codes) != (4 if form.layout == "gpt_oss" else 2):
        raise ValueError(f"{next(iter(extents))} has the shape {list(codes)}, not one of a matrix")
    if form.layout in ("gptq", "gptq_v2"):
        return codes[1], codes[0] * form.per_word
    if form.layout == "awq":
        return codes[1] * form.per_word, codes[0]
    if form.layout == "mxfp4":
        return codes[0], codes[1] * 2
    if form.layout == "gpt_oss":
        return codes[0], codes[2] * MX_GROUP, codes[1]
    return codes


def _with_order(
    form: WeightFormat, extents: Mapping[str, Extent], shape: tuple[int, ...]
) -> WeightFormat:
    """The format with an act order where one is stored that is not the order of the columns."""
    for end in ("g_idx", "weight_g_idx"):
        if end not in extents:
            continue
        index = extents[end].read().long()
        columns = torch.arange(shape[1]) // (form.block[1] or shape[1])
        ordered = not torch.equal(index, columns)
        return replace(form, act_order=ordered)
    return form
