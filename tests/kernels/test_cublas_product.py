"""A product by torch's library: its pieces make the whole, and a measurement picks the way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from machines import device_of, needs_gpu
from products import allowed_error, exact_product, make

from offload.kernels import cublas_product, tuning
from offload.kernels.call import current_stream
from offload.kernels.choices import Choice, Table
from offload.kernels.cublas_product import GRAIN, WHOLE, CublasProduct, cut, ways

MACHINES = ["reference", pytest.param("cuda", marks=needs_gpu)]
WAYS = [WHOLE] + [Choice(way, splits=n) for way in ("rows", "columns") for n in (2, 3)]
TIMES: dict[Choice, float] = {WHOLE: 8000.0}


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    table = Table("a GPU")
    monkeypatch.setattr(tuning, "table", lambda device: table)
    return table


class Clock:
    """Stands for the GPU's: runs what it is to time, and says what it is told to."""

    def __init__(self, times: dict[Choice, float], most: int = 99) -> None:
        self.times, self.most, self.measured = times, most, 0

    def __call__(self, calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
        self.measured += 1
        for call in calls:
            call()
        tried = ways(600, 600)
        assert len(calls) == len(tried) == 6
        return [self.times.get(way, 9000.0) for way in tried][: self.most]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large on a GPU, at a size for a test."""
    monkeypatch.setattr(cublas_product, "measurable", lambda x: x.shape[0] >= 512)
    monkeypatch.setattr(cublas_product, "LEAST_PIECE", 150)


def product(rows: int, depth: int, outputs: int, **more: Any) -> CublasProduct:
    x, w = torch.randn(rows, depth), torch.randn(outputs, depth)
    return CublasProduct(x, w.t(), torch.full((rows, outputs), math.nan), **more)


def right(call: CublasProduct) -> bool:
    """Whether `out` holds the product, within what the order of `depth` additions may cost."""
    x, w = call._x.double(), call._w.double()
    bound = x.shape[1] * torch.finfo(torch.float32).eps * (x.abs() @ w.abs())
    return bool(((call._out.double() - x @ w).abs() <= bound).all())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", WAYS, ids=lambda c: f"{c.way}{c.splits}")
def test_pieces_make_the_whole(
    machine: str, dtype: torch.dtype, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_product, "GRAIN", 16)
    for (rows, outputs, added), is_transposed in itertools.product(
        ((5, 3, "bias"), (33, 21, "out"), (44, 49, "bias"), (44, 49, None)), (False, True)
    ):
        a = make(
            machine,
            dtype=dtype,
            rows=rows,
            depth=72,
            outputs=outputs,
            bias=added == "bias",
            residual="in place" if added == "out" else None,
            pad=8,
        )
        exact, out = exact_product(a), a["out"]
        w = a["weight"].T.contiguous() if is_transposed else a["weight"].t()
        term = out if added == "out" else a["bias"]
        CublasProduct(a["input"], w, out, term, choice).launch(current_stream(out.device))
        error = (out.double() - exact).abs().max().item()
        # PyTorch's own product of a transposed weight adds in another order.
        assert error <= allowed_error({**a, "weight": w.t()}, exact)
        around = out._base
        assert around is not None and around[0].isnan().all() and around[-1].isnan().all()
        assert around[:, outputs:].isnan().all()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("choice", WAYS, ids=lambda c: f"{c.way}{c.splits}")
def test_no_piece_is_copied(choice: Choice, is_transposed: bool) -> None:
    x, w, out = torch.randn(600, 64), torch.randn(530, 64), torch.empty(600, 530)
    call = CublasProduct(x, w.t().contiguous() if is_transposed else w.t(), out, out, choice)
    plain = CublasProduct(x, w.t().contiguous() if is_transposed else w.t(), out, None, choice)
    for each in (call, plain):
        each.launch()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            each.launch()
        events = profile.key_averages()
        assert sum(event.count for event in events if event.key in ("aten::mm", "aten::addmm"))
        assert not [e.key for e in events if e.self_cpu_memory_usage > 0 or e.key == "aten::copy_"]


@given(size=st.integers(1, 40_000), count=st.integers(1, 8))
def test_cuts_are_even_and_leave_nothing_out(size: int, count: int) -> None:
    parts = cut(size, count)
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == size and len(parts) <= count
    lengths = [part.stop - part.start for part in parts]
    assert all(n == lengths[0] and n % GRAIN == 0 for n in lengths[:-1])
    assert 0 < lengths[-1] <= lengths[0] < size / count + GRAIN


def test_the_ways_that_are_tried() -> None:
    def named(rows: int, outputs: int) -> list[str]:
        return [f"{way.way}{way.splits or ''}" for way in ways(rows, outputs)]

    qkv = named(32768, 15360)
    assert qkv == [
        "whole",
        "rows2",
        "rows4",
        "rows8",
        "columns2",
        "columns3",
        "columns4",
        "columns6",
    ]
    assert named(8192, 5120) == ["whole", "rows2", "rows4", "columns2"]
    assert named(2048, 4000) == ["whole"]


@pytest.mark.usefixtures("small")
def test_the_quickest_is_measured_once_and_kept(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Choice("columns", splits=3)
    clock = Clock({WHOLE: 8000.0, best: 7460.0, Choice("rows", splits=4): 7700.0})
    monkeypatch.setattr(tuning, "time_turns", clock)
    call = product(600, 24, 600)
    assert call.choice is None and not clock.measured, "making a call writes nothing"
    assert call._out.isnan().all()
    call.launch()
    assert call.choice == Choice("columns", splits=3, us=7460.0, cublas_us=8000.0)
    assert right(call) and clock.measured == 1 and table.cut() == (1, 1)
    call._out.fill_(math.nan)
    call.launch()
    assert right(call)
    again = product(1000, 24, 600)  # the same up to the next power of two
    again.launch()
    assert again.choice == call.choice and right(again) and clock.measured == 1
    # In the next process, too.
    monkeypatch.setattr(tuning, "table", lambda device: Table("a GPU"))
    later = product(600, 24, 600)
    later.launch()
    assert later.choice == call.choice and clock.measured == 1
    for other in (
        product(1100, 24, 600),
        product(600, 32, 600),
        product(600, 24, 616),
        CublasProduct(call._x, call._w.contiguous(), call._out),
        CublasProduct(call._x, call._w, call._out, torch.zeros(600)),
    ):
        before = clock.measured
        other.launch()
        assert clock.measured == before + 1 and right(other)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("most", [1, 99])
def test_what_gains_nothing_is_not_taken(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    little = {WHOLE: 8000.0, Choice("columns", splits=2): 7950.0}
    if most == 1:  # there was time for the whole only
        little[Choice("columns", splits=2)] = 1.0
    monkeypatch.setattr(tuning, "time_turns", Clock(little, most))
    call = product(600, 24, 600)
    call.launch()
    assert call.choice is not None and call.choice.way == "whole" and right(call)


@pytest.mark.usefixtures("small")
def test_what_is_not_measured(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Choice("rows", splits=2)
    clock = Clock({WHOLE: 8000.0, best: 1000.0})
    monkeypatch.setattr(tuning, "time_turns", clock)
    few = product(511, 24, 600)
    few.launch()
    assert few.choice == WHOLE and right(few)
    sums = torch.zeros(600, 600)
    adds = CublasProduct(torch.randn(600, 24), torch.randn(24, 600), sums, sums)
    adds.launch()  # more than once would add more than once
    assert adds.choice == WHOLE and right(adds)

    call = product(600, 24, 600)
    with monkeypatch.context() as capture:
        capture.setattr(tuning, "captured", lambda device: True)
        call.launch()
        assert call.choice is None and right(call) and clock.measured == 0
    call.launch()  # what was captured is not what is done for good
    assert call.choice is not None and call.choice.way == "rows" and clock.measured == 1
    with monkeypatch.context() as capture:
        capture.setattr(tuning, "captured", lambda device: True)
        cuts: list[int] = []
        capture.setattr(cublas_product, "cut", lambda *a: cuts.append(a[1]) or cut(*a))
        later = product(600, 24, 600)
        later.launch()
        assert cuts == [2] and right(later)


@pytest.mark.usefixtures("small")
def test_no_room_to_measure(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> list[float]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(tuning, "time_turns", full)
    call = product(600, 24, 600)
    call.launch()
    assert call.choice == WHOLE and right(call) and table.cut() == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_shape_is_measured_once_and_repeats(self, dtype: torch.dtype, table: Table) -> None:
        x = torch.randn(8200, 512, device="cuda").to(dtype)
        w = torch.randn(6200, 512, device="cuda").to(dtype)
        out = torch.empty(8200, 6200, device="cuda", dtype=dtype)
        call = CublasProduct(x, w.t(), out)
        assert call.choice is None
        call.launch(current_stream(x.device))
        chosen, first = call.choice, out.clone()
        assert chosen is not None and chosen.us and chosen.cublas_us and table.cut()[1] == 1
        assert chosen.us <= chosen.cublas_us
        again = CublasProduct(x, w.t(), out.fill_(math.nan))
        again.launch(current_stream(x.device))
        assert again.choice == chosen and torch.equal(out, first)

    @pytest.mark.parametrize("is_transposed", [False, True])
    @pytest.mark.parametrize("choice", WAYS, ids=lambda c: f"{c.way}{c.splits}")
    def test_no_piece_is_copied(self, choice: Choice, is_transposed: bool) -> None:
        device = device_of("cuda")
        x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
        w = torch.randn(4097, 1024, device=device, dtype=torch.bfloat16).t()
        w = w.contiguous() if is_transposed else w
        call = CublasProduct(x, w, x.new_empty(4096, 4097), None, choice)
        call.launch(current_stream(x.device))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call.launch(current_stream(x.device))
        assert torch.cuda.max_memory_allocated() == before
