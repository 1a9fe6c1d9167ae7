"""Weights in panels: the order of every code, there and back, from every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_dequantizer import random_stored

from offload.kernels.dequantize import dequantise
from offload.kernels.panels import (
    RENAMED,
    in_panels,
    in_rows,
    pack_panels,
    panels_of,
    rows_of,
    unpack_panels,
)
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
    panels = pack_panels(codes, bits)
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
                            row, column = g + 8 * (j % 2), 8 * t + 4 * (j // 2) + i
                        wanted = codes[16 * tile + row, columns * chunk + column]
                        assert word >> bits * i & ((1 << bits) - 1) == wanted
    assert torch.equal(unpack_panels(panels, bits), codes)


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
