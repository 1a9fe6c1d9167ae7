"""Residual sums and norms: every combination of inputs, odd widths, accuracy, and bad arguments."""

from __future__ import annotations

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
from torch.nn import functional

from offload.kernels import Norm, ResidualNorm, reference

WIDTHS = (1, 2, 7, 8, 33, 64, 136, 576, 1000, 1024, 2056, 4096, 5120)
NORMS = (None, "rms", "layer", "plain")


def torch_norm(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """The norm as PyTorch does it, in x's own dtype."""
    if norm is None:
        return x
    weight = norm.weight
    if weight is not None and norm.weight_offset:
        weight = weight + norm.weight_offset
    if norm.kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.eps)
    return functional.rms_norm(x, x.shape[-1:], weight, norm.eps)


def torch_sum(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    branch_norm: Norm | None = None,
) -> torch.Tensor:
    total = residual
    for x, b, norm in ((branch, bias, branch_norm), (branch2, bias2, None)):
        if x is not None:
            x = torch_norm(x if b is None else x + b, norm)
            total = x if total is None else total + x
    assert total is not None
    return total


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    inputs = draw(st.sampled_from(["r", "b", "2", "rb", "r2", "b2", "rb2"]))
    norms = {name: draw(st.sampled_from(NORMS)) for name in ("norm", "norm2")}
    return {
        "rows": draw(st.sampled_from([0, 1, 2, 3, 5, 9, 11, 35])),
        "width": draw(st.sampled_from(WIDTHS) | st.integers(1, 300)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "inputs": inputs,
        "bias": draw(flag),
        "bias2": draw(flag),
        "branch_norm": draw(st.sampled_from(NORMS)) if "b" in inputs else None,
        **norms,
        "keep": draw(flag) or not any(norms.values()),
        "offset": draw(st.sampled_from([0, 0, 0, 1])),
        "mean": draw(st.sampled_from([0.0, 3.0])),
        "weight_offset": draw(st.sampled_from([0.0, 1.0])),
        "packs": draw(st.sampled_from([0, 0, 1, 2, 3, 4])),
        "in_place": draw(flag),
        "seed": draw(st.integers(0, 99)),
    }


def run(machine: str, s: dict[str, Any]) -> None:
    """One call with these settings, compared with float64 and with PyTorch."""
    torch.manual_seed(s["seed"])
    device, dtype, shape = device_of(machine), s["dtype"], (s["rows"], s["width"])
    like = {"dtype": dtype, "device": device, "offset": s["offset"]}
    tensors: dict[str, Any] = {}
    for letter, name, bias in (("b", "branch", "bias"), ("2", "branch2", "bias2")):
        if letter in s["inputs"]:
            tensors[name] = random(*shape, mean=s["mean"], **like)
            if s[bias]:
                tensors[bias] = random(s["width"], **like)
    if "r" in s["inputs"]:
        tensors["residual"] = random(*shape, scale=2.0, **like)
    eps = {"eps": 1e-5, "weight_offset": s["weight_offset"]}
    norms = {
        name: random_norm(s[name], s["width"], **like, **eps)
        for name in ("branch_norm", "norm", "norm2")
    }
    inputs = {**tensors, "branch_norm": norms["branch_norm"]}
    exact_sum = reference.add_residual(**widened(inputs))
    peer_sum = torch_sum(**inputs)
    expected = {
        "sum_out": (peer_sum, exact_sum),
        "out": (
            torch_norm(peer_sum, norms["norm"]),
            reference.normalise(exact_sum, widened(norms["norm"])),
        ),
        "out2": (
            torch_norm(peer_sum, norms["norm2"]),
            reference.normalise(exact_sum, widened(norms["norm2"])),
        ),
    }
    wanted = {"sum_out": s["keep"], "out": norms["norm"], "out2": norms["norm2"]}
    outputs = {name: poisoned(*shape, **like) for name in wanted if wanted[name]}
    if s["in_place"] and "sum_out" in outputs and "residual" in tensors:
        outputs["sum_out"] = (tensors["residual"],) * 2
    call = ResidualNorm(**inputs, norm=norms["norm"], norm2=norms["norm2"], **{
        name: output for name, (output, _) in outputs.items()
    })  # fmt: skip
    call.arguments.packs_per_thread = s["packs"]
    launch(call, machine)
    for name, (output, buffer) in outputs.items():
        peer, exact = expected[name]
        assert_accurate(output, peer, exact, f"{name} of {s}")
        if buffer is not output:
            assert_untouched(output, buffer)


@pytest.mark.parametrize("machine", MACHINES)
@hypothesis_settings(max_examples=70)
@given(s=settings())
def test_any_combination(machine: str, s: dict[str, Any]) -> None:
    run(machine, s)


SHAPES = [(301, 4096), (301, 576), (3, 8192), (2, 16384), (2, 20480), (3, 33333)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rows_of_models_and_wider(machine: str, dtype: torch.dtype, rows: int, width: int) -> None:
    """Many rows, and rows that no block can hold, odd ones among them."""
    if machine != "cuda":
        rows = min(rows, 9)
    common = {"bias": True, "bias2": True, "offset": 0, "mean": 0.0, "weight_offset": 0.0}
    common |= {"packs": 0, "in_place": True, "keep": True, "seed": 1, "dtype": dtype}
    common |= {"rows": rows, "width": width}
    run(machine, {**common, "inputs": "rb2", "branch_norm": None, "norm": "layer", "norm2": "rms"})
    run(machine, {**common, "inputs": "rb", "branch_norm": "layer", "norm": "rms", "norm2": None})


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("width", [4096, 33])
def test_large_mean(machine: str, width: int) -> None:
    """A mean thousands of times the deviation takes no more accuracy than from PyTorch."""
    torch.manual_seed(2)
    device = device_of(machine)
    x = random(5, width, dtype=torch.float32, device=device, mean=4000.0)
    norm = random_norm("layer", width, dtype=torch.float32, device=device)
    out = torch.full_like(x, torch.nan)
    launch(ResidualNorm(residual=x, norm=norm, out=out), machine)
    exact = reference.normalise(x.double(), widened(norm))
    # What the mean's own rounding does to every element is inherent: half a unit of 4000.
    error = (out.double() - exact).abs().max()
    peer = (torch_norm(x, norm).double() - exact).abs().max()
    inherent = 4000 * torch.finfo(torch.float32).eps * norm.weight.abs().max()
    assert error <= max(2 * peer, inherent)


@pytest.mark.parametrize("machine", MACHINES)
def test_not_a_number_stays_in_its_row(machine: str) -> None:
    device = device_of(machine)
    x = random(10, 72, dtype=torch.bfloat16, device=device)
    x[4, 70] = torch.nan
    out = torch.zeros_like(x)
    launch(ResidualNorm(branch=x, norm=Norm("rms", None), out=out), machine)
    rows = torch.isnan(out).any(-1).tolist()
    assert rows == [i == 4 for i in range(10)]


X = torch.zeros(3, 8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"sum_out": X}, "at least one of residual, branch and branch2"),
    "no output": ({"branch": X}, "at least one of sum_out, out and out2"),
    "no tensor": ({"branch": [1.0], "sum_out": X}, "must be tensors, not list"),
    "dtype": ({"branch": X.double(), "sum_out": X.double()}, "float64 is not supported"),
    "mixed": (
        {"branch": X, "residual": X.half(), "sum_out": X},
        r"branch must be torch.float16, not torch.float32",
    ),
    "shape": (
        {"branch": X, "residual": X[:2], "sum_out": X},
        r"branch must have shape \[2, 8\], not \[3, 8\]",
    ),
    "bias": (
        {"branch": X, "bias": X[0, :7], "sum_out": X},
        r"bias must have shape \[8\], not \[7\]",
    ),
    "bias alone": ({"residual": X, "bias": X[0], "sum_out": X}, "bias is given without branch"),
    "bias2 alone": ({"residual": X, "bias2": X[0], "sum_out": X}, "bias2 is given without branch2"),
    "branch_norm": (
        {"residual": X, "branch_norm": Norm("rms", None), "sum_out": X},
        "branch_norm is given without branch",
    ),
    "out alone": ({"branch": X, "out": torch.ones_like(X)}, "out is given without norm"),
    "norm alone": ({"branch": X, "norm": Norm("rms", None), "sum_out": X}, "norm is given without"),
    "norm2 alone": ({"branch": X, "norm2": Norm("rms", None), "sum_out": X}, "given without out2"),
    "norm kind": (
        {"branch": X, "norm": Norm("l2", None), "out": torch.ones_like(X)},
        "kind must be 'layer' or 'rms', not 'l2'",
    ),
    "norm weight": (
        {"branch": X, "norm": Norm("rms", X[0, :3]), "out": torch.ones_like(X)},
        r"norm.weight must have shape \[8\], not \[3\]",
    ),
    "strided": (
        {"branch": torch.zeros(8, 3).T, "sum_out": X},
        "branch must be contiguous; its shape is",
    ),
    "device": (
        {"branch": X, "sum_out": torch.zeros(3, 8, device="meta")},
        "sum_out must be on cpu, not on meta",
    ),
    "one place": (
        {"branch": X, "norm": Norm("rms", None), "sum_out": X, "out": X},
        "sum_out and out share memory",
    ),
    "partly": (
        {"branch": torch.zeros(40)[:24].view(3, 8), "sum_out": None},
        "sum_out lies partly in branch",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    arguments, message = WRONG[name]
    if name == "partly":
        buffer = torch.zeros(40)
        arguments = {"branch": buffer[:24].view(3, 8), "sum_out": buffer[8:32].view(3, 8)}
    with pytest.raises((ValueError, TypeError), match=message):
        ResidualNorm(**arguments)


@pytest.mark.parametrize("packs", [-1, 5])
def test_no_such_way(packs: int) -> None:
    call = ResidualNorm(branch=X, sum_out=torch.zeros_like(X))
    call.arguments.packs_per_thread = packs
    with pytest.raises(AssertionError, match=f"packs_per_thread is 0 to 4, not {packs}"):
        launch(call, "host")
