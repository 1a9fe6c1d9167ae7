"""int8 products: rows to int8, sums back to numbers, and the whole against exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import (
    DTYPES,
    assert_accurate,
    assert_untouched,
    poisoned,
    random,
    random_norm,
    widened,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, launch

from offload.kernels import Norm, int8_linear, reference
from offload.kernels.int8_linear import Int8Linear, Int8Rows, why_not_int8
from offload.kernels.quantize import quantise
from offload.kernels.quantize_rows import QuantizeRows
from offload.kernels.scale_sums import ScaleSums
from offload.kernels.weight_format import WeightFormat

W8A8 = WeightFormat.parse("w8a8")
ONE_SCALE = WeightFormat("int8", "plain", (0, 0), inputs="int8")
CODE_POISON = -77


def int8_places(rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes full of one value, with as much behind them, and scales full of NaN."""
    codes = torch.full((rows * width + 64,), CODE_POISON, dtype=torch.int8, device=device)
    return codes, torch.full((rows + 8,), math.nan, device=device)


@st.composite
def row_settings(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    branch = draw(flag)
    return {
        "rows": draw(st.sampled_from([0, 1, 2, 3, 9, 17])),
        "width": draw(st.sampled_from([8, 64, 1536, 4096]) | st.integers(1, 200)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "offset": draw(st.sampled_from([0, 0, 1])),
        "branch": branch,
        "bias": branch and draw(flag),
        "branch_norm": draw(st.sampled_from([None, "rms"])) if branch else None,
        "norm": draw(st.sampled_from([None, "rms", "layer", "plain"])),
        "sum": draw(st.sampled_from(["", "apart", "in place"])),
        "scale": draw(st.sampled_from([1.0, 1e-3, 50.0])),
        "seed": draw(st.integers(0, 99)),
    }


def run_rows(machine: str, s: dict[str, Any]) -> None:
    torch.manual_seed(s["seed"])
    device, rows, width = device_of(machine), s["rows"], s["width"]
    like = {"dtype": s["dtype"], "device": device, "offset": s["offset"]}
    residual = random(rows, width, scale=s["scale"], **like)
    branch = random(rows, width, scale=s["scale"], **like) if s["branch"] else None
    bias = random(width, **like) if s["bias"] else None
    norms = {n: random_norm(s[n], width, eps=1e-5, **like) for n in ("branch_norm", "norm")}
    given = {"branch": branch, "bias": bias, "branch_norm": norms["branch_norm"]}
    exact_sum = reference.add_residual(residual=residual.double(), **widened(given))
    exact = reference.normalise(exact_sum, widened(norms["norm"]))
    peer_sum = reference.add_residual(residual=residual, **given)
    peer = reference.normalise(peer_sum, norms["norm"])
    codes, scales = int8_places(rows, width, device)
    sum_out = buffer = None
    if s["sum"] == "apart":
        sum_out, buffer = poisoned(rows, width, **like)
    elif s["sum"]:
        sum_out = residual
    call = QuantizeRows(
        residual, codes[: rows * width].view(rows, width), scales[:rows],
        **given, norm=norms["norm"], sum_out=sum_out,
    )  # fmt: skip
    launch(call, machine)
    assert (codes[rows * width :] == CODE_POISON).all()
    assert torch.isnan(scales[rows:]).all()
    if sum_out is not None:
        assert_accurate(sum_out, peer_sum.to(s["dtype"]), exact_sum, f"sum {s}")
        if buffer is not None:
            assert_untouched(sum_out, buffer)
    if not rows:
        return
    found = codes[: rows * width].view(rows, width).double()
    most = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    # What stands in registers is a float32 result; rounding to codes adds half a step at most.
    float_error = (peer.double() - exact).abs().max().item() * 2
    float_error += 8 * torch.finfo(torch.float32).eps * most.max().item()
    step = scales[:rows].double().unsqueeze(-1)
    assert ((step - most / 127).abs() <= float_error / 127 + 1e-7 * most / 127).all(), s
    error = (found * step - exact).abs()
    assert (error <= step * (0.5 + 1e-5) + float_error).all(), s
    assert found.abs().amax() <= 127
    assert (found.abs().amax(-1) == 127).all() or most.min() < 1e-29


@pytest.mark.parametrize("machine", MACHINES)
@hypothesis_settings(max_examples=60)
@given(s=row_settings())
def test_rows_of_any_kind(machine: str, s: dict[str, Any]) -> None:
    run_rows(machine, s)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (20480, torch.bfloat16),
        (32768, torch.float16),
        (33000, torch.bfloat16),
        (9001, torch.float32),
    ],
)
def test_wide_rows(machine: str, width: int, dtype: torch.dtype) -> None:
    """As many packs a thread as there may be, and rows that are read twice."""
    s = {"rows": 9, "width": width, "dtype": dtype, "offset": 0, "branch": False, "bias": False}
    s |= {"branch_norm": None, "norm": None, "sum": "", "scale": 1.0, "seed": 3}
    run_rows(machine, s)


@pytest.mark.parametrize("machine", MACHINES[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_codes_as_the_reference(machine: str, dtype: torch.dtype) -> None:
    """Bit for bit, ties included: a product of two float32 is exact in float64."""
    torch.manual_seed(1)
    x = random(33, 256, dtype=dtype, device=device_of(machine))
    x[0] = 0
    x[1] = torch.arange(256) - 128 + 0.5  # 127.5 halves: ties
    x[2] *= 1e-36 if dtype != torch.float16 else 1e-7
    codes, scales = int8_places(33, 256, x.device.type)
    launch(QuantizeRows(x, codes[: 33 * 256].view(33, 256), scales[:33]), machine)
    wanted, steps = reference.int8_rows(x.cpu().float())
    for found, of_rows in (
        (codes[: 33 * 256].view(33, 256), scales[:33]),
        reference.int8_rows(x.float()),  # where it lies
    ):
        assert torch.equal(found.cpu(), wanted)
        assert torch.equal(of_rows.cpu(), steps)
    assert not codes[:256].any() and torch.isfinite(scales[0])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("width", [64, 33000])
def test_infinity_and_not_a_number(machine: str, bad: float, width: int) -> None:
    x = torch.ones(3, width, dtype=torch.bfloat16, device=device_of(machine))
    x[1, 17] = bad
    codes, scales = int8_places(3, width, x.device.type)
    launch(QuantizeRows(x, codes[: 3 * width].view(3, width), scales[:3]), machine)
    assert torch.isnan(scales[:3]).tolist() == [False, True, False]


@st.composite
def sum_settings(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    return {
        "rows": draw(st.sampled_from([0, 1, 3, 35])),
        "width": draw(st.sampled_from([8, 64, 1536]) | st.integers(1, 200)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "scale_dtype": draw(st.sampled_from(DTYPES)),
        "one": draw(flag),
        "bias": draw(flag),
        "residual": draw(st.sampled_from(["", "apart", "in place"])),
        "activation": draw(st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"])),
        "gated": draw(flag),
        "offset": draw(st.sampled_from([0, 0, 1])),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("machine", MACHINES)
@hypothesis_settings(max_examples=80)
@given(s=sum_settings())
def test_sums_of_any_kind(machine: str, s: dict[str, Any]) -> None:
    torch.manual_seed(s["seed"])
    device, rows = device_of(machine), s["rows"]
    like = {"dtype": s["dtype"], "device": device, "offset": s["offset"]}
    columns = s["width"] * (2 if s["gated"] else 1)
    sums = torch.randint(-(1 << 24), 1 << 24, (rows, columns), dtype=torch.int32, device=device)
    row_scales = torch.rand(rows, device=device) * 0.01
    scales = (torch.rand(1 if s["one"] else columns, device=device) * 1e-4).to(s["scale_dtype"])
    bias = random(columns, **like) if s["bias"] else None
    residual = random(rows, s["width"], **like) if s["residual"] else None
    after = {"bias": bias, "residual": residual}
    kind = {"activation": s["activation"], "gated": s["gated"]}
    exact = reference.scale_sums(sums, row_scales.double(), scales, **widened(after), **kind)
    peer = reference.scale_sums(sums, row_scales, scales, **after, **kind).to(s["dtype"])
    out, buffer = poisoned(rows, s["width"], **like)
    if s["residual"] == "in place":
        out = residual
    launch(ScaleSums(sums, row_scales, scales, out, **after, **kind), machine)
    assert_accurate(out, peer, exact, str(s))
    if s["residual"] != "in place":
        assert_untouched(out, buffer)


def exactly(
    x: torch.Tensor, form: WeightFormat, stored: dict[str, torch.Tensor], **after: Any
) -> torch.Tensor:
    """The product in float64, which has all its sums exactly."""
    codes, steps = reference.int8_rows(x.float())
    sums = codes.double() @ stored["weight"].double().t()
    return reference.scale_sums(sums, steps.double(), stored["weight_scale"], **widened(after))


HERE = [
    pytest.param("reference"),
    MACHINES[2],  # torch multiplies, so there is nothing to run on the host alone
]


@pytest.mark.parametrize("machine", HERE)
@pytest.mark.parametrize("form", [W8A8, ONE_SCALE], ids=["rows", "one"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 17, 70])
def test_products(
    machine: str,
    form: WeightFormat,
    dtype: torch.dtype,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few rows and of several pieces, with what comes behind them."""
    monkeypatch.setattr(int8_linear, "LEAST_ROWS", 32)
    monkeypatch.setattr(int8_linear, "SUMS", 1)
    torch.manual_seed(count)
    device = device_of(machine)
    x = random(count, 72, dtype=dtype, device=device)
    weight = random(128, 72, dtype=dtype, device=device, scale=0.1)
    stored = quantise(weight, form)
    bias = random(128, dtype=dtype, device=device)
    residual = random(count, 64, dtype=dtype, device=device)
    after: dict[str, Any] = {
        "bias": bias,
        "residual": residual,
        "activation": "silu",
        "gated": True,
    }
    out, buffer = poisoned(count, 64, dtype=dtype, device=device)
    run(Int8Linear(x, form, stored, out, **after), machine)
    codes, steps = reference.int8_rows(x.float())
    sums = (codes.double() @ stored["weight"].double().t()).to(torch.int32)
    peer = reference.scale_sums(sums, steps, stored["weight_scale"], **after).to(dtype)
    assert_accurate(out, peer, exactly(x, form, stored, **after))
    assert_untouched(out, buffer)
    # And near what is not rounded to int8 at all: a code is off by half a step at most.
    plain = reference.linear(
        x.double(), stored["weight"].double() * stored["weight_scale"].double()
    )
    alone = torch.empty(count, 128, dtype=dtype, device=device)
    run(Int8Linear(x, form, stored, alone), machine)
    size = (stored["weight"].double() * stored["weight_scale"].double()).abs().sum(-1)
    most = x.double().abs().amax(-1, keepdim=True)
    eps = torch.finfo(dtype).eps
    allowed = (most / 254) * size * 1.001 + eps * plain.abs() + eps
    assert ((alone.double() - plain).abs() <= allowed).all()


@pytest.mark.parametrize("machine", HERE)
def test_rows_made_before(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what lies ahead of a product; a part of them, too."""
    monkeypatch.setattr(int8_linear, "LEAST_ROWS", 32)
    monkeypatch.setattr(int8_linear, "SUMS", 1)
    torch.manual_seed(0)
    device, count = device_of(machine), 100
    x = random(count, 64, dtype=torch.float16, device=device)
    norm = Norm("rms", random(64, dtype=torch.float16, device=device), None, 1e-5)
    stored = quantise(random(48, 64, dtype=torch.float16, device=device), W8A8)
    rows = Int8Rows.within(
        torch.empty(Int8Rows.nbytes(count, 64), dtype=torch.uint8, device=device), count, 64
    )
    run(rows.made_of(x, norm=norm), machine)
    out = torch.full((count, 48), math.nan, dtype=torch.float16, device=device)
    for part in (slice(0, 64), slice(64, 128)):
        run(Int8Linear(rows[part], W8A8, stored, out[part]), machine)
    normed = reference.normalise(x.float(), norm)
    wanted = exactly(normed, W8A8, stored)
    # A norm in another order moves single codes by one.
    step = normed.abs().amax(-1, keepdim=True).double() / 127
    weight = stored["weight"].double() * stored["weight_scale"].double()
    allowed = 1e-3 * wanted.abs() + 2 * step * weight.abs().amax(-1)
    assert ((out.double() - wanted).abs() <= allowed).all()


def run(call: Any, machine: str) -> None:
    if machine == "cuda":
        from offload.kernels.call import current_stream

        call.launch(current_stream(torch.device("cuda")))
        torch.cuda.synchronize()
    else:
        call.launch()


def test_the_largest_sums_fit() -> None:
    """Of the deepest weight, all codes the largest there are."""
    depth = int8_linear.DEEPEST // 8 * 8
    stored = {"weight": torch.full((8, depth), -128, dtype=torch.int8)}
    stored["weight_scale"] = torch.ones(8, 1)
    x = torch.ones(1, depth)
    out = torch.empty(1, 8)
    Int8Linear(x, W8A8, stored, out).launch()
    assert torch.allclose(out, torch.full((1, 8), -128.0 * depth))
    assert "do not fit int32" in why_not_int8(W8A8, torch.float32, 8, depth + 8)


STORED = quantise(torch.ones(16, 32), W8A8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "input": ({"input": 3}, "input must be a tensor, not int"),
    "format": ({"form": WeightFormat.parse("int8-channel")}, "does not ask for int8 inputs"),
    "dtype": (
        {"input": torch.zeros(2, 32).double(), "out": torch.zeros(2, 16).double()},
        "float64 is none of",
    ),
    "depth": ({"input": torch.zeros(2, 40)}, r"weight is torch.int8 \[16, 32\], but"),
    "eight": ({"out": torch.zeros(2, 12)}, r"\[12, 32\] are no multiples of 8"),
    "rows": ({"out": torch.zeros(3, 16)}, r"out must have shape \[2, 16\]"),
    "missing": ({"stored": {"weight": STORED["weight"]}}, "weight_scale is missing"),
    "strided": ({"input": torch.zeros(32, 2).t()}, "input must be contiguous"),
    "bias": ({"bias": torch.zeros(3)}, r"bias must have shape \[16\]"),
    "activation": ({"activation": "tanh"}, "activation must be one of"),
    "device": ({"out": torch.zeros(2, 16, device="meta")}, "out must be on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    good: dict[str, Any] = {
        "input": torch.zeros(2, 32), "form": W8A8, "stored": STORED, "out": torch.zeros(2, 16)
    }  # fmt: skip
    Int8Linear(**good)
    with pytest.raises((ValueError, TypeError), match=message):
        Int8Linear(**(good | changes))


def test_formats() -> None:
    assert WeightFormat.parse(W8A8.name) == W8A8
    assert ONE_SCALE.name == "w8a8-tensor"
    # A layout that is not written has a name, too.
    assert WeightFormat("int8", "plain", (0, 0), zero_points=True).name == "int8-tensor-zp (plain)"
    for wrong in (("int8", "packed", (1, 0)), ("int8", "plain", (1, 64)), ("fp8", "plain", (1, 0))):
        with pytest.raises(ValueError, match="inputs in int8 are multiplied with int8 weights"):
            WeightFormat(*wrong, inputs="int8")  # type: ignore[arg-type]
