"""Residual sums and norms of real models' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.bench.kernels.case import Case, copies, launches
from offload.bench.kernels.elementwise.calls import (
    in_variants,
    is_small,
    only_copied,
    peers,
    random,
    short,
    torch_norm,
)
from offload.kernels import Norm, ResidualNorm


@dataclass(frozen=True)
class Rows:
    """Residual sum and norm of one model's rows."""

    model: str
    width: int
    kind: str
    branches: int = 1  # 0: no sum, a norm alone
    bias: bool = False
    norms: int = 1  # outputs
    sandwich: bool = False  # the branch is normalised too
    dtype: torch.dtype = torch.bfloat16

    def case(self, device: torch.device, rows: int, variants: Sequence[int] = ()) -> Case:
        """Beside its peers, or beside the library's own `variants`."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": device}
        tensors = (1 + self.branches) + (self.branches > 0) + self.norms
        size = rows * self.width * self.dtype.itemsize
        count = copies(tensors * size, device)

        def norm() -> Norm:
            weight = random(self.width, **like)
            if self.kind == "layer":
                return Norm("layer", weight, random(self.width, **like))
            return Norm("rms", weight)

        norms = [norm() for _ in range(self.norms)]
        branch_norm = norm() if self.sandwich else None
        bias = random(self.width, **like) if self.bias else None
        residual, *branches = (
            [random(rows, self.width, **like) for _ in range(count)]
            for _ in range(1 + self.branches)
        )
        outs = [[torch.empty(rows, self.width, **like) for _ in range(count)] for _ in norms]
        calls = [
            ResidualNorm(
                residual=residual[i],
                branch=branches[0][i] if branches else None,
                branch2=branches[1][i] if len(branches) > 1 else None,
                bias=bias,
                branch_norm=branch_norm,
                norm=norms[0],
                norm2=norms[1] if len(norms) > 1 else None,
                sum_out=residual[i] if branches else None,
                out=outs[0][i],
                out2=outs[1][i] if len(norms) > 1 else None,
                early=is_small(rows),
            )
            for i in range(count)
        ]

        # A pair a stream: what is read, and what is written.
        read = [branches[0], residual, *branches[1:]] if branches else [residual]
        written = [residual, *outs] if branches else outs
        copied = only_copied(
            device,
            "copy_streams",
            list(zip(*read, strict=True)),
            list(zip(*written, strict=True)),
        )

        def eager(total: torch.Tensor, *added: torch.Tensor) -> Any:
            for j, branch in enumerate(added):
                if j == 0:
                    branch = branch if bias is None else branch + bias
                    branch = branch if branch_norm is None else torch_norm(branch, branch_norm)
                total = total + branch
            return total, [torch_norm(total, one) for one in norms]

        what = ["norm" if not branches else f"{self.branches}-branch sum, norm"]
        what += ["bias"] if self.bias else []
        what += ["twice"] if self.norms > 1 else []
        what += ["of a normed branch"] if self.sandwich else []
        return Case(
            op="residual_norm",
            shape=f"{self.model} {rows} x {self.width} {self.kind} {short(self.dtype)}: "
            + ", ".join(what),
            bytes=tensors * size,
            flop=0.0,
            ours=launches(calls),
            peers=copied
            | (
                in_variants(calls, "packs_per_thread", variants)
                or peers(eager, residual, *branches)
            ),
            copies=count,
        )


NORMS = (
    Rows("Llama-7B", 4096, "rms"),
    Rows("OPT-13B", 5120, "layer", bias=True),
    Rows("Llama-70B", 8192, "rms", branches=0),
    Rows("GPT-NeoX-20B", 6144, "layer", branches=2, bias=True, norms=2),
    Rows("Gemma-2-9B", 3584, "rms", sandwich=True),
    Rows("Bloom-176B", 14336, "layer"),
    Rows("SmolLM2-135M", 576, "rms"),
    Rows("Llama-7B", 4096, "rms", dtype=torch.float32),
    Rows("OPT-13B", 5120, "layer", dtype=torch.float16),
)
