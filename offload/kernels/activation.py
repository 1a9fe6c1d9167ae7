"""Bias, activation function, and gate, in one pass."""

from __future__ import annotations

from typing import Literal

import torch

from offload.kernels import reference, structs
from offload.kernels.call import Call, check, dtype_code, pointer

OP = "activation"
Kind = Literal["relu", "gelu", "gelu_tanh", "silu"]


class Activation(Call):
    """out = act(input + bias); with a gate out = act(gate + bias) * (up + bias).

    out: [..., width], contiguous. input: [..., width], or [..., 2 * width] where `gated`, a row
    then being [gate, up]; rows lie at one stride, the last dimension is contiguous. bias: as long
    as a row of input. All of one dtype (float32, float16, bfloat16); computed in float32, rounded
    once. kind: "relu", "gelu" (by erf), "gelu_tanh", "silu", or None for the identity. `out` may
    be `input` itself where there is no gate. `early`: see ResidualNorm.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    function = "offload_activation"

    def __init__(
        self,
        input: torch.Tensor,
        out: torch.Tensor,
        *,
        kind: Kind | None,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        early: bool = False,
    ) -> None:
        if kind not in structs.ACTIVATIONS:
            names = ", ".join(map(repr, structs.ACTIVATIONS))
            raise ValueError(f"{OP}: kind must be one of {names}, not {kind!r}")
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"{OP}: out must be a tensor, not {type(out).__name__}")
        dtype = dtype_code(OP, out)
        if out.dim() < 1 or out.shape[-1] < 1:
            raise ValueError(f"{OP}: out must be [..., width], not {list(out.shape)}")
        check(OP, "out", out, tuple(out.shape), out)
        width = out.shape[-1]
        row = 2 * width if gated else width
        check(OP, "input", input, (*out.shape[:-1], row), out, contiguous=False)
        if bias is not None:
            check(OP, "bias", bias, (row,), out)
        rows = out.numel() // width
        stride = row_stride(OP, "input", input)
        span = ((rows - 1) * stride + row) * input.element_size() if rows else 0
        begin, end = input.data_ptr(), input.data_ptr() + span
        shared = out.data_ptr() < end and begin < out.data_ptr() + out.nbytes
        in_place = not gated and out.data_ptr() == begin and (stride == width or rows == 1)
        if shared and not in_place:
            raise ValueError(f"{OP}: out lies in input; only out = input without a gate may")

        self.arguments = structs.ActivationStruct(
            input=pointer(input),
            bias=pointer(bias),
            output=pointer(out),
            rows=rows,
            input_stride=stride,
            width=width,
            activation=structs.ACTIVATIONS[kind],
            gated=gated,
            dtype=dtype,
            launch_early=early,
        )
        self._input, self._out, self._bias = input, out, bias
        self._kind, self._gated = kind, gated
        self._ready(out.device)

    def _reference(self) -> None:
        result = reference.activation(
            self._input, kind=self._kind, bias=self._bias, gated=self._gated
        )
        self._out.copy_(result)


def row_stride(op: str, name: str, tensor: torch.Tensor) -> int:
    """Elements from one row to the next of a tensor [..., width]; refuses rows at uneven steps."""
    if tensor.is_contiguous():  # as most are: this is asked several times a product
        return tensor.shape[-1]
    step: int | None = None
    expected = 0
    for size, stride in reversed(list(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if step is None:
            step = expected = stride
        if stride != expected:
            raise ValueError(
                f"{op}: the rows of {name} must lie at one stride; its shape is "
                f"{list(tensor.shape)} and its strides are {list(tensor.stride())}"
            )
        expected = stride * size
    return tensor.shape[-1] if step is None else step
