"""A product of up to 64 rows with a quantised weight, read from panels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels import reference, structs
from offload.kernels.activation import row_stride
from offload.kernels.call import Call, check, pointer
from offload.kernels.dequantize import dequantise
from offload.kernels.weight_format import PANEL_ROWS, SHAPE, Stored, WeightFormat

OP = "quant_gemm"
MOST_ROWS = 64


def why_not_fused(form: WeightFormat, dtype: torch.dtype, scale: torch.dtype, depth: int) -> str:
    """Why QuantGemm does not take such a weight; "" where it does."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {dtype} is neither float16 nor bfloat16"
    if form.layout != "panels":
        return f"{form.kind} stored as {form.layout!r} does not lie in panels"
    if scale != dtype:
        return f"its scales are {scale}, not {dtype}"
    columns = form.block[1] or depth
    if columns != depth and columns & (columns - 1):
        return f"groups of {columns} are no power of 2"
    return ""


class QuantGemm(Call):
    """out = act(input @ weight.T + bias) + residual for 1 to 64 rows; with a gate
    out = act(gate) * up + residual, where gate and up are the halves of what has a bias.

    The weight is what `stored` (by the ends of names) stands for in `form`: int4 or int8 in
    `panels`, a scale a row or a group, with or without zero points, scales of the input's dtype.
    It is never written down; its codes are multiplied, and the sums of a group scaled in float32.
    On a CPU, and on a GPU of compute capability 9.0 from 9 rows on (and with fewer for weights that
    should be quicker so, most of them large), its elements are rounded as `Dequantize` rounds them
    instead. input: [..., depth] of float16 or bfloat16 at a multiple of 16 bytes, rows likewise;
    weight: [outputs, depth], or [2 * outputs, depth] where `gated`, gate rows first, `outputs` a
    multiple of 16; bias as long as the weight has rows. out, residual: [..., outputs]; `out` may be
    `residual` itself.
    Sums are float32 in a fixed order: results repeat bit for bit on one kind of GPU. On a GPU,
    bfloat16 inputs are multiplied times 2^64 and sums back where codes are multiplied: magnitudes
    from 2^63 on become infinite, and rows whose magnitudes are all below about 2^-50 lose digits.
    Where elements are rounded, scales from 2^27 on become infinite.

    `early` is programmatic dependent launch: only behind another kernel of this package on the same
    stream, and only where the weight is in place before that one ends, since its loads begin
    before.

    Raises ValueError or TypeError for arguments that do not fit, KernelError where the library
    refuses them.
    """

    function = "offload_quant_gemm"

    def __init__(
        self,
        input: torch.Tensor,
        form: WeightFormat,
        stored: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        early: bool = False,
    ) -> None:
        self._shape = check_quantised(
            OP, input, form, stored, out, bias, residual, activation, gated
        )
        rows = input.numel() // input.shape[-1]
        if rows > MOST_ROWS:
            raise ValueError(
                f"{OP}: input must have at most {MOST_ROWS} rows, not {rows}; QuantLinear takes any"
            )
        depth, outputs = input.shape[-1], out.shape[-1]
        problem = why_not_fused(form, input.dtype, stored[form.scale_name].dtype, depth)
        if problem:
            raise ValueError(f"{OP}: {problem}; QuantLinear takes any")
        if gated and outputs % PANEL_ROWS:
            raise ValueError(
                f"{OP}: gate and up of {outputs} outputs do not begin with a panel of "
                f"{PANEL_ROWS} rows each; QuantLinear takes any"
            )
        zero = stored["weight_panel_zero"] if form.zero_points else None
        self.arguments = structs.QuantGemmStruct(
            input=pointer(input),
            codes=pointer(stored["weight_panels"]),
            scale=pointer(stored["weight_panel_scale"]),
            zero=pointer(zero),
            bias=pointer(bias),
            residual=pointer(residual),
            output=pointer(out),
            input_stride=row_stride(OP, "input", input),
            residual_stride=0 if residual is None else row_stride(OP, "residual", residual),
            output_stride=row_stride(OP, "out", out),
            rows=rows,
            outputs=outputs,
            depth=depth,
            group=form.block[1] or depth,
            bits=form.bits,
            activation=structs.ACTIVATIONS[activation],
            gated=gated,
            dtype=structs.DTYPES[input.dtype],
            launch_early=early,
        )
        self._input, self._form, self._stored, self._out = input, form, dict(stored), out
        self._bias, self._residual = bias, residual
        self._activation, self._gated = activation, gated
        self._ready(input.device)

    def _reference(self) -> None:
        result = reference.linear(
            self._input,
            dequantise(self._form, self._stored, self._shape, self._input.dtype),
            bias=self._bias,
            residual=self._residual,
            norm=None,
            activation=self._activation,
            gated=self._gated,
        )
        self._out.copy_(result)


def check_quantised(
    op: str,
    input: torch.Tensor,
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    gated: bool,
) -> tuple[int, int]:
    """Refuse arguments of a quantised product that do not fit together; the weight's shape."""
    if activation not in structs.ACTIVATIONS:
        names = ", ".join(map(repr, structs.ACTIVATIONS))
        raise ValueError(f"{op}: activation must be one of {names}, not {activation!r}")
    for name, tensor in (("input", input), ("out", out)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dim() < 1 or tensor.shape[-1] < 1:
            raise ValueError(f"{op}: {name} must be [..., n], not {list(tensor.shape)}")
    depth, outputs = input.shape[-1], out.shape[-1]
    products = 2 * outputs if gated else outputs
    check(op, "input", input, tuple(input.shape), input, contiguous=False)
    check(op, "out", out, (*input.shape[:-1], outputs), input, contiguous=False)
    if bias is not None:
        check(op, "bias", bias, (products,), input)
    if residual is not None:
        check(op, "residual", residual, tuple(out.shape), input, contiguous=False)
    found: dict[str, Stored] = {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()}
    try:
        form.check_stored({SHAPE: (torch.int64, (2,)), **found}, (products, depth))
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    for name, tensor in stored.items():
        if name != "weight_shape":
            check(op, name, tensor, tuple(tensor.shape), input, dtype=tensor.dtype)
    rows = out.numel() // outputs
    if rows > 1 and row_stride(op, "out", out) < outputs:
        raise ValueError(f"{op}: rows of out must not overlap; its strides are {out.stride()}")
    if residual is not None and residual.data_ptr() == out.data_ptr():
        return products, depth
    for name, other in (("input", input), ("residual", residual)):
        if other is not None and out.numel() and _overlap(out, other):
            raise ValueError(f"{op}: out shares memory with {name}")
    return products, depth


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the spans of two tensors meet."""

    def span(t: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (a, b), (c, d) = span(x), span(y)
    return a < d and c < b
