"""A layer's layout: aligned places that do not overlap, and views that are the tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.checkpoint.expressions import Held
from offload.store.layout import ALIGNMENT, Layer, align

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.int64]
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12)


def make(wanted: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Layer, list[torch.Tensor]]:
    values = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in wanted]
    return Layer.lay_out("layers.0", [(f"{i}", Held(v)) for i, v in enumerate(values)]), values


@pytest.mark.parametrize(
    ("n", "to", "aligned"),
    [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 256, 512), (9, 4, 12)],
)
def test_align(n: int, to: int, aligned: int) -> None:
    assert align(n, to) == aligned


@given(tensors)
def test_places_are_aligned_and_apart(wanted: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layer, values = make(wanted)
    end = 0
    for i, (place, value) in enumerate(zip(layer.places, values, strict=True)):
        assert place.name == f"{i}" and (place.shape, place.dtype) == (value.shape, value.dtype)
        assert place.nbytes == value.numel() * value.element_size()
        assert place.offset % ALIGNMENT == 0 and end <= place.offset < end + ALIGNMENT
        end = place.offset + place.nbytes
    assert layer.nbytes % ALIGNMENT == 0 and end <= layer.nbytes < end + ALIGNMENT
    assert layer.weight_bytes == sum(v.numel() * v.element_size() for v in values)


@given(tensors)
def test_views_are_the_tensors(wanted: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    layer, values = make(wanted)
    slot = torch.full((layer.nbytes + 100,), 0xEE, dtype=torch.uint8)
    before = slot.clone()
    for place, value in zip(layer.places, values, strict=True):
        view = place.view(slot)
        assert (view.shape, view.dtype) == (value.shape, value.dtype) and view.is_contiguous()
        view.copy_(value)
        end = place.offset + place.nbytes
        before[place.offset : end] = slot[place.offset : end]
    assert torch.equal(slot, before)  # nothing was written between the places
    for place, value in zip(layer.places, values, strict=True):
        assert torch.equal(place.view(slot), value)


def test_parameters_lie_in_the_slot_and_need_no_gradient_by_themselves() -> None:
    layer, _ = make([((3, 5), torch.float32), ((4,), torch.bfloat16)])
    slot = torch.zeros(layer.nbytes, dtype=torch.uint8)
    with torch.inference_mode():
        parameters = layer.parameters(slot)
    slot.fill_(1)
    for place, parameter in zip(layer.places, parameters, strict=True):
        assert isinstance(parameter, nn.Parameter)
        assert not parameter.requires_grad and not parameter.is_inference()
        assert parameter.data_ptr() == slot.data_ptr() + place.offset
        assert torch.equal(parameter, place.view(slot))
    like = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)]
    flags = [p.requires_grad for p in layer.parameters(slot, like)]
    assert flags == [True, False]


def test_sources_are_exchanged_by_name_and_places_stay() -> None:
    layer, values = make([((3,), torch.float32), ((2, 2), torch.float32)])
    other = Held(torch.ones(2, 2))
    moved = layer.with_sources({"1": other, "not here": other})
    assert moved.places[1].source is other and moved.places[0] is not None
    assert moved.places[0].source is layer.places[0].source
    assert [p.offset for p in moved.places] == [p.offset for p in layer.places]
    assert moved.nbytes == layer.nbytes and torch.equal(values[0], layer.places[0].source.read())


@given(tensors, st.data())
def test_adjacent_tensors_are_one_view(
    wanted: list[tuple[tuple[int, ...], torch.dtype]], data: st.DataObject
) -> None:
    values = [torch.randint(0, 2, shape).to(torch.float32) for shape, _ in wanted]
    order = data.draw(st.permutations(range(len(values))))
    cut = data.draw(st.integers(0, len(values)))
    groups = [[f"{i}" for i in order[:cut]], [f"{i}" for i in order[cut:]], ["absent"]]
    layer = Layer.lay_out("layers.0", [(f"{i}", Held(v)) for i, v in enumerate(values)], groups)
    assert [p.name for p in layer.places] == [f"{i}" for i in range(len(values))]
    slot = torch.zeros(layer.nbytes, dtype=torch.uint8)
    for place, value in zip(layer.places, values, strict=True):
        place.view(slot).copy_(value)
    for group in (order[:cut], order[cut:]):
        if group:
            start = layer.places[group[0]].offset
            together = torch.cat([values[i].flatten() for i in group])
            assert start % ALIGNMENT == 0
            got = slot[start : start + together.nbytes].view(torch.float32)
            assert torch.equal(got, together)
