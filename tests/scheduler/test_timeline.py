"""The order of loads and layers in a pass: against cases worked out, and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.timeline import LayerTime, first_pass_seconds, pass_seconds

times = st.floats(0.01, 10)
layers = st.lists(
    st.one_of(
        st.builds(LayerTime, times),
        st.builds(LayerTime, times, times),
        st.builds(LayerTime, times, times, times),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    ("found", "depth", "seconds"),
    [
        # One after the other, without a second slot.
        ([LayerTime(2, 3)] * 4, 0, 20),
        # Loads beside layers: the slower of the two sets the pace.
        ([LayerTime(2, 3)] * 4, 1, 12),
        ([LayerTime(3, 2)] * 4, 1, 12),
        # Nothing moves.
        ([LayerTime(3)] * 4, 0, 12),
        # A resident layer beside a streamed one: with one load ahead the next load waits for both.
        ([LayerTime(2, 3), LayerTime(2)] * 2, 1, 8),
        # The disk is slower than the link, and works all the time with a slot to spare.
        ([LayerTime(1, 1, 5)] * 4, 1, 20),
        # One layer of four lies in files: its read begins when the second layer before it is done,
        # not a pass ahead, and three layers compute while nothing is read.
        ([LayerTime(1, 1, 8)] + [LayerTime(1, 1)] * 3, 1, 11),
    ],
)
def test_worked_out(found: list[LayerTime], depth: int, seconds: float) -> None:
    assert pass_seconds(found, depth) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        # Keys and values of a layer come up while the one before is computed, no sooner.
        ([LayerTime(2, rising=3)] * 4, 12),
        ([LayerTime(4, rising=1)] * 4, 16),
        # They take the link from the weights, and wait for none of them.
        ([LayerTime(1, 3, rising=2)] * 4, 20),
        ([LayerTime(6, 3, rising=2)] * 4, 24),
    ],
)
def test_keys_and_values_that_come_up(found: list[LayerTime], seconds: float) -> None:
    assert pass_seconds(found, 1) == pytest.approx(seconds)


def test_the_first_pass_finds_its_first_loads_done() -> None:
    """Two of four: the third begins when the first layer was computed, the fourth behind it."""
    assert first_pass_seconds([LayerTime(1, 3)] * 4, 1) == pytest.approx(8)
    assert first_pass_seconds([LayerTime(1, 3)] * 4, 3) == pytest.approx(4)
    # What is resident in front gives them no more time: no slot is free yet.
    assert first_pass_seconds([LayerTime(9), *[LayerTime(1, 3)] * 3], 1) == pytest.approx(9 + 5)


@given(layers, st.integers(1, 4))
def test_between_the_busiest_resource_and_all_in_turn(found: list[LayerTime], depth: int) -> None:
    seconds = pass_seconds(found, depth)
    sums = [sum(getattr(x, name) for x in found) for name in ("compute", "link", "disk")]
    assert max(sums) - 1e-9 <= seconds <= sum(sums) + 1e-9
    assert pass_seconds(found, depth + 1) <= seconds + 1e-9


@given(layers, st.integers(0, 3), st.data())
def test_what_takes_longer_makes_no_pass_shorter(
    found: list[LayerTime], depth: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(found) - 1))
    old = found[index]
    slower = LayerTime(old.compute * 1.5, old.link * 1.5, old.disk * 1.5)
    changed = [*found[:index], slower, *found[index + 1 :]]
    assert pass_seconds(changed, depth) >= pass_seconds(found, depth) - 1e-9
