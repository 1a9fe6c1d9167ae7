"""The plan over random layer sizes and budgets: within every budget, nothing left that would fit,
and errors that say the numbers.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.scheduler.plan import (
    Budget,
    LayerSize,
    Plan,
    Tier,
    Workload,
    auto_plan,
    fixed_plan,
)
from offload.sizes import format_size

MIB = 1 << 20


def layer(nbytes: int, name: str = "layer") -> LayerSize:
    """Padding makes a slot larger than its weights."""
    return LayerSize(name, nbytes, max(0, nbytes - 7))


sizes = st.integers(0, 40).map(lambda n: n * 16384)
alike = st.builds(lambda n, size: [layer(size)] * n, st.integers(0, 12), sizes)
mixed = st.lists(sizes.map(layer), max_size=9)
model_layers = alike | mixed
work_loads = st.builds(
    Workload,
    outside_bytes=sizes,
    reserve_bytes=sizes,
    depth=st.integers(1, 5),
    max_chunk_bytes=st.sampled_from([4096, 65536, 8 << 20]),
    max_chunks=st.integers(1, 8),
)
amounts = st.integers(0, 6 * MIB) | st.sampled_from([0, 1 << 40])
budgets = st.builds(Budget, device=amounts, cpu=amounts, shared=st.booleans())
tier_lists = st.lists(st.sampled_from(Tier), min_size=12, max_size=12)


def device_need(plan: Plan) -> int:
    """Bytes on the compute device, counted here once more."""
    moving = [
        s.slot_bytes for s, t in zip(plan.layers, plan.tiers, strict=True) if t is not Tier.DEVICE
    ]
    resident = sum(
        s.slot_bytes for s, t in zip(plan.layers, plan.tiers, strict=True) if t is Tier.DEVICE
    )
    slots = plan.slots * max(moving, default=0)
    return plan.outside_bytes + plan.reserve_bytes + resident + slots


def cpu_need(plan: Plan) -> int:
    at_rest = sum(
        s.slot_bytes for s, t in zip(plan.layers, plan.tiers, strict=True) if t is Tier.CPU
    )
    reads = plan.chunk_bytes * plan.chunks if Tier.NVME in plan.tiers else 0
    return at_rest + reads + (device_need(plan) if plan.budget.shared else 0)


def within_budget(plan: Plan) -> bool:
    budget = plan.budget
    limit = min(budget.device, budget.cpu) if budget.shared else budget.device
    return device_need(plan) <= limit and cpu_need(plan) <= budget.cpu


def retiered(plan: Plan, tiers: list[Tier]) -> Plan:
    """The plan with other tiers and just as many slots as those need."""
    moving = sum(tier is not Tier.DEVICE for tier in tiers)
    return replace(plan, tiers=tuple(tiers), slots=min(plan.depth + 1, moving))


def check(plan: Plan, layers: list[LayerSize], budget: Budget, work: Workload) -> None:
    assert plan.layers == tuple(layers) and len(plan.tiers) == len(layers)
    assert plan.budget == budget
    assert (plan.outside_bytes, plan.reserve_bytes) == (work.outside_bytes, work.reserve_bytes)
    assert within_budget(plan)
    streamed = len(layers) - plan.count(Tier.DEVICE)
    assert plan.slots == (plan.depth + 1 if streamed else 0)
    assert plan.depth <= min(work.depth, max(0, streamed - 1))
    if streamed > 1:
        assert plan.depth >= 1  # a load beside every computation
    lowered = plan.depth < min(work.depth, max(0, streamed - 1))
    assert bool(plan.notes) == lowered
    if lowered:
        [note] = plan.notes
        assert f"from {work.depth} to {plan.depth}" in note and format_size(plan.slot_bytes) in note
    assert plan.chunk_bytes % 4096 == 0 and 4096 <= plan.chunk_bytes <= work.max_chunk_bytes
    # What the plan says of itself is what was counted here.
    assert plan.device_bytes + plan.reserve_bytes == device_need(plan)
    assert plan.cpu_bytes + (device_need(plan) if budget.shared else 0) == cpu_need(plan)
    assert sum(plan.weight_bytes(t) for t in Tier) == sum(s.weight_bytes for s in layers)
    assert plan.streamed_bytes == plan.weight_bytes(Tier.CPU) + plan.weight_bytes(Tier.NVME)


@settings(max_examples=600)
@given(layers=model_layers, budget=budgets, work=work_loads)
def test_auto_stays_within_the_budget_and_leaves_nothing_that_fits(
    layers: list[LayerSize], budget: Budget, work: Workload
) -> None:
    try:
        plan = auto_plan(layers, budget, work)
    except BudgetError:
        assume(False)
    check(plan, layers, budget, work)
    tiers = list(plan.tiers)
    for index, tier in enumerate(tiers):
        if tier is Tier.NVME or (tier is Tier.CPU and not budget.shared):
            on_device = retiered(plan, [*tiers[:index], Tier.DEVICE, *tiers[index + 1 :]])
            assert not within_budget(on_device), f"layer {index} fits the compute device"
        if tier is Tier.NVME:
            in_cpu = retiered(plan, [*tiers[:index], Tier.CPU, *tiers[index + 1 :]])
            assert not within_budget(in_cpu), f"layer {index} fits CPU memory"
    if Tier.NVME in tiers:
        no_files = retiered(plan, [Tier.CPU if t is Tier.NVME else t for t in tiers])
        assert not within_budget(no_files), "CPU memory would hold all that is left in files"


@settings(max_examples=400)
@given(layers=model_layers, budget=budgets, work=work_loads)
def test_auto_refuses_only_what_cannot_be(
    layers: list[LayerSize], budget: Budget, work: Workload
) -> None:
    """Two slots (or one for a single layer) and disk reads are the least of a streamed run."""
    least = Plan(
        layers=tuple(layers),
        tiers=(Tier.NVME,) * len(layers),
        slots=min(2, len(layers)),
        depth=min(1, max(0, len(layers) - 1)),
        chunk_bytes=0,
        chunks=0,
        outside_bytes=work.outside_bytes,
        reserve_bytes=work.reserve_bytes,
        budget=budget,
    )
    try:
        plan = auto_plan(layers, budget, work)
    except BudgetError as error:
        text = str(error)
        assert "max_memory[" in text and text.count("B") >= 3
        largest = max((s.slot_bytes for s in layers), default=0) // 4 // 4096 * 4096
        chunk = max(4096, min(work.max_chunk_bytes, largest))
        least = replace(least, chunk_bytes=chunk, chunks=work.max_chunks)
        assert not within_budget(least)
        resident = replace(least, tiers=(Tier.DEVICE,) * len(layers), slots=0)
        assert not within_budget(resident)
    else:
        assert within_budget(plan)


@settings(max_examples=400)
@given(layers=model_layers, tiers=tier_lists, budget=budgets, work=work_loads)
def test_a_chosen_placement_is_kept_or_refused(
    layers: list[LayerSize], tiers: list[Tier], budget: Budget, work: Workload
) -> None:
    tiers = tiers[: len(layers)]
    try:
        plan = fixed_plan(layers, tiers, budget, work)
    except BudgetError as error:
        assert "max_memory[" in str(error)
        roomy = fixed_plan(layers, tiers, Budget(1 << 50, 1 << 50, budget.shared), work)
        least = replace(roomy, budget=budget, depth=min(1, roomy.depth), slots=min(2, roomy.slots))
        assert not within_budget(least)
        return
    assert list(plan.tiers) == tiers
    check(plan, layers, budget, work)
    deeper = replace(plan, depth=plan.depth + 1, slots=plan.slots + 1)
    if plan.notes:
        assert not within_budget(deeper), "prefetch was lowered without need"


@pytest.mark.parametrize("n", [5, 8, 33, 40, 80])
def test_resident_layers_are_spread_evenly(n: int) -> None:
    """The link catches up while a resident layer runs: such layers should not stand together."""
    layers = [layer(MIB, f"layers.{i}") for i in range(n)]
    work = Workload(outside_bytes=0, reserve_bytes=0, depth=1)
    for resident in range(1, n - 2):
        budget = Budget(device=(resident + 2) * MIB, cpu=1 << 40)
        plan = auto_plan(layers, budget, work)
        assert plan.count(Tier.DEVICE) == resident and plan.count(Tier.NVME) == 0
        at = [i for i, tier in enumerate(plan.tiers) if tier is Tier.DEVICE]
        gaps = [b - a for a, b in zip(at, [*at[1:], at[0] + n], strict=True)]
        power = 1 << (resident.bit_length() - 1)
        assert max(gaps) <= -(-n // power) + 1


# ---- numbers that were worked out by hand -------------------------------------------------------

TEN = [layer(10 * MIB, f"layers.{i}") for i in range(10)]
WORK = Workload(outside_bytes=7 * MIB, reserve_bytes=3 * MIB, depth=2, max_chunks=4)
READS = 4 * (10 * MIB // 4)


def test_all_fits() -> None:
    plan = auto_plan(TEN, Budget(110 * MIB, 0), WORK)
    assert plan.count(Tier.DEVICE) == 10
    assert (plan.slots, plan.depth, plan.ring_bytes, plan.streamed_bytes) == (0, 0, 0, 0)
    assert plan.device_bytes == 107 * MIB and not plan.notes


def test_one_byte_less_than_all() -> None:
    plan = auto_plan(TEN, Budget(110 * MIB - 1, 1 << 40), WORK)
    assert (plan.count(Tier.DEVICE), plan.count(Tier.CPU)) == (6, 4)  # 3 slots take three layers'
    assert plan.depth == 2 and plan.slot_total == 30 * MIB


def test_cpu_memory_that_holds_all_but_the_disk_reads_holds_all() -> None:
    device = 40 * MIB  # three slots and what stands outside
    work = replace(WORK, max_chunks=16)  # as much as four layers
    plan = auto_plan(TEN, Budget(device, 100 * MIB), work)
    assert plan.count(Tier.CPU) == 10 and plan.ring_bytes == 0
    plan = auto_plan(TEN, Budget(device, 100 * MIB - 1), work)
    assert plan.count(Tier.CPU) == 5 and plan.ring_bytes == 4 * READS


def test_a_large_layer_on_the_device_makes_room_for_others() -> None:
    layers = [layer(size * MIB) for size in (10, 10, 10, 10, 10, 40)]
    work = Workload(outside_bytes=0, reserve_bytes=0, depth=1, max_chunks=1)
    plan = auto_plan(layers, Budget(80 * MIB, 1 << 40), work)
    assert plan.tiers[5] is Tier.DEVICE and plan.slot_bytes == 10 * MIB
    assert plan.count(Tier.DEVICE) == 3  # 40 + 2 * 10 + two slots of 10


def test_memory_that_is_shared_counts_once() -> None:
    """The CPU computes: slots, layers at rest and disk reads stand in one budget."""
    plan = auto_plan(TEN, Budget(90 * MIB, 90 * MIB, shared=True), WORK)
    assert plan.device_bytes + plan.reserve_bytes + plan.ring_bytes <= 90 * MIB
    assert plan.count(Tier.DEVICE) == 4  # 90 - 10 - 3 slots - 10 for reads
    assert plan.count(Tier.NVME) == 6


def test_prefetch_gives_way_to_the_budget() -> None:
    plan = fixed_plan(TEN, [Tier.NVME] * 10, Budget(30 * MIB, READS), WORK)
    assert (plan.depth, plan.slots) == (1, 2)
    assert plan.notes == ("prefetch lowered from 2 to 1: 3 slots of 10 MiB do not fit the budget",)


@pytest.mark.parametrize("plan_with", ["auto", "fixed"])
def test_less_than_two_slots_is_an_error_with_the_numbers(plan_with: str) -> None:
    budget = Budget(30 * MIB - 1, 1 << 40)
    with pytest.raises(BudgetError) as caught:
        if plan_with == "auto":
            auto_plan(TEN, budget, WORK)
        else:
            fixed_plan(TEN, [Tier.NVME] * 10, budget, WORK)
    text = str(caught.value)
    for number in ("30 MiB", "7 MiB outside", "2 slots of 10 MiB", "3 MiB for activations"):
        assert number in text
    assert "max_memory[0]" in text and "batch_size" in text and "\n" not in text


def test_on_a_cpu_the_error_names_the_cpu_and_its_reads() -> None:
    budget = Budget(39 * MIB, 39 * MIB, shared=True)
    with pytest.raises(BudgetError, match=r"39 MiB on CPU memory.*40 MiB.*10 MiB for disk reads"):
        fixed_plan(TEN, [Tier.NVME] * 10, budget, WORK)
    assert fixed_plan(TEN, [Tier.NVME] * 10, Budget(1 << 40, 40 * MIB, shared=True), WORK)


@pytest.mark.parametrize("plan_with", ["auto", "fixed"])
def test_no_cpu_memory_for_disk_reads_is_an_error(plan_with: str) -> None:
    budget = Budget(40 * MIB, READS - 1)
    with pytest.raises(BudgetError, match=r"disk reads 10 MiB.*budget is.*max_memory\['cpu'\]"):
        if plan_with == "auto":
            auto_plan(TEN, budget, WORK)
        else:
            fixed_plan(TEN, [Tier.NVME] * 10, budget, WORK)


def test_layers_that_do_not_fit_the_cpu_are_an_error_with_the_numbers() -> None:
    with pytest.raises(BudgetError) as caught:
        fixed_plan(TEN, [Tier.CPU] * 10, Budget(1 << 40, 99 * MIB), WORK)
    assert re.search(r"take 100 MiB.*budget is 99 MiB.*'nvme'", str(caught.value))


@settings(max_examples=400)
@given(layers=model_layers, tiers=st.none() | tier_lists, budget=budgets, work=work_loads)
def test_what_an_error_names_will_do_and_no_byte_less(
    layers: list[LayerSize], tiers: list[Tier] | None, budget: Budget, work: Workload
) -> None:
    """Of one memory after the other, where both lack."""

    def plan(budget: Budget) -> str | None:
        try:
            if tiers is None:
                auto_plan(layers, budget, work)
            else:
                fixed_plan(layers, tiers[: len(layers)], budget, work)
        except BudgetError as error:
            return str(error)
        return None

    for _ in range(3):
        text = plan(budget)
        if text is None:
            return
        named = re.search(r"(\d+) bytes \(.*Raise max_memory\[(0|'cpu')\]", text)
        assert named is not None, text
        place = "device" if named[2] == "0" else "cpu"
        assert int(named[1]) > getattr(budget, place)
        budget = replace(budget, **{place: int(named[1])})
        less = plan(replace(budget, **{place: int(named[1]) - 1}))
        assert less is not None and f"Raise max_memory[{named[2]}]" in less
    assert plan(budget) is None


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_to_place(shared: bool) -> None:
    nothing = Workload(outside_bytes=0, reserve_bytes=0, depth=1)
    plan = auto_plan([], Budget(0, 0, shared), nothing)
    assert (plan.slots, plan.slot_bytes, plan.device_bytes, plan.cpu_bytes) == (0, 0, 0, 0)
    assert fixed_plan([], [], Budget(0, 0, shared), nothing).slots == 0
    empty = auto_plan([layer(0)] * 3, Budget(0, 0, shared), nothing)
    assert empty.count(Tier.DEVICE) == 3


def test_a_layer_much_larger_than_the_rest_stays() -> None:
    """Two slots of it do not fit, but it does, beside two slots of the others."""
    layers = [
        LayerSize(f"l{i}", n, n) for i, n in enumerate([1 << 20, 100 << 20, 1 << 20, 1 << 20])
    ]
    work = Workload(outside_bytes=0, reserve_bytes=0, depth=1, max_chunk_bytes=4096, max_chunks=1)
    with pytest.raises(BudgetError):
        auto_plan(layers, Budget(device=80 << 20, cpu=1 << 20), work)
    plan = auto_plan(layers, Budget(device=120 << 20, cpu=1 << 20), work)
    assert plan.tiers[1] is Tier.DEVICE
    assert plan.slot_bytes <= 1 << 20
