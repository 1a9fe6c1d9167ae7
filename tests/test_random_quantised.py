"""Random codes and scales: the weights that they stand for are as large as plain random ones."""

from __future__ import annotations

import pytest
import torch

from offload.bench.random_model import STD
from offload.bench.random_quantised import random_stored
from offload.kernels.dequantize import dequantise
from offload.kernels.weight_format import SHAPE, WeightFormat


@pytest.mark.parametrize("name", ["int4", "int8-g32", "int4-zp", "fp8", "fp8-block", "mxfp4"])
def test_their_size_and_how_many_values_they_have(name: str) -> None:
    form, shape, cpu = WeightFormat.parse(name), (1024, 1024), torch.device("cpu")
    stored = {SHAPE: torch.tensor(shape)}
    for end, (kind, size) in form.stored(shape, torch.float16).items():
        if end != SHAPE:
            stored[end] = random_stored(f"w.{end}", form, end, torch.Size(size), kind, cpu)
    weight = dequantise(form, stored, shape, torch.float16).float()
    assert 0.85 * STD < weight.std() < 1.15 * STD
    assert weight.mean().abs() < 0.02 * STD
    # No matrix has one scale for all of its codes.
    assert len(weight.unique()) > (16 if name == "mxfp4" else 1000)
