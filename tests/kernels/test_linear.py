"""A product on whichever kernel is quickest: all ways agree, and the table decides."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import DTYPES
from machines import needs_gpu
from products import allowed_error, exact_product, make

from offload.kernels import Norm, cublas_product, linear, reference, tuning
from offload.kernels.call import current_stream
from offload.kernels.choices import Choice, Table
from offload.kernels.gemm import SkinnyGemm
from offload.kernels.linear import Linear
from offload.kernels.workspace import Workspace

GPU = pytest.param("cuda", marks=needs_gpu)
FUSED = [
    {"bias": bias, "residual": residual, "norm": norm, "activation": activation, "gated": gated}
    for bias, residual, norm, (activation, gated) in itertools.product(
        (False, True),
        (None, "apart", "in place"),
        (None, "layer"),
        ((None, False), ("gelu", False), ("silu", True), (None, True)),
    )
]


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    table = Table("a GPU")
    monkeypatch.setattr(tuning, "table", lambda device: table)
    return table


def transposed(a: dict[str, Any]) -> dict[str, Any]:
    return {**a, "weight": a["weight"].T.contiguous(), "transposed": True}


def result(call: Any, a: dict[str, Any], before: torch.Tensor) -> torch.Tensor:
    a["out"].copy_(before)
    call.launch(current_stream(a["out"].device))
    return a["out"].clone()


def assert_close(found: torch.Tensor, a: dict[str, Any], exact: torch.Tensor) -> None:
    """As PyTorch's own, which rounds as often."""
    error = (found.double() - exact).abs().max().item()
    assert error <= allowed_error(a, exact)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_on_a_cpu_it_is_the_reference(rows: int, is_transposed: bool) -> None:
    a = make(
        "reference",
        dtype=torch.bfloat16,
        rows=rows,
        depth=24,
        outputs=10,
        bias=True,
        norm="rms",
        activation="silu",
        gated=True,
        residual="apart",
    )
    exact = exact_product(a)
    call = Linear(**(transposed(a) if is_transposed else a))
    assert call.choice is None
    assert_close(result(call, a, a["out"].clone()), a, exact)


@pytest.mark.parametrize("machine", ["cpu", GPU])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("fused", FUSED)
def test_kernels_around_torchs_product(
    machine: str, is_transposed: bool, fused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_product, "GRAIN", 16)
    where = "cuda" if machine == "cuda" else "reference"
    ways = {33: (Choice("cublas"),), 3: (Choice("cublas"),)}
    ways[35] = (Choice("rows", splits=2), Choice("columns", splits=3))
    for (dtype, rows, outputs, pad), choice in (
        (shape, choice)
        for shape in (
            (torch.bfloat16, 33, 24, 0),
            (torch.float32, 3, 24, 8),
            (torch.bfloat16, 35, 37, 8),
        )
        for choice in ways[shape[1]]
    ):
        a = make(where, dtype=dtype, rows=rows, depth=40, outputs=outputs, pad=pad, **fused)
        exact, before = exact_product(a), a["out"].clone()
        asked = transposed(a) if is_transposed else a
        if machine == "cuda":
            call: Any = Linear(**asked, choice=choice)
        else:
            # What torch.mm and the kernels' references make of the same steps.
            call = Linear(**asked)
            call._launches = linear._launches(call._arguments, choice, Workspace("cpu"))
        found = result(call, a, before)
        # PyTorch's own product of a transposed weight adds in another order.
        peer = {**a, "weight": asked["weight"].T} if is_transposed else a
        assert_close(found, peer, exact)
        assert torch.equal(found, result(call, a, before))


@pytest.mark.parametrize("name", ["own", "apart"])
def test_only_cublas_takes_many_rows(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = linear._Arguments(
        torch.randn(17, 8),
        torch.randn(4, 8),
        torch.randn(17, 4),
        None,
        None,
        None,
        None,
        False,
        False,
        False,
    )
    assert linear.choose(asked) == Choice("cublas")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_that_is_measured_computes_the_same_product(
    dtype: torch.dtype, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors of the measurement's own, of as many rows as the table tells apart."""
    tried: list[int] = []

    def time(products: Any, device: torch.device) -> float:
        for launches in products:
            for launch in launches:
                launch(0)
        tried.append(len(products))
        return 1.0

    monkeypatch.setattr(tuning, "rotation", lambda nbytes, device: 3)
    monkeypatch.setattr(tuning, "time_products", time)
    made: list[Any] = []
    like = linear._like
    monkeypatch.setattr(linear, "_like", lambda *given: made.append(like(*given)) or made[-1])
    given = (torch.full((3, 8), math.nan, dtype=dtype) for _ in range(3))
    input, out, residual = given
    weight, norm = torch.full((8, 8), math.nan, dtype=dtype), Norm("rms", torch.ones(8).to(dtype))
    asked = linear._Arguments(input, weight, out, None, residual, norm, "gelu", False, False, False)
    chosen = linear.choose(asked)
    assert table.won() == (int(chosen.way != "cublas"), 1)
    assert set(tried) == {3} and len(made) == 3
    assert all(copy.input.shape == (4, 8) and copy.out.isfinite().all() for copy in made)


def test_bad_arguments_are_named() -> None:
    x, w, out = torch.randn(40, 16), torch.randn(16, 6), torch.zeros(40, 6)
    Linear(x, w, out, transposed=True).launch()
    with pytest.raises(ValueError, match=r"linear: weight must have shape \[6, 16\]"):
        Linear(x, w, out)
    with pytest.raises(ValueError, match=r"linear: weight must have shape \[16, 12\]"):
        Linear(x, w, out, transposed=True, gated=True)
    with pytest.raises(ValueError, match="activation must be one of"):
        Linear(x, w, out, transposed=True, activation="tanh")


def test_no_rows_at_all() -> None:
    out = torch.empty(0, 6)
    Linear(torch.empty(0, 16), torch.randn(6, 16), out, norm=Norm("rms", None)).launch()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("way", ["own", "apart", "cublas"])
    def test_every_way_gives_the_product(self, way: Any, dtype: torch.dtype) -> None:
        for rows, fused in itertools.product((1, 5, 16), FUSED):
            a = make("cuda", dtype=dtype, rows=rows, depth=520, outputs=72, **fused)
            exact, before = exact_product(a), a["out"].clone()
            call = Linear(**a, choice=Choice(way))
            assert_close(result(call, a, before), a, exact)

    def test_a_shape_is_measured_once(self, table: Table) -> None:
        a = make(
            "cuda",
            dtype=torch.bfloat16,
            rows=3,
            depth=1024,
            outputs=512,
            norm="rms",
            activation="silu",
            gated=True,
        )
        exact = exact_product(a)
        weight = a["weight"].clone()
        call = Linear(**a)
        assert table.won()[1] == 1
        assert torch.equal(weight, a["weight"]), "measuring wrote into the given weight"
        assert call.choice is not None and call.choice.us and call.choice.cublas_us
        assert call.choice.us <= call.choice.cublas_us
        assert_close(result(call, a, a["out"].clone()), a, exact)
        assert Linear(**a).choice == call.choice
        assert table.won()[1] == 1

    def test_nothing_is_measured_while_a_graph_is_captured(self, table: Table) -> None:
        a = make("cuda", dtype=torch.float16, rows=2, depth=256, outputs=128)
        exact = exact_product(a)
        workspace = Workspace("cuda")
        SkinnyGemm(**a, workspace=workspace)  # makes room
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call = Linear(**a, workspace=workspace)
            call.launch(current_stream(a["out"].device))
        assert call.choice == Choice("own") and table.won() == (0, 0)
        a["out"].fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(a["out"], a, exact)

    def test_it_runs_on_the_stream_that_it_is_given(self) -> None:
        x = torch.randn(64, 4096, device="cuda")
        w = torch.randn(4096, 4096, device="cuda")
        out, sums = torch.empty(64, 4096, device="cuda"), torch.empty(64, 4096, device="cuda")
        call = Linear(x, w, out, activation="relu")
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.fill_(1.0)
        call.launch(stream.cuda_stream)  # behind both, though another stream is current
        with torch.cuda.stream(stream):
            sums.copy_(out)
        torch.cuda.synchronize()
        wanted = reference.linear(torch.ones_like(x), w, activation="relu")
        torch.testing.assert_close(sums, wanted, rtol=1e-3, atol=1e-2)
