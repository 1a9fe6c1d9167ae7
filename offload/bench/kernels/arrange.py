"""Codes put in panels, as once for a weight that stays: one large weight from every layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.bench.kernels.case import Case, copies, launches
from offload.bench.kernels.dequantize import DTYPE, SHAPE, TINY
from offload.kernels.arrange import Arrange
from offload.kernels.panels import panels_of
from offload.kernels.random_weight import random_stored
from offload.kernels.weight_format import WeightFormat

OP = "arrange"
FORMS = (
    WeightFormat.parse("int4"),
    WeightFormat("int4", "gptq", (1, 128), zero_points=True),
    WeightFormat("int4", "awq", (1, 128), zero_points=True),
    WeightFormat.parse("int8"),
    WeightFormat("int8", "gptq", (1, 128), zero_points=True),
)
QUICK = 3  # of them


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """A layout a case: its codes are read and written once."""
    shape = SHAPE if device.type == "cuda" else TINY
    for form in FORMS[:QUICK] if quick else FORMS:
        panels = panels_of(form, shape)
        assert panels is not None
        size = panels.stored(shape)["weight_panels"][1]
        into = torch.empty(size, dtype=torch.uint8, device=device)
        count = copies(into.nbytes, device)
        every = [random_stored(form, shape, device, DTYPE) for _ in range(count)]
        yield Case(
            op=OP,
            shape=f"N{shape[0]} K{shape[1]} {form.name}",
            bytes=2 * into.nbytes,
            flop=0.0,
            ours=launches([Arrange(form, stored, shape, into) for stored in every]),
            peers={},
            copies=count,
        )
