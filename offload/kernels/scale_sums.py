"""int32 sums of int8 products scaled to numbers, with what follows a product, in one pass."""

from __future__ import annotations

import torch

from offload.kernels import reference, structs
from offload.kernels.call import Call, check, dtype_code, pointer

OP = "scale_sums"


class ScaleSums(Call):
    """out = act(sums * row_scales * scales + bias) + residual; with a gate
    out = act(gate) * up + residual, where a row of what is scaled and has its bias is [gate, up].

    out, residual: [..., width], contiguous, of one dtype (float32, float16, bfloat16); `out` may be
    `residual` itself. sums: int32 [rows, width], or [rows, 2 * width] where `gated`; row_scales:
    float32 [rows]; scales: of any of the three dtypes, one a column of sums, or one for all; bias:
    one a column. Computed in float32, rounded once. `early`: see ResidualNorm.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    function = "offload_scale_sums"

    def __init__(
        self,
        sums: torch.Tensor,
        row_scales: torch.Tensor,
        scales: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        early: bool = False,
    ) -> None:
        if activation not in structs.ACTIVATIONS:
            names = ", ".join(map(repr, structs.ACTIVATIONS))
            raise ValueError(f"{OP}: activation must be one of {names}, not {activation!r}")
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"{OP}: out must be a tensor, not {type(out).__name__}")
        dtype = dtype_code(OP, out)
        if out.dim() < 1 or out.shape[-1] < 1:
            raise ValueError(f"{OP}: out must be [..., width], not {list(out.shape)}")
        width = out.shape[-1]
        rows, columns = out.numel() // width, 2 * width if gated else width
        check(OP, "out", out, tuple(out.shape), out)
        check(OP, "sums", sums, (rows, columns), out, dtype=torch.int32)
        check(OP, "row_scales", row_scales, (rows,), out, dtype=torch.float32)
        if not isinstance(scales, torch.Tensor):
            raise TypeError(f"{OP}: scales must be a tensor, not {type(scales).__name__}")
        if scales.numel() not in (1, columns):
            raise ValueError(f"{OP}: scales must be 1 or {columns}, not {list(scales.shape)}")
        check(OP, "scales", scales, tuple(scales.shape), out, dtype=scales.dtype)
        if bias is not None:
            check(OP, "bias", bias, (columns,), out)
        if residual is not None:
            check(OP, "residual", residual, tuple(out.shape), out)

        self.arguments = structs.ScaleSumsStruct(
            sums=pointer(sums),
            row_scales=pointer(row_scales),
            scales=pointer(scales),
            bias=pointer(bias),
            residual=pointer(residual),
            output=pointer(out),
            rows=rows,
            width=width,
            one_scale=scales.numel() == 1,
            scale_dtype=dtype_code(OP, scales),
            activation=structs.ACTIVATIONS[activation],
            gated=gated,
            dtype=dtype,
            launch_early=early,
        )
        self._sums, self._out = sums, out
        self._row_scales, self._scales = row_scales, scales
        self._bias, self._residual = bias, residual
        self._activation, self._gated = activation, gated
        self._ready(out.device)

    def _reference(self) -> None:
        residual, width = self._residual, self._out.shape[-1]
        result = reference.scale_sums(
            self._sums,
            self._row_scales,
            self._scales,
            bias=self._bias,
            residual=None if residual is None else residual.view(-1, width),
            activation=self._activation,
            gated=self._gated,
        )
        self._out.copy_(result.view(self._out.shape))
