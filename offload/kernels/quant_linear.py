"""A product of any number of rows with a weight stored in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload.kernels import reference, tuning
from offload.kernels.call import CompositeCall
from offload.kernels.dequantize import dequantise
from offload.kernels.dequantizer import Dequantize
from offload.kernels.linear import Linear
from offload.kernels.quant_gemm import MOST_ROWS, QuantGemm, check_quantised, why_not_fused
from offload.kernels.tuning import Choice, Key
from offload.kernels.weight_format import PANEL_ROWS, WeightFormat
from offload.kernels.workspace import Workspace

OP = "quant_linear"
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # of rows
OWN, CUBLAS = Choice("own"), Choice("cublas")


class QuantLinear(CompositeCall):
    """out = act(input @ weight.T + bias) + residual, with a gate act(gate) * up + residual, where
    the weight is what `stored` stands for in `form`; arguments as QuantGemm has them.

    Up to 64 rows of a weight that QuantGemm takes may run there; all else is made whole in
    `scratch` and multiplied by `Linear`. Which is quicker is looked up in a table that is measured
    on this machine when a shape is first seen (tens of milliseconds, and scratch of three times L2;
    not while a graph is captured); `fused` forces one or the other. `scratch`, [outputs or 2 *
    outputs, depth] of the input's dtype, is the caller's and may be shared by the calls of one
    stream; without it the call has its own. On a CPU the reference runs. `launch(stream)` issues
    it, like a `Call`.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    own = False  # whether its last kernel is one of this package

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
        shape = check_quantised(OP, input, form, stored, out, bias, residual, activation, gated)
        problem = self._why_apart(input, form, stored, out.shape[-1] if gated else 0)
        if fused and problem:
            raise ValueError(f"{OP}: it cannot be fused: {problem}")
        after = {"bias": bias, "residual": residual, "activation": activation, "gated": gated}
        if scratch is not None:
            wanted = (input.dtype, input.device, shape)
            if (scratch.dtype, scratch.device, tuple(scratch.shape)) != wanted:
                raise ValueError(
                    f"{OP}: scratch must be {input.dtype} {list(shape)} on {input.device}, "
                    f"not {scratch.dtype} {list(scratch.shape)} on {scratch.device}"
                )
        asked = _Asked(input, form, dict(stored), out, after, early)
        on_gpu = input.device.type == "cuda" and input.numel() > 0
        if problem or fused is False:
            self.choice = CUBLAS
        elif fused or not on_gpu:
            self.choice = OWN
        else:
            self.choice = _choose(asked)
        self.fused = self.choice.way == "own"
        if not on_gpu:
            self._launches = (partial(_on_cpu, asked, shape, scratch),)  # no cycle with this
            return
        if self.fused:
            self._launches = (_fused(asked).launch,)
            self.own = True
            return
        if scratch is None:
            scratch = torch.empty(shape, dtype=input.dtype, device=input.device)
        whole, product = _made_whole(asked, scratch, workspace)
        self._launches = whole.launch, product.launch
        self.own = product.own

    @staticmethod
    def _why_apart(
        input: torch.Tensor, form: WeightFormat, stored: Mapping[str, torch.Tensor], gate: int
    ) -> str:
        depth = input.shape[-1]
        rows = input.numel() // depth
        if rows > MOST_ROWS:
            return f"{rows} rows are more than {MOST_ROWS}"
        pitch = input.stride(-2) if input.dim() > 1 and rows > 1 else 0
        if input.data_ptr() % 16 or pitch % 8 or any(t.data_ptr() % 16 for t in stored.values()):
            return "input and weight do not lie at multiples of 16 bytes"
        if gate % PANEL_ROWS:
            return f"gate and up of {gate} outputs do not begin with a panel each"
        return why_not_fused(form, input.dtype, stored[form.scale_name].dtype, depth)


@dataclass(frozen=True)
class _Asked:
    """What a QuantLinear was asked for; `after`: bias, residual, activation, gated."""

    input: torch.Tensor
    form: WeightFormat
    stored: dict[str, torch.Tensor]
    out: torch.Tensor
    after: dict[str, Any]
    early: bool


def _on_cpu(
    asked: _Asked, shape: tuple[int, ...], scratch: torch.Tensor | None, stream: int
) -> None:
    weight = dequantise(asked.form, asked.stored, shape, asked.input.dtype, scratch)
    asked.out.copy_(reference.linear(asked.input, weight, norm=None, **asked.after))


def _fused(asked: _Asked) -> QuantGemm:
    given = asked.input, asked.form, asked.stored, asked.out
    return QuantGemm(*given, early=asked.early, **asked.after)


def _made_whole(
    asked: _Asked, scratch: torch.Tensor, workspace: Workspace | None
) -> tuple[Dequantize, Linear]:
    whole = Dequantize(asked.form, asked.stored, scratch, early=asked.early)
    return whole, Linear(asked.input, scratch, asked.out, workspace=workspace, **asked.after)


def _choose(asked: _Asked) -> Choice:
    """The table's way to compute `asked`, measured now where it is not there."""
    depth, after = asked.input.shape[-1], asked.after
    rows = tuning.bucket(asked.input.numel() // depth, BUCKETS)
    key = Key(
        dtype=str(asked.input.dtype).removeprefix("torch."),
        form=asked.form.name,
        outputs=asked.out.shape[-1],
        depth=depth,
        rows=rows,
        gated=after["gated"],
        activation=after["activation"] is not None,
        residual=after["residual"] is not None,
        early=asked.early,
        bias=after["bias"] is not None,
    )
    device = asked.input.device
    if torch.cuda.is_current_stream_capturing():
        return tuning.table(device.index or 0).get(key) or OWN
    try:
        return _Measurement(asked, rows).pick(key)
    except torch.OutOfMemoryError:
        return OWN  # no room to measure in


class _Measurement:
    """Times the ways to compute a product on weights of its own, which take turns."""

    def __init__(self, asked: _Asked, rows: int) -> None:
        self._asked, self._rows = asked, rows
        self._device = asked.input.device
        self._copies: list[_Asked] = []

    def pick(self, key: Key) -> Choice:
        """The quickest, kept in the table."""
        return tuning.pick(key, self._device, self._candidates, self._time)

    def _candidates(self) -> tuple[Choice, ...]:
        asked = self._asked
        like: dict[str, Any] = {"dtype": asked.input.dtype, "device": self._device}
        input = torch.randn(self._rows, asked.input.shape[-1], **like)
        out = torch.zeros(self._rows, asked.out.shape[-1], **like)
        after = {**asked.after, "residual": out if asked.after["residual"] is not None else None}
        size = sum(tensor.nbytes for tensor in asked.stored.values())
        self._copies = [
            _Asked(input, asked.form, self._weight(), out, after, asked.early)
            for _ in range(tuning.rotation(size, self._device))
        ]
        rows = (2 if after["gated"] else 1) * out.shape[-1]
        self._scratch = torch.empty(rows, input.shape[-1], **like)
        return CUBLAS, OWN

    def _weight(self) -> dict[str, torch.Tensor]:
        """Other tensors of the same shapes: what lies in the given ones may not be there yet."""
        made = {}
        for name, tensor in self._asked.stored.items():
            if tensor.dtype.is_floating_point:
                made[name] = torch.full_like(tensor, 0.01)
            else:
                made[name] = torch.empty_like(tensor).random_()
        return made

    def _time(self, choice: Choice) -> float:
        workspace = Workspace(self._device)
        products = [
            (_fused(copy).launch,)
            if choice.way == "own"
            else tuple(call.launch for call in _made_whole(copy, self._scratch, workspace))
            for copy in self._copies
        ]
        return tuning.time_products(products, self._device)
