"""A product of any number of rows with a weight stored in any format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.kernels import reference
from offload.kernels.call import Call
from offload.kernels.dequantize import dequantise
from offload.kernels.dequantizer import Dequantize
from offload.kernels.linear import Linear
from offload.kernels.quant_gemm import MOST_ROWS, QuantGemm, check_quantised, why_not_fused
from offload.kernels.weight_format import WeightFormat
from offload.kernels.workspace import Workspace

OP = "quant_linear"


class QuantLinear(Call):
    """out = act(input @ weight.T + bias) + residual, with a gate act(gate) * up + residual, where
    the weight is what `stored` stands for in `form`; arguments as QuantGemm has them.

    Up to 64 rows of a weight that QuantGemm takes run there. All else is made whole in `scratch`
    and multiplied by `Linear`: `scratch`, [outputs or 2 * outputs, depth] of the input's dtype, is
    the caller's and may be shared by the calls of one stream; without it the call has its own.
    `fused` forces one way or the other. On a CPU the reference runs. `launch(stream)` issues it,
    like a `Call`.

    Raises ValueError or TypeError for arguments that do not fit.
    """

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
        scratch: torch.Tensor | None = None,
        workspace: Workspace | None = None,
        early: bool = False,
        fused: bool | None = None,
    ) -> None:
        self._shape = check_quantised(
            OP, input, form, stored, out, bias, residual, activation, gated
        )
        problem = self._why_apart(input, form, stored)
        if fused and problem:
            raise ValueError(f"{OP}: it cannot be fused: {problem}")
        self.fused = not problem if fused is None else fused
        self._input, self._form, self._stored, self._out = input, form, dict(stored), out
        self._after: dict[str, Any] = {
            "bias": bias,
            "residual": residual,
            "activation": activation,
            "gated": gated,
        }
        if scratch is not None:
            wanted = (input.dtype, input.device, self._shape)
            if (scratch.dtype, scratch.device, tuple(scratch.shape)) != wanted:
                raise ValueError(
                    f"{OP}: scratch must be {input.dtype} {list(self._shape)} on {input.device}, "
                    f"not {scratch.dtype} {list(scratch.shape)} on {scratch.device}"
                )
        if input.device.type != "cuda" or not input.numel():
            self._launches: tuple[Callable[[int], Any], ...] = (self._reference_on,)
        elif self.fused:
            call = QuantGemm(
                input, form, stored, out, **self._after, workspace=workspace, early=early
            )
            self._launches = (call.launch,)
        else:
            if scratch is None:
                scratch = torch.empty(self._shape, dtype=input.dtype, device=input.device)
            whole = Dequantize(form, stored, scratch, early=early)
            product = Linear(input, scratch, out, **self._after, workspace=workspace)
            self._launches = (whole.launch, product.launch)

    @staticmethod
    def _why_apart(
        input: torch.Tensor, form: WeightFormat, stored: Mapping[str, torch.Tensor]
    ) -> str:
        depth = input.shape[-1]
        rows = input.numel() // depth
        if rows > MOST_ROWS:
            return f"{rows} rows are more than {MOST_ROWS}"
        pitch = input.stride(-2) if input.dim() > 1 and rows > 1 else 0
        codes = stored.get("weight_packed")
        if input.data_ptr() % 16 or pitch % 8 or (codes is not None and codes.data_ptr() % 16):
            return "input and codes do not lie at multiples of 16 bytes"
        return why_not_fused(form, input.dtype, stored[form.scale_name].dtype, depth)

    # Several launches: nothing here that a struct of the library describes.
    def launch(self, stream: int = 0) -> None:
        """Issue the product on `stream` (a cudaStream_t as a number; the CPU has none)."""
        for launch in self._launches:
            launch(stream)

    def _reference_on(self, stream: int) -> None:
        weight = dequantise(self._form, self._stored, self._shape, self._input.dtype)
        self._out.copy_(reference.linear(self._input, weight, norm=None, **self._after))
