"""What a decode step takes in, and its mask held against what is expected: every dtype, any lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, launch

from offload.kernels.step_inputs import MASKS, StepInputs


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch, columns = draw(
        st.tuples(st.integers(1, 3), st.integers(1, 20))
        | st.sampled_from([(1, 1100), (2, 511), (300, 1), (300, 7)])
    )
    return {
        "batch": batch,
        "columns": columns,
        "dtype": draw(st.sampled_from([*MASKS, None])),
        "positions": draw(st.sampled_from([None, 1, batch])),
        "padded": draw(st.booleans()),
        "wrong": draw(st.none() | st.tuples(st.integers(0, batch - 1), st.integers(0, 1200))),
        "lie": draw(st.sampled_from(["contiguous", "sliced", "expanded", "transposed"])),
        "seed": draw(st.integers(0, 99)),
    }


def lying(mask: torch.Tensor, lie: str) -> torch.Tensor:
    """The same mask with other strides."""
    if lie == "sliced":
        wide = mask.new_zeros(mask.shape[0], 2 * mask.shape[1] + 3)
        wide[:, 1 : 2 * mask.shape[1] : 2] = mask
        return wide[:, 1 : 2 * mask.shape[1] : 2]
    if lie == "transposed":
        return mask.T.contiguous().T
    if lie == "expanded" and bool((mask == mask[:1]).all()):
        return mask[:1].clone().expand_as(mask)
    return mask


def run(machine: str, c: dict[str, Any]) -> None:
    torch.manual_seed(c["seed"])
    device, batch, columns = device_of(machine), c["batch"], c["columns"]
    past = columns - 1
    ids = torch.randint(-(1 << 40), 1 << 40, (batch, 4), device=device)[:, 1:2]
    positions = None
    if c["positions"] is not None:
        positions = torch.randint(0, 1 << 40, (c["positions"], 2), device=device)[:, :1]
    start = None
    if c["padded"]:
        start = torch.randint(0, columns + 1, (batch,), dtype=torch.int32, device=device)
    mask, holds = None, True
    if c["dtype"] is not None:
        column = torch.arange(columns, device=device)
        seen = (column >= (0 if start is None else start[:, None])).expand(batch, -1).clone()
        if c["wrong"] is not None:
            row, at = c["wrong"][0], c["wrong"][1] % columns
            seen[row, at] = ~seen[row, at]
            holds = False
        value = torch.randint(1, 100, seen.shape, device=device)  # any that is not zero is seen
        mask = torch.where(seen, value, 0).to(c["dtype"])
        if c["dtype"].is_floating_point:
            mask = torch.where(seen, mask, -0.0)
        elif c["dtype"].is_signed:
            mask = torch.where(seen & (value == 1), torch.iinfo(c["dtype"]).min, mask)
        mask = lying(mask, c["lie"])
    ids_out = torch.full((batch, 1), -7, device=device)
    positions_out = ids_out.clone()
    pinned = torch.empty((), dtype=torch.bool, pin_memory=machine == "cuda")
    call = StepInputs(ids_out, positions_out, pinned)
    for before in (True, False):  # which is all that a launch may change
        pinned.fill_(before)
        call.take(ids, positions, past, mask, start)
        launch(call, machine)
        assert bool(pinned) == (before and holds)
    assert torch.equal(ids_out, ids)
    wanted = torch.full_like(ids, past) if positions is None else positions.expand(batch, 1)
    assert torch.equal(positions_out, wanted)


@pytest.mark.parametrize("machine", MACHINES)
@settings(max_examples=60)
@given(case=cases())
def test_against_what_was_given(machine: str, case: dict[str, Any]) -> None:
    run(machine, case)


@pytest.mark.parametrize("machine", MACHINES)
def test_one_element_among_many_is_found(machine: str) -> None:
    case = {"batch": 40, "columns": 1300, "dtype": torch.int64, "positions": 1, "padded": True}
    for wrong in (None, (0, 0), (17, 700), (39, 1299)):
        run(machine, {**case, "wrong": wrong, "lie": "contiguous", "seed": 3})


def test_outputs_that_do_not_fit_are_refused() -> None:
    places = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="positions_out"):
        StepInputs(places[0], places[1][:1], torch.tensor(True))
    with pytest.raises(ValueError, match="ids_out"):
        StepInputs(places[0].int(), places[1], torch.tensor(True))
    for answer in (torch.ones(1, dtype=torch.bool), torch.tensor(1)):
        with pytest.raises(ValueError, match="as_expected"):
            StepInputs(*places, answer)
