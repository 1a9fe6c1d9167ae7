"""A product of any number of rows with an int8 weight on the int8 matrix units: rows are rounded to
int8 with a scale each, and the sums scaled back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload.kernels.call import CompositeCall, check, on_stream
from offload.kernels.quantize_rows import QuantizeRows
from offload.kernels.scale_sums import ScaleSums
from offload.kernels.structs import DTYPES
from offload.kernels.weight_format import WeightFormat
from offload.kernels.workspace import Workspace

OP = "int8_linear"
# Bytes of sums that are made at once: they are read again out of L2, of which that is about the
# size, and scratch stays small. Fewer than LEAST_ROWS would keep the matrix units waiting.
SUMS = 64 << 20
LEAST_ROWS = 1024
GRAIN = 32  # rows: cuBLAS takes more than 16, and an even number
DEEPEST = ((1 << 31) - 1) // (127 * 128)  # inputs whose sums int32 holds
_ALIGNMENT = 256


def why_not_int8(form: WeightFormat, dtype: torch.dtype, outputs: int, depth: int) -> str:
    """Why Int8Linear does not multiply [outputs, depth] in `form`; "" where it does."""
    if form.inputs != "int8":
        return f"{form.name} does not ask for int8 inputs"
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of float32, float16 and bfloat16"
    if outputs % 8 or depth % 8:
        return f"[{outputs}, {depth}] are no multiples of 8"
    if depth > DEEPEST:
        return f"sums of {depth} products do not fit int32"
    return ""


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """`count` rows as int8: codes [count or more, depth], and a float32 scale each. There are codes
    up to the next multiple of GRAIN rows; those of further rows are undefined.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    count: int

    @staticmethod
    def nbytes(count: int, depth: int) -> int:
        """Of the memory that so many rows take."""
        return _aligned(_whole(count) * depth) + _aligned(4 * _whole(count))

    @classmethod
    def within(cls, memory: torch.Tensor, count: int, depth: int) -> Int8Rows:
        """In uint8 `memory`, at a multiple of 16 bytes; a QuantizeRows fills it."""
        rows = _whole(count)
        begin = _aligned(rows * depth)
        codes = memory[: rows * depth].view(torch.int8).view(rows, depth)
        return cls(codes, memory[begin : begin + 4 * rows].view(torch.float32), count)

    def __getitem__(self, rows: slice) -> Int8Rows:
        """Those from `rows.start`, a multiple of GRAIN, to `rows.stop`."""
        first, end = rows.start, min(rows.stop, self.count)
        part = slice(first, first + _whole(end - first))
        return Int8Rows(self.codes[part], self.scales[part], end - first)

    def made_of(self, input: torch.Tensor, **before: Any) -> QuantizeRows:
        """The call that makes them of `input` [..., depth]; `before`: see QuantizeRows."""
        return QuantizeRows(input, self.codes[: self.count], self.scales[: self.count], **before)


class Int8Linear(CompositeCall):
    """out = act(x @ weight.T + bias) + residual, with a gate act(gate) * up + residual, where x is
    the input in int8, each row with a scale of its own (the largest magnitude / 127), and the
    weight is what `stored` (by the ends of names) stands for in `form`: int8 codes and one scale a
    row or for all. Products and their sums are exact, in int32.

    input: [..., depth], or Int8Rows that are made before; out, residual: [..., outputs]; bias:
    [outputs or 2 * outputs]; contiguous, of one dtype (float32, float16, bfloat16). `workspace`:
    scratch shared by the calls of one stream; without it the call has its own. `early`: see
    ResidualNorm. A CPU does the same in torch. `launch(stream)` issues it, like a `Call`.

    The published name is W8A8, with `input_activations` {num_bits 8, dynamic, strategy token}.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    def __init__(
        self,
        input: torch.Tensor | Int8Rows,
        form: WeightFormat,
        stored: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
        gated: bool = False,
        workspace: Workspace | None = None,
        early: bool = False,
    ) -> None:
        count, products, depth = _check(input, form, stored, out, gated)
        launches: list[Callable[[int], Any]] = []
        self._launches = launches
        if not count:
            return
        some = at_once(count, products)
        own = 0 if isinstance(input, Int8Rows) else Int8Rows.nbytes(count, depth)
        with torch.inference_mode(False):
            workspace = workspace or Workspace(out.device)
            memory = workspace.partials(own + 4 * _whole(some) * products).view(torch.uint8)
        if isinstance(input, Int8Rows):
            rows = input
        else:
            rows = Int8Rows.within(memory, count, depth)
            launches.append(rows.made_of(input, early=early).launch)
        sums = memory[own:].view(torch.int32).view(-1, products)
        weight, flat = stored["weight"].t(), out.view(count, -1)
        added = None if residual is None else residual.view(count, -1)
        for first in range(0, count, some):
            piece = slice(first, min(first + some, count))
            part = rows[piece]
            product = sums[: part.codes.shape[0]]
            launches.append(partial(_multiply, part.codes, weight, product))
            launches.append(
                ScaleSums(
                    product[: part.count],
                    part.scales[: part.count],
                    stored[form.scale_name],
                    flat[piece],
                    bias=bias,
                    residual=None if added is None else added[piece],
                    activation=activation,
                    gated=gated,
                ).launch
            )


def at_once(count: int, products: int) -> int:
    """Rows whose sums are made at once."""
    some = max(LEAST_ROWS, SUMS // (4 * products) // LEAST_ROWS * LEAST_ROWS)
    return min(count, some)


def _check(
    input: torch.Tensor | Int8Rows,
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    gated: bool,
) -> tuple[int, int, int]:
    """Refuse what does not fit together; rows, rows of the weight, depth."""
    for name, tensor in (("input", input), ("out", out)):
        if name == "input" and isinstance(input, Int8Rows):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{OP}: {name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dim() < 1 or tensor.shape[-1] < 1:
            raise ValueError(f"{OP}: {name} must be [..., n], not {list(tensor.shape)}")
    outputs = out.shape[-1]
    count, products = out.numel() // outputs, 2 * outputs if gated else outputs
    if isinstance(input, Int8Rows):
        depth = input.codes.shape[-1]
        if input.count != count:
            raise ValueError(f"{OP}: input has {input.count} rows, and out {count}")
        check(OP, "input", input.codes, (_whole(count), depth), out, dtype=torch.int8)
    else:
        depth = input.shape[-1]
        check(OP, "out", out, (*input.shape[:-1], outputs), input)
        check(OP, "input", input, tuple(input.shape), out)
    problem = why_not_int8(form, out.dtype, products, depth)
    if problem:
        raise ValueError(f"{OP}: {problem}; QuantLinear takes any")
    try:
        form.check_stored(
            {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()}, (products, depth)
        )
    except ValueError as error:
        raise ValueError(f"{OP}: {error}") from None
    for name, tensor in stored.items():
        check(OP, name, tensor, tuple(tensor.shape), out, dtype=tensor.dtype)
    return count, products, depth


def _multiply(codes: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor, stream: int) -> None:
    with on_stream(codes.device, stream):
        torch._int_mm(codes, weight, out=sums)


def _whole(count: int) -> int:
    return -(-count // GRAIN) * GRAIN


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
