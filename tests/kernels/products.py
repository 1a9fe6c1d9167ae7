"""Random products, what PyTorch makes of them, and how far from the exact one a result may be."""

from __future__ import annotations

import math
from typing import Any

import torch
from accuracy import random_norm, widened
from machines import device_of
from torch.nn import functional

from offload.kernels import reference


def rows_of(
    rows: int, width: int, *, pad: int, offset: int, dtype: torch.dtype, device: str, scale: float
) -> torch.Tensor:
    """Random rows [rows, width] with NaN between them, that begin `offset` elements off."""
    buffer = torch.randn(rows * (width + pad) + offset, device=device) * scale
    view = buffer.to(dtype)[offset:].view(rows, width + pad)
    view[:, width:] = math.nan
    return view[:, :width]


def make(
    machine: str,
    *,
    dtype: torch.dtype,
    rows: int,
    depth: int,
    outputs: int,
    gated: bool = False,
    bias: bool = False,
    residual: str | None = None,
    norm: str | None = None,
    weight_offset: float = 0.0,
    activation: str | None = None,
    pad: int = 0,
    offset: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of SkinnyGemm; `out` is NaN, and so is what lies around it. residual: "apart" or
    "in place"."""
    torch.manual_seed(seed)
    device = device_of(machine)
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    products = 2 * outputs if gated else outputs
    place: dict[str, Any] = {"pad": pad, "offset": offset, **like}
    given: dict[str, Any] = {
        "input": rows_of(rows, depth, scale=1.0, **place),
        "weight": rows_of(products, depth, scale=depth**-0.5, **place),
        "bias": torch.randn(products, device=device).to(dtype) if bias else None,
        "norm": random_norm(norm, depth, offset=offset, weight_offset=weight_offset, **like),
        "activation": activation,
        "gated": gated,
    }
    around = torch.full((rows + 2, outputs + 5), math.nan, **like)
    given["out"] = around[1:-1, :outputs]
    given["residual"] = None
    if residual == "apart":
        given["residual"] = rows_of(rows, outputs, pad=3, offset=offset, scale=1.0, **like)
    elif residual == "in place":
        given["out"].normal_()
        given["residual"] = given["out"]
    return given


def torch_product(a: dict[str, Any]) -> torch.Tensor:
    """The same by PyTorch's own functions, each rounding to the dtype."""
    x, norm = a["input"], a["norm"]
    if norm is not None:
        weight = norm.weight
        if weight is not None and norm.weight_offset:
            weight = weight + norm.weight_offset
        width = x.shape[-1:]
        if norm.kind == "layer":
            x = functional.layer_norm(x, width, weight, norm.bias, norm.eps)
        else:
            x = functional.rms_norm(x, width, weight, norm.eps)
    x = functional.linear(x, a["weight"], a["bias"])
    if a["gated"]:
        gate, up = x.chunk(2, -1)
        x = reference.activate(gate, a["activation"]) * up
    else:
        x = reference.activate(x, a["activation"])
    return x if a["residual"] is None else x + a["residual"]


def exact_product(a: dict[str, Any]) -> torch.Tensor:
    wide = widened({name: x for name, x in a.items() if name != "out"})
    return reference.linear(wide.pop("input"), wide.pop("weight"), **{n: wide[n] for n in _FUSED})


_FUSED = ("bias", "residual", "norm", "activation", "gated")


def allowed_error(a: dict[str, Any], exact: torch.Tensor) -> float:
    """Twice PyTorch's own error; not below a unit in the last place of the largest result, nor
    below what a few float32 operations of the terms' size may cost, those that a norm has among
    them, since PyTorch may happen to round the few results of a small product well."""
    peer = (torch_product(a).double() - exact).abs().max().item()
    x = reference.normalise(a["input"].double(), widened(a["norm"])).abs()
    terms = (x @ a["weight"].double().abs().T).max().item()
    terms = terms**2 if a["gated"] else terms
    tiny = torch.finfo(torch.float32).eps * (1 if a["norm"] is None else 3.5)
    return max(2 * peer, torch.finfo(exact_dtype(a)).eps * exact.abs().max().item(), tiny * terms)


def exact_dtype(a: dict[str, Any]) -> torch.dtype:
    return a["input"].dtype
