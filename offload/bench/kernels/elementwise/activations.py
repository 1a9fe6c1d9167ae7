"""The activations of real models' MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload.bench.kernels.case import Case, copies, launches
from offload.bench.kernels.elementwise.calls import is_small, peers, random, short
from offload.kernels import Activation, reference
from offload.kernels.activation import Kind


@dataclass(frozen=True)
class Inner:
    """The activation of one model's MLP."""

    model: str
    width: int
    kind: Kind
    gated: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def case(self, device: torch.device, rows: int) -> Case:
        like: dict[str, Any] = {"dtype": self.dtype, "device": device}
        row = self.width * (2 if self.gated else 1)
        size = rows * (row + self.width) * self.dtype.itemsize
        count = copies(size, device)
        inputs = [random(rows, row, **like) for _ in range(count)]
        outs = [torch.empty(rows, self.width, **like) for _ in range(count)]
        bias = random(row, **like) if self.bias else None
        options: dict[str, Any] = {"kind": self.kind, "bias": bias, "gated": self.gated}
        calls = [
            Activation(x, out, early=is_small(rows), **options)
            for x, out in zip(inputs, outs, strict=True)
        ]

        def eager(x: torch.Tensor) -> torch.Tensor:
            x = x if bias is None else x + bias
            if not self.gated:
                return reference.activate(x, self.kind)
            gate, up = x.chunk(2, -1)
            return reference.activate(gate, self.kind) * up

        what = f"{'gated ' if self.gated else ''}{self.kind}{', bias' if self.bias else ''}"
        return Case(
            op="activation",
            shape=f"{self.model} {rows} x {self.width} {short(self.dtype)}: {what}",
            bytes=size,
            flop=0.0,
            ours=launches(calls),
            peers=peers(eager, inputs),
            copies=count,
        )


ACTIVATIONS = (
    Inner("Llama-7B", 11008, "silu", gated=True),
    Inner("OPT-13B", 20480, "relu", bias=True),
    Inner("GPT-NeoX-20B", 24576, "gelu", bias=True),
    Inner("GPT-J-6B", 16384, "gelu_tanh", bias=True),
    Inner("Gemma-2-9B", 14336, "gelu_tanh", gated=True),
    Inner("GPT-NeoX-20B", 24576, "gelu", bias=True, dtype=torch.float16),
    Inner("Llama-7B", 11008, "silu", gated=True, dtype=torch.float32),
)
