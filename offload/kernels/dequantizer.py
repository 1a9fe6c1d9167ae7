"""The kernel's call that fills a weight from what is stored for it, as often as that is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels import structs
from offload.kernels.call import Call, pointer
from offload.kernels.dequantize_reference import dequantise_reference
from offload.kernels.structs import Code, ZeroKind
from offload.kernels.weight_format import SHAPE, Stored, WeightFormat

OP = "dequantize"
_INDEX_NAMES = ("weight_g_idx", "g_idx")
_ALONG_ROWS = ("gptq", "gptq_v2", "awq")  # layouts whose scales and zero points are [G, N]
_CODES = {"int4": Code.UINT4, "int8": Code.UINT8, "fp8": Code.E4M3, "mxfp4": Code.E2M1}
_CODE_NAMES = ("weight_packed", "weight", "qweight", "weight_panels", "blocks")


class Dequantize(Call):
    """out = the weight that `stored` (by the ends of names, see `weight_format`) stands for.

    out: [N, K] of float32, float16 or bfloat16, columns contiguous; for experts of gpt-oss the
    weight is [E, K, N], and `out` its memory in the order [E, N, K]: a contiguous tensor of that
    shape, whose `transpose(1, 2)` is the weight. Computed in float32 and rounded once, to the
    nearest: equal to the reference bit for bit. `early` is programmatic dependent launch: only
    behind another kernel of this package, and only where the stored tensors are in place before
    that one ends. `variant`: 0 leaves the way to the library. What scales and indices hold is not
    looked at (`check_values` does).

    Raises ValueError or TypeError for arguments that do not fit, naming the tensor.
    """

    function = "offload_dequantize"

    def __init__(
        self,
        form: WeightFormat,
        stored: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        *,
        variant: int = 0,
        early: bool = False,
    ) -> None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"{OP}: out must be a tensor, not {type(out).__name__}")
        if out.dtype not in structs.DTYPES:
            raise ValueError(
                f"{OP}: dtype {out.dtype} is not supported; use float32, float16 or bfloat16"
            )
        experts = form.layout == "gpt_oss"
        if out.dim() != (3 if experts else 2):
            raise ValueError(
                f"{OP}: out must be {'[E, N, K]' if experts else '[N, K]'}, not {list(out.shape)}"
            )
        shape = (out.shape[0], out.shape[2], out.shape[1]) if experts else tuple(out.shape)
        try:
            found: dict[str, Stored] = {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()}
            form.check_stored({SHAPE: (torch.int64, (2,)), **found}, shape)
        except ValueError as error:
            raise ValueError(f"{OP}: {error}") from None
        for name in form.stored(shape):
            if name == SHAPE:
                continue
            tensor = stored[name]
            if tensor.device != out.device:
                raise ValueError(
                    f"{OP}: {name} must be on {out.device}, as out is, not on {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{OP}: {name} must be contiguous; its strides are {list(tensor.stride())}"
                )
        whole_rows = out.shape[-1] <= 1 or out.stride(-1) == 1
        if not whole_rows or (experts and not out.is_contiguous()):
            raise ValueError(
                f"{OP}: {'out' if experts else 'the last dimension of out'} must be contiguous; "
                f"its strides are {list(out.stride())}"
            )
        if out.dim() == 2 and out.shape[0] > 1 and out.stride(0) < out.shape[1]:
            raise ValueError(f"{OP}: rows of out must not overlap; its strides are {out.stride()}")

        self.arguments = _arguments(form, stored, out)
        self.arguments.variant = variant
        self.arguments.launch_early = early
        self._form, self._stored, self._out, self._shape = form, dict(stored), out, shape
        self._ready(out.device, *stored.values())

    def _reference(self) -> None:
        out = self._out.transpose(1, 2) if self._out.dim() == 3 else self._out
        dequantise_reference(self._form, self._stored, out)


def _arguments(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], out: torch.Tensor
) -> structs.DequantizeStruct:
    def named(names: tuple[str, ...]) -> torch.Tensor | None:
        return next((stored[name] for name in names if name in stored), None)

    depth = out.shape[-1]
    rows = out.numel() // depth if depth else 0
    codes, scale = named(_CODE_NAMES), stored[form.scale_name]
    index = named(_INDEX_NAMES) if form.act_order else None
    assert codes is not None
    zero, zero_kind, zero_value = _zeros(form, stored)
    along_rows = form.layout in _ALONG_ROWS
    groups = -(-depth // form.block[1]) if form.block[1] else 1
    # One scale for all is one for each of no rows apart.
    scale_row = 0 if form.block[0] == 0 else 1 if along_rows else groups
    plain_int8 = form.layout == "plain" and form.kind == "int8"  # elsewhere codes have no sign
    # From one row of codes to the next; the first dimension is that of words where these lie so.
    code_rows = codes.shape[0] if along_rows else rows
    stride = codes.numel() * codes.element_size() // max(code_rows, 1)
    return structs.DequantizeStruct(
        codes=pointer(codes),
        scale=pointer(scale),
        zero=pointer(zero),
        group_index=pointer(index),
        output=pointer(out),
        code_stride=stride,
        scale_row_stride=scale_row,
        scale_group_stride=rows if along_rows else 1,
        zero_row_stride=1 if along_rows else scale_row,
        zero_group_stride=rows // form.per_word if along_rows else 1,
        output_stride=depth if out.dim() == 3 or rows <= 1 else out.stride(0),
        rows=rows,
        depth=depth,
        scale_rows=form.block[0] or max(rows, 1),
        group=form.block[1] or max(depth, 1),
        code=Code.INT8 if plain_int8 else _CODES[form.kind],
        order=structs.CODE_ORDERS[form.layout],
        zero_kind=zero_kind,
        zero_value=zero_value,
        scale_dtype=structs.SCALES[scale.dtype],
        dtype=structs.DTYPES[out.dtype],
    )


def _zeros(
    form: WeightFormat, stored: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor | None, ZeroKind, int]:
    """The zero points of a weight, how they lie, and `zero_value` of OffloadDequantize."""
    if form.layout in _ALONG_ROWS:
        kind = ZeroKind.ZERO_ROW_WORDS if form.layout == "awq" else ZeroKind.ZERO_WORDS
        return stored["qzeros"], kind, int(form.layout == "gptq")  # which stores one less
    if form.zero_points:
        if form.layout == "panels":
            return stored["weight_panel_zero"], ZeroKind.ZERO_PANELS, 0
        kind = ZeroKind.ZERO_BYTES if form.layout == "plain" else ZeroKind.ZERO_WORDS
        return stored["weight_zero_point"], kind, 0
    # Codes without a sign of symmetric weights: zero is in their middle.
    middle = 1 << (form.bits - 1) if form.layout in ("packed", "panels") else 0
    return None, ZeroKind.ZERO_VALUE, middle
