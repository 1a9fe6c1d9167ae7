"""Activations as int8, every row with a scale of its own; a residual sum and a norm ahead of it."""

from __future__ import annotations

import torch

from offload.kernels import reference, structs
from offload.kernels.call import Call, check, dtype_code, pointer
from offload.kernels.norm import Norm, norm_struct

OP = "quantize_rows"
_WIDEST = 512 * 8 * 16  # bytes of a row that registers hold


class QuantizeRows(Call):
    """scales = largest |x| of a row / 127; codes = x / scales, to the nearest, where x =
    norm(residual + branch_norm(branch + bias)).

    residual, branch, sum_out: [..., width], contiguous, of one dtype (float32, float16, bfloat16);
    bias and the norms' parameters [width] of the same; all but residual may be missing. codes: int8
    [rows, width]; scales: float32 [rows]. x is float32 and not rounded before; `sum_out`, which may
    be `residual` itself, takes the sum ahead of `norm`, rounded. A row with an infinity or NaN has
    the scale NaN. Rows of zeros have codes of zero and some scale. `early`: see ResidualNorm.

    Raises ValueError or TypeError for arguments that do not fit, KernelError where a sum or norm
    has rows that registers do not hold (`holds`).
    """

    function = "offload_quantize_rows"

    def __init__(
        self,
        residual: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        branch: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        branch_norm: Norm | None = None,
        norm: Norm | None = None,
        sum_out: torch.Tensor | None = None,
        early: bool = False,
    ) -> None:
        if not isinstance(residual, torch.Tensor):
            raise TypeError(f"{OP}: residual must be a tensor, not {type(residual).__name__}")
        dtype = dtype_code(OP, residual)
        if residual.dim() < 1 or residual.shape[-1] < 1:
            raise ValueError(f"{OP}: residual must be [..., width], not {list(residual.shape)}")
        width = residual.shape[-1]
        rows = residual.numel() // width
        shape = tuple(residual.shape)
        for name, tensor in (("residual", residual), ("branch", branch), ("sum_out", sum_out)):
            if tensor is not None:
                check(OP, name, tensor, shape, residual)
        check(OP, "codes", codes, (rows, width), residual, dtype=torch.int8)
        check(OP, "scales", scales, (rows,), residual, dtype=torch.float32)
        if branch is None and (bias is not None or branch_norm is not None):
            given = "bias" if bias is not None else "branch_norm"
            raise ValueError(f"{OP}: {given} is given without branch")
        if bias is not None:
            check(OP, "bias", bias, (width,), residual)
        for name, a_norm in (("branch_norm", branch_norm), ("norm", norm)):
            if a_norm is not None:
                a_norm.check(OP, name, width, residual)

        self.arguments = structs.QuantizeRowsStruct(
            residual=pointer(residual),
            branch=pointer(branch),
            bias=pointer(bias),
            sum=pointer(sum_out),
            codes=pointer(codes),
            scales=pointer(scales),
            branch_norm=norm_struct(branch_norm),
            norm=norm_struct(norm),
            rows=rows,
            width=width,
            dtype=dtype,
            launch_early=early,
        )
        self._inputs = residual, branch, bias, branch_norm, norm
        self._outputs = sum_out, codes, scales
        self._ready(residual.device)

    @staticmethod
    def holds(width: int, dtype: torch.dtype) -> bool:
        """Whether rows of so many elements at aligned addresses may have a sum or a norm."""
        return width * dtype.itemsize <= _WIDEST and width * dtype.itemsize % 16 == 0

    def _reference(self) -> None:
        residual, branch, bias, branch_norm, norm = self._inputs
        sum_out, codes, scales = self._outputs
        total = reference.add_residual(
            residual=residual, branch=branch, bias=bias, branch_norm=branch_norm
        )
        if sum_out is not None:
            sum_out.copy_(total)
        found, of_rows = reference.int8_rows(reference.normalise(total, norm))
        codes.copy_(found.view(codes.shape))
        scales.copy_(of_rows.view(-1))
