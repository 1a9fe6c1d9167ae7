"""Activations with bias and gate: accuracy over the whole range, odd sizes, bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accuracy import DTYPES, assert_accurate, assert_untouched, poisoned, random, widened
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, launch

from offload.kernels import Activation, reference

KINDS = (None, "relu", "gelu", "gelu_tanh", "silu")


def torch_activation(
    x: torch.Tensor, kind: str | None, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """As a model does it, in x's own dtype."""
    x = x if bias is None else x + bias
    if not gated:
        return reference.activate(x, kind)
    gate, up = x.chunk(2, -1)
    return reference.activate(gate, kind) * up


def exactly(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    """The activation of float64 x by formulas that do not cancel where x is negative."""
    if kind == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    if kind == "gelu_tanh":
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return reference.activate(x, kind)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    return {
        "shape": draw(st.sampled_from([(0,), (1,), (3,), (9,), (2, 5), (1, 4, 3)])),
        "width": draw(st.sampled_from([8, 64, 1376, 1536, 1000]) | st.integers(1, 200)),
        "kind": draw(st.sampled_from(KINDS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "bias": draw(flag),
        "gated": draw(flag),
        "offset": draw(st.sampled_from([0, 0, 1])),
        "padding": draw(st.sampled_from([0, 0, 16, 3])),
        "in_place": draw(flag),
        "seed": draw(st.integers(0, 99)),
    }


def run(machine: str, s: dict[str, Any]) -> None:
    torch.manual_seed(s["seed"])
    like = {"dtype": s["dtype"], "device": device_of(machine), "offset": s["offset"]}
    row = s["width"] * (2 if s["gated"] else 1)
    input = random(*s["shape"], row + s["padding"], scale=3.0, **like)[..., :row]
    bias = random(row, **like) if s["bias"] else None
    peer = torch_activation(input, s["kind"], bias, s["gated"])
    exact = torch_activation(widened(input), s["kind"], widened(bias), s["gated"])
    out, buffer = poisoned(*s["shape"], s["width"], **like)
    in_place = s["in_place"] and not s["gated"] and not s["padding"]
    if in_place:
        out = input
    launch(Activation(input, out, kind=s["kind"], bias=bias, gated=s["gated"]), machine)
    assert_accurate(out, peer, exact, str(s))
    if not in_place:
        assert_untouched(out, buffer)


@pytest.mark.parametrize("machine", MACHINES)
@hypothesis_settings(max_examples=80)
@given(s=settings())
def test_any_combination(machine: str, s: dict[str, Any]) -> None:
    run(machine, s)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(301, 11008), (2003, 33)])
def test_many_rows(machine: str, rows: int, width: int, gated: bool) -> None:
    """So many that a thread takes several, and the last of them fewer."""
    s = {"width": width, "kind": "silu", "dtype": torch.bfloat16, "bias": True, "gated": gated}
    s |= {"offset": 0, "padding": 0, "in_place": False, "seed": 5}
    run(machine, {**s, "shape": (rows if machine == "cuda" else min(rows, 35),)})


@pytest.mark.parametrize("machine", MACHINES[1:])  # the reference is PyTorch itself
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_input(machine: str, dtype: torch.dtype, kind: str | None) -> None:
    """All finite inputs of 16 bits one by one, each as accurate for its size as PyTorch is.

    The largest error over all inputs says nothing of small results, where 1 + erf and 1 + tanh
    cancel; so each counts relative to the result.
    """
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = bits.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    x = x[torch.isfinite(x)]
    device = device_of(machine)
    x = x.to(device)
    out = torch.full_like(x, torch.nan)[None]
    launch(Activation(x[None], out, kind=kind), machine)
    exact = exactly(x.double(), kind)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    peer = reference.activate(x, kind)
    # Half a unit in the last place is what rounding once costs; subnormals have fixed steps, and
    # where exp would be subnormal in float32 it may be zero.
    floor = 0.75 * eps * exact.abs() + eps * tiny + 1e-35
    if dtype == torch.float32:  # computed by PyTorch's own formulas, which cancel
        floor = eps * x.double().abs()
    allowed = torch.maximum(floor, 2 * (peer.double() - exact).abs())
    error = (out[0].double() - exact).abs()
    wrong = ~(error <= allowed)
    assert not wrong.any(), (
        f"{int(wrong.sum())} inputs, first {x[wrong][0].item()}: {out[0][wrong][0].item()}, "
        f"exactly {exact[wrong][0].item()}; PyTorch {peer[wrong][0].item()}"
    )


@pytest.mark.parametrize("machine", MACHINES[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_infinity_and_not_a_number(machine: str, dtype: torch.dtype, kind: str | None) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0]], dtype=dtype)
    x = x.to(device_of(machine))
    out = torch.full_like(x, 7.0)
    launch(Activation(x, out, kind=kind), machine)
    assert torch.equal(out[0, [0, 3]], x[0, [0, 3]])
    assert torch.isnan(out[0, 2])
    # Of minus infinity the functions' limit is zero; PyTorch's formulas give NaN.
    if kind == "relu":
        assert out[0, 1] == 0
    elif kind is None:
        assert out[0, 1] == -torch.inf


X = torch.zeros(3, 8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "swish"}, "kind must be one of None, 'relu', .* not 'swish'"),
    "out": ({"out": None}, "out must be a tensor, not NoneType"),
    "input": ({"input": 2.0}, "input must be a tensor, not float"),
    "dtype": ({"input": X.double(), "out": X.double()}, "float64 is not supported"),
    "mixed": ({"input": X.half()}, "input must be torch.float32, not torch.float16"),
    "shape": ({"input": torch.zeros(2, 8)}, r"input must have shape \[3, 8\], not \[2, 8\]"),
    "gate": ({"gated": True}, r"input must have shape \[3, 16\], not \[3, 8\]"),
    "bias": ({"bias": torch.zeros(9)}, r"bias must have shape \[8\], not \[9\]"),
    "strided out": ({"out": torch.zeros(8, 3).T}, "out must be contiguous"),
    "strided input": ({"input": torch.zeros(8, 3).T}, "last dimension of input must be contiguous"),
    "device": ({"input": X.to("meta")}, "input must be on cpu, not on meta"),
    "scalar": ({"out": torch.tensor(1.0)}, r"out must be \[..., width\], not \[\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    good: dict[str, Any] = {"input": torch.zeros(3, 8), "out": torch.zeros(3, 8), "kind": "relu"}
    Activation(**good)
    with pytest.raises((ValueError, TypeError), match=message):
        Activation(**(good | changes))


def test_out_in_input() -> None:
    buffer = torch.zeros(4, 8)
    Activation(buffer, buffer, kind="relu")
    for input, out, gated in (
        (buffer[:3], buffer[1:], False),
        (buffer.view(2, 16), buffer[:2], True),
        (torch.as_strided(buffer, (2, 8), (16, 1)), buffer[:2], False),
    ):
        with pytest.raises(ValueError, match="out lies in input"):
            Activation(input, out, kind="relu", gated=gated)
