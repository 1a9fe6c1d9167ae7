"""Products with weights in any format, of any number of rows; and what they refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import MACHINES, device_of
from test_dequantizer import FORMS, random_stored
from torch.nn import functional

from offload.kernels import Norm, choices, quant_linear, tuning
from offload.kernels.call import current_stream
from offload.kernels.choices import Choice, Table
from offload.kernels.dequantize import dequantise
from offload.kernels.panels import in_panels
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.quantize import quantise
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.weight_format import WeightFormat
from offload.kernels.workspace import Workspace


@pytest.mark.parametrize("machine", [MACHINES[0], MACHINES[2]])
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_every_format(machine: str, rows: int) -> None:
    device = torch.device(device_of(machine))
    for form in FORMS:
        if form.layout == "gpt_oss":
            continue
        torch.manual_seed(rows)
        n, k = 144, 384 if form.block[1] != 12 else 96
        stored = {
            name: tensor.to(device)
            for name, tensor in random_stored(form, (n, k), torch.bfloat16).items()
        }
        if form.kind == "mxfp4":  # whose scales may be as large as a bfloat16
            stored["weight_scale"] = stored["weight_scale"] % 16 + 115
        weight = dequantise(form, stored, (n, k), torch.bfloat16)
        x = torch.randn(rows, k, device=device).bfloat16()
        out = torch.full((rows, n), math.nan, dtype=torch.bfloat16, device=device)
        fusable = rows <= 64 and form.layout == "panels" and form.block[1] != 96
        call = QuantLinear(x, form, stored, out, fused=fusable or None)
        assert call.fused == fusable
        call.launch(current_stream(device))
        exact = functional.linear(x.double(), weight.double())
        peer = (functional.linear(x, weight).double() - exact).abs().max()
        error = (out.double() - exact).abs().max()
        unit = 2.0**-8 * exact.abs().max()
        assert error <= max(2 * peer, unit), form


ROWS, FORM = WeightFormat.parse("int4-g32"), WeightFormat("int4", "panels", (1, 32))
X, OUT = torch.randn(4, 64).bfloat16(), torch.zeros(4, 16).bfloat16()
IN_ROWS = quantise(torch.randn(16, 64).bfloat16(), ROWS)
STORED = in_panels(ROWS, IN_ROWS)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"scratch must be torch.bfloat16 \[16, 64\] on cpu, no"):
        QuantLinear(X, FORM, STORED, OUT, scratch=torch.zeros(16, 64))
    with pytest.raises(ValueError, match="cannot be fused: 65 rows are more than 64"):
        long = torch.zeros(65, 64).bfloat16()
        QuantLinear(long, FORM, STORED, torch.zeros(65, 16).bfloat16(), fused=True)
    with pytest.raises(ValueError, match="weight_panel_scale is missing"):
        QuantLinear(X, FORM, {"weight_panels": STORED["weight_panels"]}, OUT)
    with pytest.raises(
        ValueError, match="cannot be fused: int4 stored as 'packed' does not lie in"
    ):
        QuantLinear(X, ROWS, IN_ROWS, OUT, fused=True)
    with pytest.raises(ValueError, match="cannot be fused: gate and up of 8 outputs do not begin"):
        QuantLinear(X, FORM, STORED, torch.zeros(4, 8).bfloat16(), gated=True, fused=True)


def test_an_input_that_lies_anywhere_is_not_fused() -> None:
    shifted = torch.randn(4 * 64 + 1).bfloat16()[1:].view(4, 64)
    call = QuantLinear(shifted, FORM, STORED, OUT)
    assert not call.fused
    call.launch()
    weight = dequantise(FORM, STORED, (16, 64), torch.bfloat16)
    torch.testing.assert_close(OUT, functional.linear(shifted, weight), rtol=0.02, atol=0.05)


def test_both_ways_are_measured_on_weights_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def time(products: Any, device: torch.device) -> float:
        for launches in products:
            for launch in launches:
                launch(0)
        return 1.0 + len(products[0])  # two launches make it whole and multiply

    table = Table("a GPU")
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "table", lambda device: table)
    monkeypatch.setattr(tuning, "rotation", lambda nbytes, device: 3)
    monkeypatch.setattr(tuning, "time_products", time)
    before = {name: tensor.clone() for name, tensor in STORED.items()}
    after = {"bias": None, "residual": torch.zeros_like(OUT), "activation": "relu", "gated": False}
    asked = quant_linear._Asked(X, FORM, STORED, (16, 64), OUT.clone(), after, False, None)
    copies = quant_linear._copies(asked, 4, 3)
    assert all(copy.scratch is copies[0].scratch for copy in copies)
    weights = {copy.stored["weight_panels"].data_ptr() for copy in copies}
    assert len(weights) == 3 and STORED["weight_panels"].data_ptr() not in weights
    assert quant_linear._choose(asked) == Choice("own", us=2.0, cublas_us=3.0)
    assert all(torch.equal(STORED[name], tensor) for name, tensor in before.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_quicker_way_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    choices.table.cache_clear()
    x = torch.randn(3, 1024, device="cuda").bfloat16()
    rows, form = WeightFormat.parse("int4"), WeightFormat("int4", "panels", (1, 64))
    stored = in_panels(rows, quantise(torch.randn(512, 1024, device="cuda").bfloat16(), rows))
    out = torch.empty(3, 512, device="cuda").bfloat16()
    before = {name: tensor.clone() for name, tensor in stored.items()}
    call = QuantLinear(x, form, stored, out, residual=None, activation="relu")
    assert call.choice.us and call.choice.cublas_us
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())
    measured = choices.table(0).won()  # with the product of the weight made whole
    assert QuantLinear(x, form, stored, out, activation="relu").choice == call.choice
    assert choices.table(0).won() == measured
    choices.table.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["int4-zp", "int8"])
def test_both_ways_in_a_graph(fused: bool, name: str) -> None:
    """With a norm ahead that lets it begin early, and in memory of the caller's."""
    rows = WeightFormat.parse(name)
    form = WeightFormat(rows.kind, "panels", rows.block, rows.zero_points)
    stored = in_panels(rows, quantise(torch.randn(512, 1024, device="cuda").bfloat16(), rows))
    hidden, x = torch.randn(2, 5, 1024, device="cuda").bfloat16()
    out, scratch = hidden.new_empty(5, 512), hidden.new_empty(512, 1024)
    weight = dequantise(form, stored, (512, 1024), torch.bfloat16)
    ahead = ResidualNorm(residual=hidden, norm=Norm("rms", None, None, 1e-6), out=x)
    workspace = Workspace("cuda")
    call = QuantLinear(
        x, form, stored, out, fused=fused, early=True, scratch=scratch, workspace=workspace
    )
    ahead.launch(current_stream(x.device))
    call.launch(current_stream(x.device))
    torch.cuda.synchronize()
    wanted, normed = out.clone(), x.clone()
    exact = functional.linear(normed.double(), weight.double())
    assert (wanted.double() - exact).abs().max() <= 2.0**-7 * exact.abs().max()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in (ahead, call):
            one.launch(current_stream(x.device))
    for _ in range(5):
        for tensor in (x, out, scratch):
            tensor.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
