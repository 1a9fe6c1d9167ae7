"""Weights in panels: the order of every code, there and back, from every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, launch
from test_dequantizer import random_stored

from offload.kernels import KernelError
from offload.kernels.arrange import Arrange
from offload.kernels.dequantize import dequantise
from offload.kernels.packing import pack_words
from offload.kernels.panels import (
    RENAMED,
    codes_in_panels,
    in_panels,
    in_rows,
    pack_panels,
    panels_of,
    rows_of,
    unpack_panels,
)
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import WeightFormat

LAYOUTS = ("packed", "gptq", "gptq_v2", "awq")


def forms() -> st.SearchStrategy[WeightFormat]:
    """Formats that can lie in panels."""

    def of(kind_bits: int, layout: str, group: int, zeros: bool) -> WeightFormat:
        layout = "gptq" if kind_bits == 8 and layout == "awq" else layout
        kind = f"int{kind_bits}"
        return WeightFormat(kind, layout, (1, group), zeros or layout != "packed")  # type: ignore[arg-type]

    groups = st.sampled_from([0, 32, 64, 96, 128])
    return st.builds(of, st.sampled_from([4, 8]), st.sampled_from(LAYOUTS), groups, st.booleans())


def shapes(form: WeightFormat) -> st.SearchStrategy[tuple[int, int]]:
    """Some that it has in panels."""
    step = 64
    while step % (form.block[1] or 1):
        step += 64
    return st.tuples(
        st.integers(1, 5).map(lambda i: 16 * i), st.integers(1, 4).map(lambda i: step * i)
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_where_every_code_lies(bits: int) -> None:
    """By the letter of the definition."""
    torch.manual_seed(bits)
    n, columns = 32, 64 if bits == 4 else 32
    codes = torch.randint(1 << bits, (n, 3 * columns), dtype=torch.uint8)
    panels = pack_panels(pack_words(codes, bits), bits)
    assert (panels.dtype, panels.shape) == (torch.uint8, (n // 16, 3, 512))
    words = panels.view(torch.int32).view(n // 16, 3, 32, 4)
    for tile in range(n // 16):
        for chunk in range(3):
            for lane in range(32):
                g, t = divmod(lane, 4)
                for j in range(4):
                    word = int(words[tile, chunk, lane, j]) & 0xFFFFFFFF
                    for i in range(32 // bits):
                        if bits == 4:
                            row = g + 8 * (i % 2)
                            column = 32 * (j // 2) + 8 * t + 4 * (j % 2) + (0, 2, 1, 3)[i // 2]
                        else:
                            row = g + 8 * (j % 2)
                            column = 8 * t + 4 * (j // 2) + (0, 2, 1, 3)[i]
                        wanted = codes[16 * tile + row, columns * chunk + column]
                        assert word >> bits * i & ((1 << bits) - 1) == wanted
    assert torch.equal(unpack_panels(panels, bits), pack_words(codes, bits))


@given(st.data())
@hypothesis_settings(max_examples=60)
def test_the_same_weight(data: st.DataObject) -> None:
    form = data.draw(forms())
    shape = data.draw(shapes(form))
    torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
    stored = random_stored(form, shape, data.draw(st.sampled_from([torch.float16, torch.bfloat16])))
    panels = panels_of(form, shape)
    assert panels is not None
    found = in_panels(form, stored)
    panels.check_stored({n: (t.dtype, tuple(t.shape)) for n, t in found.items()}, shape)
    for end, tensor in stored.items():
        assert end == "weight_shape" or found[RENAMED[end]].nbytes == tensor.nbytes
    assert all(tensor.is_contiguous() for tensor in found.values())
    wanted = dequantise(form, stored, shape, torch.float32)
    assert torch.equal(dequantise(panels, found, shape, torch.float32), wanted)
    rows = in_rows(panels, found)
    assert torch.equal(dequantise(rows_of(panels), rows, shape, torch.float32), wanted)
    if form.layout == "packed":
        stored.pop("weight_shape")
        assert rows.keys() == stored.keys()
        assert all(torch.equal(rows[name], tensor) for name, tensor in stored.items())


@given(st.data())
@hypothesis_settings(max_examples=30)
def test_panels_of_a_stack_are_those_of_each(data: st.DataObject) -> None:
    form = data.draw(forms())
    n, k = data.draw(shapes(form))
    torch.manual_seed(n + k)
    each = [random_stored(form, (rows, k), torch.bfloat16) for rows in (n, 32, n)]
    parts = [in_panels(form, stored) for stored in each]
    stack = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    panels = panels_of(form, (2 * n + 32, k))
    assert panels is not None
    weight = dequantise(panels, stack, (2 * n + 32, k), torch.float32)
    shapes_of = ((n, k), (32, k), (n, k))
    weights = [
        dequantise(form, stored, shape, torch.float32)
        for stored, shape in zip(each, shapes_of, strict=True)
    ]
    assert torch.equal(weight, torch.cat(weights))


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (WeightFormat.parse("int4"), (24, 64)),
        (WeightFormat.parse("int4-g32"), (16, 96)),
        (WeightFormat.parse("int8-channel"), (16, 48)),
        (WeightFormat("int4", "packed", (1, 48)), (16, 192)),
        (WeightFormat("int4", "packed", (0, 0)), (16, 64)),
        (WeightFormat("int4", "gptq", (1, 64), True, act_order=True), (16, 64)),
        (WeightFormat("int4", "gptq", (1, 128), True), (16, 192)),
        (WeightFormat.parse("fp8"), (16, 64)),
        (WeightFormat("int8", "plain", (1, 0), inputs="int8"), (16, 64)),
    ],
    ids=lambda x: x.name if isinstance(x, WeightFormat) else str(x),
)
def test_what_has_no_panels(form: WeightFormat, shape: tuple[int, int]) -> None:
    assert panels_of(form, shape) is None


def test_what_is_no_format_of_panels() -> None:
    for block in ((0, 0), (1, 48)):
        with pytest.raises(ValueError, match="panels share a scale among the columns of a row"):
            WeightFormat("int4", "panels", block)
    with pytest.raises(ValueError, match="no weight of kind 'fp8'"):
        WeightFormat("fp8", "panels", (1, 64))
    form = WeightFormat("int4", "panels", (1, 64))
    with pytest.raises(ValueError, match="24 outputs and 64 inputs do not divide into panels of"):
        form.check_shape((24, 64))
    with pytest.raises(ValueError, match=r"holds torch.float32, which is no dtype of such scales"):
        stored = form.stored((16, 64), torch.float32)
        form.check_stored(stored, (16, 64))


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_arranges_as_the_reference(machine: str) -> None:
    device = device_of(machine)

    @given(st.data())
    @hypothesis_settings(max_examples={"reference": 20, "host": 60, "cuda": 300}[machine])
    def check(data: st.DataObject) -> None:
        form = data.draw(forms())
        n, k = data.draw(shapes(form))
        # Several blocks, and the ends of the last.
        n, k = n * data.draw(st.sampled_from([1, 1, 9])), k * data.draw(st.sampled_from([1, 1, 11]))
        torch.manual_seed(data.draw(st.integers(0, 1 << 20)))
        stored = random_stored(form, (n, k), torch.bfloat16)
        wanted = codes_in_panels(form, stored)
        around = torch.full((wanted.numel() + 64,), 0x5A, dtype=torch.uint8, device=device)
        panels = around[16 : 16 + wanted.numel()].view(wanted.shape)
        on_device = {name: tensor.to(device) for name, tensor in stored.items()}
        launch(Arrange(form, on_device, (n, k), panels), machine)
        assert torch.equal(panels.cpu(), wanted)
        panels.fill_(0x5A)
        assert bool((around == 0x5A).all()), "something was written next to the panels"

    check()


FORM = WeightFormat.parse("int4-zp")
STORED = quantise(torch.randn(32, 64), FORM)
PANELS = torch.zeros(2, 1, 512, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"form": WeightFormat.parse("fp8")}, "a weight of .32, 64. in fp8-channel has no panels"),
        ({"shape": (24, 64)}, r"a weight of \[24, 64\] in int4-g64-zp has no panels"),
        ({"stored": {}}, "weight_packed is missing"),
        ({"shape": (16, 64)}, r"weight_packed must have shape \[16, 8\], not \[32, 8\]"),
        ({"panels": PANELS[:1]}, r"panels must have shape \[2, 1, 512\], not \[1, 1, 512\]"),
        ({"panels": PANELS.view(torch.int8)}, "panels must be torch.uint8, not torch.int8"),
        ({"panels": PANELS.to("meta")}, "panels must be on cpu, not on meta"),
        (
            {"panels": STORED["weight_packed"].view(torch.uint8).view(2, 1, 512)},
            "panels share memory with weight_packed",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_refuses(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Arrange(**{"form": FORM, "stored": STORED, "shape": (32, 64), "panels": PANELS, **changed})


@pytest.mark.parametrize("machine", MACHINES[1:])
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("bits", 5, "bits must be 4 or 8, not 5"),
        ("order", 3, "no order of codes has the number 3"),
        ("rows", 24, "24 rows of 64 do not divide into panels of 16 and 64"),
        ("depth", 32, "32 rows of 32 do not divide into panels of 16 and 64"),
        ("panels", None, "codes must lie at a multiple of 4 bytes and panels of 16"),
    ],
)
def test_the_library_refuses(machine: str, field: str, value: Any, text: str) -> None:
    device = device_of(machine)
    stored = {name: tensor.to(device) for name, tensor in STORED.items()}
    call = Arrange(FORM, stored, (32, 64), PANELS.to(device))
    setattr(call.arguments, field, value)
    with pytest.raises((AssertionError, KernelError), match=text):
        launch(call, machine)
