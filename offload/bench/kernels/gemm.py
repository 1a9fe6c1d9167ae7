"""Products of a few rows with the weights of real models, bare and with what is fused to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, copies, launches
from offload.kernels import Norm
from offload.kernels.linear import Linear
from offload.kernels.workspace import Workspace

OP = "gemm"
DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16)
# depth, outputs: OPT-13B, Llama-7B, Llama-2-70B, Qwen2.5-14B.
SHAPES = (
    (5120, 15360),
    (5120, 20480),
    (20480, 5120),
    (5120, 5120),
    (4096, 12288),
    (4096, 22016),
    (11008, 4096),
    (8192, 10240),
    (8192, 57344),
    (28672, 8192),
    (5120, 7168),
    (5120, 27648),
    (13824, 5120),
)
QUICK = ((5120, 5120), (5120, 20480), (4096, 22016))
TINY = (256, 384)  # for a CPU
# What stands around the product in models: name -> norm, bias, activation, gated, residual.
FUSED: dict[str, tuple[str | None, bool, str | None, bool, bool]] = {
    "bare": (None, False, None, False, False),
    "layer norm, bias": ("layer", True, None, False, False),
    "layer norm, bias, relu": ("layer", True, "relu", False, False),
    "rms norm": ("rms", False, None, False, False),
    "rms norm, gated silu": ("rms", False, "silu", True, False),
    "bias, residual": (None, True, None, False, True),
    "residual": (None, False, None, False, True),
}


@dataclass
class Weights:
    """Copies of one weight and what goes with it, more than L2 holds; `depth` and `outputs` are the
    weight's, a gated product has half as many outputs."""

    depth: int
    outputs: int
    device: torch.device
    weights: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = copies(self.nbytes, self.device)
        self.weights = [
            torch.empty(self.outputs, self.depth, dtype=DTYPE, device=self.device).normal_(std=0.02)
            for _ in range(count)
        ]
        self.norm_weight = self._random(self.depth)
        self.norm_bias = self._random(self.depth)
        self.bias = self._random(self.outputs)

    @property
    def nbytes(self) -> int:
        return self.depth * self.outputs * DTYPE.itemsize

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(DTYPE)

    def arguments(self, rows: int, what: str) -> dict[str, Any]:
        """Of SkinnyGemm and Linear, less the weight."""
        norm, bias, activation, gated, residual = FUSED[what]
        outputs = self.outputs // 2 if gated else self.outputs
        return {
            "input": self._random(rows, self.depth),
            "out": torch.empty(rows, outputs, dtype=DTYPE, device=self.device),
            "bias": self.bias if bias else None,
            "residual": self._random(rows, outputs) if residual else None,
            "norm": None
            if norm is None
            else Norm(
                "layer" if norm == "layer" else "rms",
                self.norm_weight,
                self.norm_bias if norm == "layer" else None,
            ),
            "activation": activation,
            "gated": gated,
        }


def eager(weights: list[torch.Tensor], a: dict[str, Any]) -> Callable[[int], torch.Tensor]:
    """The same by torch's own functions."""
    activations: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
        None: lambda x: x,
        "relu": functional.relu,
        "silu": functional.silu,
    }
    act = activations[a["activation"]]

    def run(i: int) -> torch.Tensor:
        x, norm = a["input"], a["norm"]
        if norm is not None:
            width = (x.shape[-1],)
            if norm.kind == "layer":
                x = functional.layer_norm(x, width, norm.weight, norm.bias, norm.eps)
            else:
                x = functional.rms_norm(x, width, norm.weight, norm.eps)
        x = functional.linear(x, weights[i], a["bias"])
        if a["gated"]:
            gate, up = x.chunk(2, -1)
            x = act(gate) * up
        else:
            x = act(x)
        return x if a["residual"] is None else a["residual"] + x

    return run


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every shape and number of rows bare, and some with what models fuse to them."""
    on_gpu = device.type == "cuda"
    shapes = (QUICK if quick else SHAPES) if on_gpu else (TINY,)
    fused = {(5120, 15360): FUSED, (5120, 20480): FUSED, (4096, 22016): FUSED, TINY: FUSED}
    for depth, outputs in shapes:
        weights = Weights(depth, outputs, device)
        workspace = Workspace(device)
        for rows in (1, 16) if quick else ROWS:
            for what in fused.get((depth, outputs), ("bare",)):
                if what != "bare" and rows not in (1, 4):
                    continue
                a = weights.arguments(rows, what)
                calls = [
                    Linear(weight=weight, **a, workspace=workspace, early=on_gpu)
                    for weight in weights.weights
                ]
                plain = eager(weights.weights, a)
                name = f"K{depth} N{outputs} rows {rows}"
                yield Case(
                    op=OP,
                    shape=name if what == "bare" else f"{name} {what}",
                    bytes=weights.nbytes,
                    flop=2.0 * rows * depth * outputs,
                    ours=launches(calls),
                    peers={
                        "cuBLAS" if what == "bare" else "eager": plain,
                        "compile": torch.compile(plain),
                    },
                    copies=len(calls),
                    hbm="read",
                )
