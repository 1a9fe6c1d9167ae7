"""Products of rows rounded to int8 with int8 weights, beside cuBLAS in bfloat16; and what stands
around them, beside what HBM copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, copies, launches
from offload.kernels import Norm, ResidualNorm
from offload.kernels.int8_linear import Int8Linear
from offload.kernels.quantize_rows import QuantizeRows
from offload.kernels.random_weight import random_stored, stored_bytes
from offload.kernels.scale_sums import ScaleSums
from offload.kernels.weight_format import WeightFormat
from offload.kernels.workspace import Workspace

OPS = ("int8_linear", "quantize_rows", "scale_sums")
DTYPE = torch.bfloat16
FORM = WeightFormat.parse("w8a8")
# rows, depth, outputs: OPT-13B's MLP and attention, Llama-7B's gate and up.
PRODUCTS = (
    *((rows, 5120, 20480) for rows in (1, 64, 512, 8192)),
    (8192, 20480, 5120),
    (32768, 5120, 15360),
    (8192, 4096, 22016),
)
QUICK = 2  # of them
ROWS = (32768, 5120)  # of hidden states
TINY = (40, 64, 96)  # for a CPU


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The whole product of each shape (its bound is that of bfloat16, whose matrix rate int8
    doubles), then the kernels ahead of it and behind it.
    """
    on_gpu = device.type == "cuda"
    for shape in (PRODUCTS[:QUICK] if quick else PRODUCTS) if on_gpu else (TINY,):
        yield _product(*shape, device)
    yield from _around(*(ROWS if on_gpu else TINY[:2]), device)


def _product(rows: int, depth: int, outputs: int, device: torch.device) -> Case:
    like: dict[str, Any] = {"dtype": DTYPE, "device": device}
    first = random_stored(FORM, (outputs, depth), device, DTYPE)
    size = stored_bytes(first)
    count = copies(size + 2 * rows * (depth + outputs), device)
    every = [
        first,
        *(random_stored(FORM, (outputs, depth), device, DTYPE) for _ in range(count - 1)),
    ]
    x, out = torch.randn(rows, depth, **like), torch.empty(rows, outputs, **like)
    workspace = Workspace(device)
    calls = [Int8Linear(x, FORM, stored, out, workspace=workspace) for stored in every]
    some = max(32, -(-rows // 32) * 32)
    codes = torch.randint(-127, 128, (some, depth), dtype=torch.int8, device=device)
    sums = torch.empty(some, outputs, dtype=torch.int32, device=device)
    whole = [torch.randn(outputs, depth, **like) * 0.02 for _ in range(min(count, 4))]
    return Case(
        op="int8_linear",
        shape=f"rows {rows} K{depth} N{outputs}",
        bytes=size + DTYPE.itemsize * rows * (depth + outputs),
        flop=2.0 * rows * depth * outputs,
        ours=launches(calls),
        peers={
            "the int8 product alone": lambda i: torch._int_mm(
                codes, every[i]["weight"].t(), out=sums
            ),
            "cuBLAS bf16": lambda i: functional.linear(x, whole[i % len(whole)]),
        },
        copies=count,
        hbm="read" if rows <= 64 else "copy",
    )


def _around(rows: int, width: int, device: torch.device) -> Iterator[Case]:
    like: dict[str, Any] = {"dtype": DTYPE, "device": device}
    new = partial(torch.randn, rows, width, **like)
    count = copies(4 * rows * width, device)
    hidden, branch = [new() for _ in range(count)], [new() for _ in range(count)]
    codes = torch.empty(rows, width, dtype=torch.int8, device=device)
    scales = torch.rand(rows, device=device)
    norm = Norm("rms", torch.randn(width, **like), None, 1e-5)
    normed = torch.empty(rows, width, **like)
    yield Case(
        op="quantize_rows",
        shape=f"{rows} x {width}",
        bytes=3 * rows * width,
        flop=0.0,
        ours=launches([QuantizeRows(x, codes, scales) for x in hidden]),
        copies=count,
    )
    yield Case(
        op="quantize_rows",
        shape=f"{rows} x {width}, residual sum and norm",
        bytes=7 * rows * width,
        flop=0.0,
        ours=launches(
            [
                QuantizeRows(x, codes, scales, branch=y, norm=norm, sum_out=x)
                for x, y in zip(hidden, branch, strict=True)
            ]
        ),
        peers={
            "residual_norm": launches(
                [
                    ResidualNorm(residual=x, branch=y, norm=norm, sum_out=x, out=normed)
                    for x, y in zip(hidden, branch, strict=True)
                ]
            )
        },
        copies=count,
    )
    sums = [torch.randint(-9999, 9999, (rows, width), dtype=torch.int32, device=device)]
    sums += [sums[0].clone() for _ in range(copies(6 * rows * width, device) - 1)]
    columns = torch.rand(width, device=device) * 1e-3
    yield Case(
        op="scale_sums",
        shape=f"{rows} x {width}",
        bytes=6 * rows * width,
        flop=0.0,
        ours=launches([ScaleSums(x, scales, columns, normed) for x in sums]),
        copies=len(sums),
    )
