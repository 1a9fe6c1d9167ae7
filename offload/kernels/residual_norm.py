"""Residual sums and the norms that follow them, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.kernels import reference, structs
from offload.kernels.call import Call, check, dtype_code, pointer
from offload.kernels.norm import Norm, norm_struct

OP = "residual_norm"


class ResidualNorm(Call):
    """sum = residual + branch_norm(branch + bias) + (branch2 + bias2); out = norm(sum); out2 =
    norm2(sum).

    Tensors are [..., width], contiguous, all of one dtype (float32, float16, bfloat16); biases and
    the norms' parameters are [width] of the same. At least one of branch, residual and branch2 must
    be given, and at least one of `sum_out`, `out` and `out2`; `out` comes with `norm`, `out2` with
    `norm2`. All is computed in float32 and rounded where it is written: the norms take the sum
    before rounding. An output may be one of the inputs itself (`sum_out=residual` adds in place),
    but no two outputs the same. `early` is programmatic dependent launch: only behind another
    kernel of this package on the same stream.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    function = "offload_residual_norm"

    def __init__(
        self,
        *,
        branch: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        branch2: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        branch_norm: Norm | None = None,
        norm: Norm | None = None,
        norm2: Norm | None = None,
        sum_out: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out2: torch.Tensor | None = None,
        early: bool = False,
    ) -> None:
        inputs = {"residual": residual, "branch": branch, "branch2": branch2}
        outputs = {"sum_out": sum_out, "out": out, "out2": out2}
        norms: dict[str, Any] = {"branch_norm": branch_norm, "norm": norm, "norm2": norm2}
        like = _check(inputs, outputs, {"bias": bias, "bias2": bias2}, norms)
        width = like.shape[-1]

        self.arguments = structs.ResidualNormStruct(
            residual=pointer(residual),
            branch=(pointer(branch), pointer(branch2)),
            bias=(pointer(bias), pointer(bias2)),
            sum=pointer(sum_out),
            output=pointer(out),
            output2=pointer(out2),
            branch_norm=norm_struct(branch_norm),
            norm=norm_struct(norm),
            norm2=norm_struct(norm2),
            rows=like.numel() // width,
            width=width,
            dtype=dtype_code(OP, like),
            launch_early=early,
        )
        self._inputs: dict[str, Any] = {
            "branch": branch,
            "residual": residual,
            "bias": bias,
            "branch2": branch2,
            "bias2": bias2,
        }
        self._norms = norms
        self._outputs = sum_out, out, out2
        self._ready(like.device)  # what was put away above keeps the tensors alive

    def _reference(self) -> None:
        results = reference.residual_norm(**self._inputs, **self._norms)
        for place, result in zip(self._outputs, results, strict=True):
            if place is not None and result is not None:
                place.copy_(result)


def _check(
    inputs: Mapping[str, torch.Tensor | None],
    outputs: Mapping[str, torch.Tensor | None],
    biases: Mapping[str, torch.Tensor | None],
    norms: Mapping[str, Norm | None],
) -> torch.Tensor:
    """Refuse arguments, by their names, that do not fit together; returns the first input."""
    like = next((x for x in inputs.values() if x is not None), None)
    if like is None:
        raise ValueError(f"{OP}: give at least one of residual, branch and branch2")
    if not isinstance(like, torch.Tensor):
        raise TypeError(f"{OP}: inputs must be tensors, not {type(like).__name__}")
    dtype_code(OP, like)
    if like.dim() < 1 or like.shape[-1] < 1:
        raise ValueError(f"{OP}: inputs must be [..., width], not {list(like.shape)}")
    width = like.shape[-1]
    for name, tensor in (*inputs.items(), *outputs.items()):
        if tensor is not None:
            check(OP, name, tensor, tuple(like.shape), like)
    for name, owner in (("bias", "branch"), ("bias2", "branch2")):
        if biases[name] is not None:
            if inputs[owner] is None:
                raise ValueError(f"{OP}: {name} is given without {owner}")
            check(OP, name, biases[name], (width,), like)
    if norms["branch_norm"] is not None and inputs["branch"] is None:
        raise ValueError(f"{OP}: branch_norm is given without branch")
    for name, norm in norms.items():
        if norm is not None:
            norm.check(OP, name, width, like)
    for one, other in (("out", "norm"), ("out2", "norm2")):
        if (outputs[one] is None) != (norms[other] is None):
            missing, given = (one, other) if outputs[one] is None else (other, one)
            raise ValueError(f"{OP}: {given} is given without {missing}")
    written = [(name, x) for name, x in outputs.items() if x is not None]
    if not written:
        raise ValueError(f"{OP}: give at least one of sum_out, out and out2")
    _check_apart(written, inputs)
    return like


def _check_apart(
    outputs: list[tuple[str, torch.Tensor]], inputs: Mapping[str, torch.Tensor | None]
) -> None:
    """Refuse outputs that share memory, except an output that is an input itself."""
    ranges = [(name, x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in outputs]
    for i, (name, begin, end) in enumerate(ranges):
        for other, other_begin, other_end in ranges[:i]:
            if begin < other_end and other_begin < end:
                raise ValueError(f"{OP}: {other} and {name} share memory")
        for other, x in inputs.items():
            if x is None or x.data_ptr() == begin:
                continue
            if begin < x.data_ptr() + x.nbytes and x.data_ptr() < end:
                raise ValueError(f"{OP}: {name} lies partly in {other}")
