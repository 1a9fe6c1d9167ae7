"""Ways to run calls over rows: each variant, PyTorch, a mere copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import launches
from offload.kernels import Norm, ResidualNorm, RotaryAppend

PATTERN = "pattern"  # the peer that only copies, see streams.py


def in_variants(
    calls: Sequence[ResidualNorm | RotaryAppend], field: str, variants: Sequence[int]
) -> dict[str, Callable[[int], Any]]:
    """A way to run the calls for each variant, which `field` of their arguments picks."""

    def way(variant: int) -> Callable[[int], None]:
        launch = launches(calls)

        def run(i: int) -> None:
            setattr(calls[i].arguments, field, variant)
            launch(i)

        return run

    return {str(variant): way(variant) for variant in variants}


def only_copied(
    device: torch.device, copy: str, *arguments: Any
) -> dict[str, Callable[[int], Any]]:
    """The copy of streams.py of that name as a peer, where there is a GPU and Triton."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return {}
    from offload.bench.kernels.elementwise import streams

    return {PATTERN: streams.of_copies(getattr(streams, copy), *arguments)}


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """From a standard normal distribution."""
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def peers(
    eager: Callable[..., Any], *inputs: list[torch.Tensor]
) -> dict[str, Callable[[int], Any]]:
    """`eager` of every input's copy i, as it is and compiled once for all copies."""

    def of_copies(function: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda i: function(*(each[i] for each in inputs))

    return {"eager": of_copies(eager), "compile": of_copies(torch.compile(eager, dynamic=False))}


def is_small(rows: int) -> bool:
    """Decode steps are launched early, as the engine does it."""
    return rows <= 64


def short(dtype: torch.dtype) -> str:
    """Its name in a shape."""
    return {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]


def torch_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm as PyTorch does it, in x's own dtype."""
    weight = norm.weight
    if weight is not None and norm.weight_offset:
        weight = weight + norm.weight_offset
    if norm.kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.eps)
    return functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
