"""The stream on a device whose copies and kernels come late: every kernel reads its own layer, no
load is wasted.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice, LoadFailed

from offload.errors import OffloadError
from offload.scheduler.stream import Stream


def make(
    slots: int, sites: list[int], depth: int | None = None, seed: int = 0, **options: object
) -> tuple[Stream, LateDevice]:
    device = LateDevice(slots, random.Random(seed), **options)  # type: ignore[arg-type]
    return Stream(device, slots, sites, slots - 1 if depth is None else depth), device


def use(stream: Stream, device: LateDevice, sites: list[int], site: int) -> None:
    """What a layer's forward does."""
    slot = stream.acquire(site)
    device.launch(slot, sites[site])
    stream.release(site)


class Others:
    """Users of a layer that are said to be still to come."""

    def __init__(self, shared: Callable[[], bool]) -> None:
        self._shared = shared

    def wait(self, site: int | None) -> None: ...
    def rest(self, site: int) -> None: ...
    def shared(self, site: int) -> bool:
        return self._shared()


def run_pass(stream: Stream, device: LateDevice, sites: list[int], order: list[int]) -> list[int]:
    """One pass over `order`; the layers whose loads it started."""
    before = len(device.log)
    for site in order:
        use(stream, device, sites, site)
    stream.end_pass()
    return device.log[before:]


# ---- never a wrong byte -------------------------------------------------------------------------


@st.composite
def site_lists(draw: st.DrawFn) -> list[int]:
    """Sites of a model: a tied embedding has several, a resident layer none."""
    layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
    return [layer for layer in layers for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]


@st.composite
def passes(draw: st.DrawFn, sites: int) -> Iterator[list[int]]:
    """A pass as a list of sites: in order, a part of it again and again, or as it comes."""
    kind = draw(st.sampled_from(["all", "all", "tail", "any", "micro-batches"]))
    if kind == "all":
        return list(range(sites))
    if kind == "tail":
        return list(range(draw(st.integers(0, sites - 1)), sites))
    if kind == "micro-batches":
        return [i for i in range(sites) for _ in range(draw(st.integers(0, 3)))]
    return draw(st.lists(st.integers(0, sites - 1), max_size=12))


@settings(max_examples=1000)
@given(st.data())
def test_every_kernel_reads_its_own_layer(data: st.DataObject) -> None:
    sites = data.draw(site_lists(), label="sites")
    slots = data.draw(st.integers(1, 5), label="slots")
    depth = data.draw(st.integers(0, 5), label="depth")
    numbers = st.sets(st.integers(0, 60), max_size=4)
    stream, device = make(
        slots,
        sites,
        depth,
        seed=data.draw(st.integers(0, 2**32), label="interleaving"),
        laziness=data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), label="laziness"),
        reads_files=data.draw(st.booleans(), label="reads files"),
        fail_starts=data.draw(st.just(set()) | numbers, label="failing starts"),
        fail_loads=data.draw(st.just(set()) | numbers, label="failing loads"),
        interrupts=data.draw(st.just(set()) | numbers, label="interrupts"),
    )
    lockstep = data.draw(st.lists(st.booleans(), min_size=5, max_size=5), label="in lock step")
    for number_of_pass in range(data.draw(st.integers(1, 5), label="passes")):
        # Who are said to come need not come, and others may.
        guess = Others(lambda: device.chance.random() < 0.5)
        stream.meeting = guess if lockstep[number_of_pass] else None
        order = data.draw(passes(len(sites)), label="pass")
        stops_at = data.draw(st.none() | st.integers(0, len(order)), label="stops at")
        in_use: list[int] = []
        try:
            for number, site in enumerate(order):
                slot = stream.acquire(site)
                in_use.append(site)
                device.launch(slot, sites[site])
                if number == stops_at:  # what is in use is never released
                    break
                # Sometimes a layer calls another one before it has ended itself.
                if len(in_use) == slots or device.chance.random() < 0.8:
                    while in_use:
                        device.launch(stream._where[sites[in_use[-1]]], sites[in_use[-1]])
                        stream.release(in_use.pop())
        except (LoadFailed, KeyboardInterrupt):
            # A layer that failed takes its callers with it, and each of them releases.
            while in_use:
                stream.release(in_use.pop())
        stream.end_pass()
        if device.chance.random() < 0.1:
            stream.clear()
            assert not device.present()
    device.run_all()
    stream.clear()
    device.run_all()


@settings(max_examples=300)
@given(
    layers=st.integers(1, 9),
    slots=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    failing=st.integers(0, 30),
    reads_files=st.booleans(),
)
def test_a_layer_whose_load_failed_is_loaded_anew(
    layers: int, slots: int, seed: int, failing: int, reads_files: bool
) -> None:
    sites = list(range(layers))
    stream, device = make(slots, sites, seed=seed, fail_loads={failing}, reads_files=reads_files)
    failures = 0
    for _ in range(6):
        try:
            run_pass(stream, device, sites, sites)
        except LoadFailed:
            failures += 1
            stream.end_pass()
    device.run_all()
    reached = failing < len(device.log)
    dropped_unseen = failing >= len(device.log) - slots
    assert failures == reached or (failures == 0 and dropped_unseen)


# ---- not one load too many ----------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_cycle_loads_each_layer_once_a_pass(layers: int, slots: int, depth: int) -> None:
    sites = list(range(layers))
    stream, device = make(slots, sites, depth)
    for number in range(5):
        loaded = run_pass(stream, device, sites, sites)
        if layers <= slots:
            assert sorted(loaded) == (sites if number == 0 else [])
        else:  # the first pass also starts on the next one, and that one when it is sure
            ahead = [sites[: stream.depth], [stream.depth], [], [], []][number]
            assert sorted(loaded) == sorted(sites + ahead)
    assert stream.stats.loads == [device.log.count(i) for i in sites]
    uses = stream.stats.hits + stream.stats.misses
    assert uses == 5 * layers
    if stream.depth:
        assert stream.stats.misses == 1
    else:  # until it is sure what comes next every load is asked for by who waits for it
        assert stream.stats.misses == layers + (layers > slots)


@given(
    layers=st.integers(1, 8),
    slots=st.integers(1, 6),
    depth=st.integers(0, 6),
    repeats=st.integers(1, 3),
)
def test_what_comes_next_is_on_its_way_and_nothing_beyond(
    layers: int, slots: int, depth: int, repeats: int
) -> None:
    sites = list(range(layers))
    stream, device = make(slots, sites, depth)
    assert stream.depth == min(depth, slots - 1)
    for _ in range(3):
        for site in sites:
            for _ in range(repeats):
                before = len(device.log)
                slot = stream.acquire(site)
                ahead = [(site + i) % layers for i in range(1, stream.depth + 1)]
                assert {site, *ahead} <= device.present()
                device.launch(slot, site)
                stream.release(site)
                kept = {site} if repeats > 1 else set()
                assert {*kept, *ahead} <= device.present()
                further = {(site + stream.depth + 1) % layers} if repeats == 1 else set()
                assert set(device.log[before:]) <= {site, *ahead, *further}
        stream.end_pass()
    device.run_all()


@given(order=st.permutations(range(7)), slots=st.integers(2, 5), seed=st.integers(0, 2**32))
def test_an_order_that_nobody_announced_is_learnt_in_one_pass(
    order: list[int], slots: int, seed: int
) -> None:
    sites = list(range(7))
    stream, device = make(slots, sites, seed=seed)
    run_pass(stream, device, sites, order)
    run_pass(stream, device, sites, order)  # its first step was not known before
    run_pass(stream, device, sites, order)  # now it is sure, and one load more is ahead
    for _ in range(3):
        misses = stream.stats.misses
        assert sorted(run_pass(stream, device, sites, order)) == sites
        assert stream.stats.misses == misses
    device.run_all()


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_decoder_runs_alone_after_the_first_token(slots: int) -> None:
    encoder, decoder = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
    sites = encoder + decoder
    stream, device = make(slots, sites)
    for prompt in range(3):
        loaded = run_pass(stream, device, sites, sites)
        # What was on its way for one token more is lost; nothing else is loaded twice.
        assert len(loaded) <= len(sites) + slots
        assert set(loaded) == set(sites) or prompt == 0
        run_pass(stream, device, sites, decoder)
        run_pass(stream, device, sites, decoder)  # now it is sure, and one load more is ahead
        for _ in range(4):
            misses = stream.stats.misses
            assert sorted(run_pass(stream, device, sites, decoder)) == decoder
            assert stream.stats.misses == misses
    device.run_all()


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("tokens", [3, 4, 9])
def test_a_new_prompt_costs_what_was_on_its_way_for_the_last_one(slots: int, tokens: int) -> None:
    """The encoder behind the decoder is an exception: one more token is expected again after it."""
    encoder, decoder = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
    sites = encoder + decoder
    stream, device = make(slots, sites)
    for prompt in range(4):
        loads, misses = len(device.log), stream.stats.misses
        for order in (sites, *[decoder] * (tokens - 1)):
            run_pass(stream, device, sites, order)
        if prompt > 0:
            needed = len(encoder) + tokens * len(decoder)
            assert len(device.log) - loads == needed + slots
            assert stream.stats.misses == misses + 1
    device.run_all()


def test_a_new_order_is_taken_up_when_it_comes_a_second_time() -> None:
    stream, device = make(2, sites := list(range(4)))
    for _ in range(3):
        run_pass(stream, device, sites, sites)
    for _ in range(3):
        run_pass(stream, device, sites, [0, 2, 1, 3])
    misses = stream.stats.misses
    run_pass(stream, device, sites, [0, 2, 1, 3])
    assert stream.stats.misses == misses
    device.run_all()


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_tied_embedding_is_loaded_once_a_pass(slots: int) -> None:
    """It has two sites, at both ends of the pass: from the last to the first it stays."""
    sites = [0, 0, 1, 2, 3, 4, 5]
    order = [0, 2, 3, 4, 5, 6, 1]
    stream, device = make(slots, sites)
    run_pass(stream, device, sites, order)
    run_pass(stream, device, sites, order)
    for _ in range(3):
        misses = stream.stats.misses
        assert sorted(run_pass(stream, device, sites, order)) == [0, 1, 2, 3, 4, 5]
        assert stream.stats.misses == misses
    device.run_all()


def test_prefetch_goes_on_while_a_layer_of_several_sites_is_in_use() -> None:
    """Depth counts loads: a layer that is there already leaves its turn to the one behind it."""
    sites = [0, 0, 1, 2, 3]
    stream, device = make(2, sites)
    for _ in range(3):
        for site in [0, 2, 3, 4, 1]:
            use(stream, device, sites, site)
            assert len(device.present()) == 2
        assert device.present() == {0, 1}
        stream.end_pass()


def test_micro_batches_meet_at_a_layer_that_is_loaded_once() -> None:
    sites = list(range(6))
    stream, device = make(2, sites)
    for _ in range(3):
        for site in sites:
            for _ in range(4):
                use(stream, device, sites, site)
        stream.end_pass()
    assert stream.stats.loads == [4, 3, 3, 3, 3, 3]
    assert stream.stats.misses == 1


@pytest.mark.parametrize("slots", [2, 3])
def test_two_that_take_turns_use_two_layers_at_once(slots: int) -> None:
    """Each acquires a layer while the other still has the one before, which is loaded over then."""
    stream, device = make(slots, sites := list(range(6)), depth=slots - 1)
    for _ in range(3):
        for site in sites:
            for _ in range(2):
                if site:
                    device.launch(stream._where[site - 1], site - 1)
                    stream.release(site - 1)
                device.launch(stream.acquire(site), site)
            following = {(site + i) % 6 for i in range(slots)}
            assert device.present() == following
        for _ in range(2):
            device.launch(stream._where[5], 5)
            stream.release(5)
        stream.end_pass()
    # It is sure that another comes next: behind the last use its own slot is loaded, too.
    assert len(device.present() - {5}) == slots
    assert stream.stats.misses == 1
    device.run_all()


def test_a_slot_is_filled_anew_as_soon_as_its_layer_was_used() -> None:
    """Not when the next layer is asked for: resident layers between the two may take long."""
    stream, device = make(2, sites := list(range(4)))
    for _ in range(2):
        run_pass(stream, device, sites, sites)
    for site in sites:
        slot = stream.acquire(site)
        device.launch(slot, site)
        assert device.present() == {site, (site + 1) % 4}
        stream.release(site)
        assert device.present() == {(site + 1) % 4, (site + 2) % 4}
    device.run_all()


def test_a_layer_that_comes_back_takes_no_place_of_the_next() -> None:
    stream, device = make(2, sites := list(range(4)))
    for _ in range(2):
        run_pass(stream, device, sites, sites)
    use(stream, device, sites, 0)
    assert device.present() == {1, 2}
    stream.acquire(0)
    assert device.present() == {0, 1}


def test_in_lock_step_a_layer_stays_for_the_others_and_goes_behind_the_last() -> None:
    stream, device = make(2, sites := list(range(4)))
    for _ in range(2):
        run_pass(stream, device, sites, sites)
    left = 0
    stream.meeting = Others(lambda: left > 0)
    loads, marks = len(device.log), device.marks
    for _ in range(2):
        for site in sites:
            for left in (2, 1, 0):
                use(stream, device, sites, site)
                kept = site if left else (site + 2) % 4
                assert device.present() == {kept, (site + 1) % 4}
    assert len(device.log) - loads == 2 * len(sites)
    assert device.marks - marks == 2 * len(sites)
    device.run_all()


def test_in_lock_step_a_layer_that_each_uses_twice_stays() -> None:
    stream, device = make(2, sites := list(range(4)))
    left = 0
    stream.meeting = Others(lambda: left > 0)
    loads = 0
    for _ in range(4):
        loads = len(device.log)
        for site in (0, 1, 1, 2, 3):
            for left in (2, 1, 0):  # noqa: B007 -- who is to come asks for it
                use(stream, device, sites, site)
    assert len(device.log) - loads == len(sites)
    device.run_all()


def test_a_load_that_cannot_be_started_ahead_fails_where_it_is_needed() -> None:
    stream, device = make(2, sites := list(range(4)), fail_starts={7})
    run_pass(stream, device, sites, sites)
    assert len(device.log) == 5  # layer 0 again, too
    use(stream, device, sites, 0)  # starts layer 1
    use(stream, device, sites, 1)  # layer 2, and behind its use layer 3, which fails
    assert device.present() == {2}
    use(stream, device, sites, 2)
    device.run_all()


# ---- what it refuses ----------------------------------------------------------------------------


def test_more_layers_in_use_than_slots() -> None:
    stream, device = make(2, [0, 1, 2])
    device.launch(stream.acquire(0), 0)
    device.launch(stream.acquire(1), 1)
    with pytest.raises(OffloadError, match=r"all 2 slots are in use.*layer 2.*raise prefetch"):
        stream.acquire(2)
    stream.release(1)
    device.launch(stream.acquire(2), 2)
    stream.release(2)
    stream.release(0)
    device.run_all()


@pytest.mark.parametrize(("slots", "depth"), [(0, 0), (-1, 1), (2, -1)])
def test_numbers_that_make_no_stream(slots: int, depth: int) -> None:
    with pytest.raises(ValueError, match=rf"got {slots}, {depth}"):
        Stream(LateDevice(1, random.Random(0)), slots, [0, 1], depth)


@pytest.mark.parametrize("seed", range(8))
def test_who_holds_a_layer_keeps_it_when_a_second_one_is_interrupted(seed: int) -> None:
    stream, device = make(2, [0, 1, 2], seed=seed, laziness=1.0, interrupts={1})
    slot = stream.acquire(0)
    device.launch(slot, 0)
    with pytest.raises(KeyboardInterrupt):
        stream.acquire(0)
    assert 0 in device.present()
    device.launch(slot, 0)
    stream.release(0)
    for site in (1, 2):
        use(stream, device, [0, 1, 2], site)
    device.run_all()


def test_a_forked_child_is_told_to_load_anew() -> None:
    stream, device = make(2, [0, 1, 2])
    use(stream, device, [0, 1, 2], 0)
    child = os.fork()
    if child == 0:
        try:
            stream.acquire(1)
        except OffloadError as error:
            os._exit(0 if "forked" in str(error) and "offload.run" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    use(stream, device, [0, 1, 2], 1)
    device.run_all()
