"""A product of any number of rows with a weight stored in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from offload.kernels import reference, tuning
from offload.kernels.call import CompositeCall
from offload.kernels.choices import CUBLAS, OWN, Choice, Key, bucket, dtype_name
from offload.kernels.dequantize import dequantise
from offload.kernels.dequantizer import Dequantize
from offload.kernels.linear import Linear
from offload.kernels.quant_gemm import MOST_ROWS, QuantGemm, check_quantised, why_not_fused
from offload.kernels.tuning import Launch
from offload.kernels.weight_format import PANEL_ROWS, WeightFormat
from offload.kernels.workspace import Workspace

OP = "quant_linear"
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # of rows


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
        asked = _Asked(input, form, dict(stored), shape, out, after, early, scratch)
        on_gpu = input.device.type == "cuda" and input.numel() > 0
        if problem or fused is False:
            self.choice = CUBLAS
        elif fused or not on_gpu:
            self.choice = OWN
        else:
            self.choice = _choose(asked)
        self.fused = self.choice.way == "own"
        if not on_gpu:
            self._launches = (partial(_on_cpu, asked),)  # no cycle with this
            return
        if self.fused:
            self._launches = (_fused(asked).launch,)
            self.own = True
            return
        if scratch is None:
            own = torch.empty(shape, dtype=input.dtype, device=input.device)
            asked = replace(asked, scratch=own)
        whole, product = _made_whole(asked, workspace)
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
    """The arguments of a QuantLinear. `after`: bias, residual, activation, gated; `shape`: of the
    weight made whole.
    """

    input: torch.Tensor
    form: WeightFormat
    stored: dict[str, torch.Tensor]
    shape: tuple[int, int]
    out: torch.Tensor
    after: dict[str, Any]
    early: bool
    scratch: torch.Tensor | None


def _on_cpu(asked: _Asked, stream: int) -> None:
    weight = dequantise(asked.form, asked.stored, asked.shape, asked.input.dtype, asked.scratch)
    asked.out.copy_(reference.linear(asked.input, weight, norm=None, **asked.after))


def _fused(asked: _Asked) -> QuantGemm:
    given = asked.input, asked.form, asked.stored, asked.out
    return QuantGemm(*given, early=asked.early, **asked.after)


def _made_whole(asked: _Asked, workspace: Workspace | None) -> tuple[Dequantize, Linear]:
    assert asked.scratch is not None
    whole = Dequantize(asked.form, asked.stored, asked.scratch, early=asked.early)
    return whole, Linear(asked.input, asked.scratch, asked.out, workspace=workspace, **asked.after)


def _launches(asked: _Asked, choice: Choice, workspace: Workspace) -> tuple[Launch, ...]:
    if choice.way == "own":
        return (_fused(asked).launch,)
    return tuple(call.launch for call in _made_whole(asked, workspace))


def _choose(asked: _Asked) -> Choice:
    """The table's way to compute `asked`, measured now where it is not there."""
    depth, after = asked.input.shape[-1], asked.after
    rows = bucket(asked.input.numel() // depth, BUCKETS)
    key = Key(
        dtype=dtype_name(asked.input.dtype),
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
    return tuning.choose(
        key,
        asked.input.device,
        weight_bytes=sum(tensor.nbytes for tensor in asked.stored.values()),
        copies=partial(_copies, asked, rows),
        candidates=lambda copy: (CUBLAS, OWN),
        launches=_launches,
    )


def _copies(asked: _Asked, rows: int, count: int) -> list[_Asked]:
    """The same product on other tensors; each copy has weights of its own, and shares the rest."""
    like: dict[str, Any] = {"dtype": asked.input.dtype, "device": asked.input.device}
    input = torch.randn(rows, asked.input.shape[-1], **like)
    out = torch.zeros(rows, asked.out.shape[-1], **like)
    after = {**asked.after, "residual": out if asked.after["residual"] is not None else None}
    stored = [_weight(asked.stored) for _ in range(count)]
    scratch = torch.empty(*asked.shape, **like)
    like_asked = replace(asked, input=input, out=out, after=after, scratch=scratch)
    return [replace(like_asked, stored=weight) for weight in stored]


def _weight(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other tensors of the same shapes, as the given ones may not be filled yet."""
    made = {}
    for name, tensor in stored.items():
        if tensor.dtype.is_floating_point:
            made[name] = torch.full_like(tensor, 0.01)
        else:
            made[name] = torch.empty_like(tensor).random_()
    return made
