"""The ops' tolerance: at most twice PyTorch's own rounding error against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from offload.kernels import Norm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_accurate(
    ours: torch.Tensor,
    peer: torch.Tensor,
    exact: torch.Tensor,
    what: str = "result",
    *,
    exponents: float = 0.0,
) -> None:
    """The largest error of `ours` against `exact` (float64) is at most twice that of `peer`.

    Nor need it be below one unit in the last place of the largest value. With few elements PyTorch
    may happen to round all of them well; in float32, where every step rounds, that is three units,
    and one more for each of `exponents`: the exponential of a sum has the relative error that the
    sum's terms, of that size, have absolutely.
    """
    assert ours.shape == exact.shape, f"{what}: {list(ours.shape)}, wanted {list(exact.shape)}"
    if not exact.numel():
        return
    assert not torch.isnan(ours).any(), f"{what}: {int(torch.isnan(ours).sum())} NaN"
    error = (ours.double() - exact).abs()
    few = ours.dtype == torch.float32 and exact.numel() < 4096
    units = 3 + exponents if few else 1
    allowed = max(
        2 * (peer.double() - exact).abs().max().item(),
        units * torch.finfo(ours.dtype).eps * exact.abs().max().item(),
    )
    worst = error.argmax().item()
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), exact.shape)]
    assert error.max().item() <= allowed, (
        f"{what}: {ours.flatten()[worst].item()} at {place}, exactly "
        f"{exact.flatten()[worst].item()}: wrong by {error.max().item():.3g}, allowed {allowed:.3g}"
    )


def widened(value: Any) -> Any:
    """The same arguments in float64: tensors, norms, and collections of them."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Norm):
        return replace(value, weight=widened(value.weight), bias=widened(value.bias))
    if isinstance(value, dict):
        return {name: widened(x) for name, x in value.items()}
    return value


def random(
    *shape: int,
    dtype: torch.dtype,
    device: str,
    offset: int = 0,
    scale: float = 1.0,
    mean: float = 0.0,
) -> torch.Tensor:
    """A contiguous random tensor that begins `offset` elements behind an aligned address."""
    size = math.prod(shape)
    buffer = torch.randn(size + offset, device=device) * scale + mean
    return buffer.to(dtype)[offset:].view(shape)


def poisoned(
    *shape: int, dtype: torch.dtype, device: str, offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN, and the buffer around it with which `assert_untouched` sees to it that
    nothing else is written."""
    size = math.prod(shape)
    buffer = torch.full((size + offset + 64,), math.nan, dtype=dtype, device=device)
    return buffer[offset : offset + size].view(shape), buffer


def assert_untouched(output: torch.Tensor, buffer: torch.Tensor) -> None:
    begin = output.storage_offset()
    outside = torch.cat((buffer[:begin], buffer[begin + output.numel() :]))
    assert torch.isnan(outside).all(), "something was written next to the output"


def random_norm(
    kind: str | None, width: int, *, dtype: torch.dtype, device: str, offset: int = 0, **fields: Any
) -> Norm | None:
    """A norm with random parameters; "rms" without bias, "plain" without any."""
    if kind is None:
        return None
    if kind == "plain":
        return Norm("layer", None, **fields)
    weight = random(width, dtype=dtype, device=device, offset=offset, mean=0.5)
    bias = random(width, dtype=dtype, device=device, offset=offset) if kind == "layer" else None
    return Norm("layer" if kind == "layer" else "rms", weight, bias, **fields)
