"""Rows of a batch on two sides: after the moves each row is what was picked for it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.models.kv.split_rows import SPARE, RowMoves


@given(st.data())
def test_moves_make_of_a_batch_what_was_picked(data: st.DataObject) -> None:
    on_device, on_cpu = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    batch, stays = on_device + on_cpu, data.draw(st.booleans())
    count, cpu_rows = batch, on_cpu
    if not stays:
        count = data.draw(st.integers(1, 9))
        cpu_rows = data.draw(st.integers(0, count))
    picked = data.draw(st.lists(st.integers(0, batch - 1), min_size=count, max_size=count))
    moves = RowMoves.of(torch.tensor(picked), (on_device, on_cpu), cpu_rows, stays)

    before = list(range(batch))  # what each row is
    there = before[on_device:]
    device: list[Any] = before[:on_device] if stays else [None] * (count - cpu_rows)
    cpu: list[Any] = there if stays else [None] * cpu_rows
    up = [before[row] for row in moves.up_from.tolist()]
    down = [before[row] for row in moves.down_from.tolist()]
    assert all(row < on_device for row in down)  # nothing crosses the link to where it was
    spare = None
    for target, source in moves.copies:
        if source == SPARE:
            found = spare
        else:
            found = there[source] if source < on_cpu else down[source - on_cpu]
        if target == SPARE:
            spare = found
        else:
            cpu[target] = found
    for row, found in zip(moves.up.tolist(), up, strict=True):
        device[row] = found
    assert device + cpu == picked
    if stays:  # a row that keeps its place is not touched
        below = {on_device + target for target, _ in moves.copies if target != SPARE}
        written = {*moves.up.tolist(), *below}
        assert not written & {row for row in range(batch) if picked[row] == row}
