"""Stored weights made whole: every format on one large weight, beside what HBM copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.bench.kernels.case import Case, copies, launches
from offload.kernels.dequantizer import Dequantize
from offload.kernels.random_weight import random_stored, stored_bytes
from offload.kernels.weight_format import WeightFormat

OP = "dequantize"
DTYPE = torch.bfloat16
SHAPE = (20480, 5120)  # [N, K] of OPT-13B's largest
TINY = (256, 512)  # for a CPU
FORMS = (
    *(
        WeightFormat.parse(name)
        for name in (
            "int4",
            "int4-zp",
            "int4-g128-zp",
            "int8",
            "int8-channel",
            "fp8",
            "fp8-block",
            "mxfp4",
        )
    ),
    WeightFormat("int4", "gptq", (1, 128), zero_points=True),
    WeightFormat("int4", "gptq", (1, 128), zero_points=True, act_order=True),
    WeightFormat("int8", "gptq", (1, 128), zero_points=True),
    WeightFormat("int4", "awq", (1, 128), zero_points=True),
    WeightFormat("int4", "panels", (1, 64)),
    WeightFormat("int4", "panels", (1, 32), zero_points=True),
    WeightFormat("int4", "panels", (1, 128), zero_points=True),
    WeightFormat("int8", "panels", (1, 64)),
)
QUICK = 5  # of them


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """A format a case."""
    n, k = SHAPE if device.type == "cuda" else TINY
    for form in FORMS[:QUICK] if quick else FORMS:
        first = random_stored(form, (n, k), device, DTYPE)
        size = stored_bytes(first)
        written = n * k * DTYPE.itemsize
        # A second output, as a runtime has that fills one while the other is multiplied with.
        outs = [torch.empty(n, k, dtype=DTYPE, device=device) for _ in range(2)]
        count = copies(size, device)
        every = [first, *(random_stored(form, (n, k), device, DTYPE) for _ in range(count - 1))]
        order = " act order" if form.act_order else ""
        yield Case(
            op=OP,
            shape=f"N{n} K{k} {form.name}{order}",
            bytes=size + written,
            flop=0.0,
            ours=launches(_calls(form, every, outs, 0)),
            peers={"by units": launches(_calls(form, every, outs, 1))},
            copies=count,
        )


def _calls(
    form: WeightFormat,
    every: list[dict[str, torch.Tensor]],
    outs: list[torch.Tensor],
    variant: int,
) -> list[Dequantize]:
    return [
        Dequantize(form, stored, outs[i % 2], variant=variant) for i, stored in enumerate(every)
    ]
