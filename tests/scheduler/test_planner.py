"""The planner: within the budgets, no worse than anything simpler, and clear where nothing fits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import BLOOM_176B, GIB, H200, LLAMA_2_70B, OPT_13B, OPT_30B, OPT_66B, TINY, llama, opt

from offload.errors import BudgetError
from offload.scheduler.engine import EVERYTHING, FUSED, TRANSFORMERS, CpuAttention, Engine
from offload.scheduler.estimate import estimate
from offload.scheduler.footprint import Footprint, footprint
from offload.scheduler.hardware import Hardware, HardwareError
from offload.scheduler.least import least_cpu, least_device
from offload.scheduler.model_profile import LayerProfile, ModelProfile
from offload.scheduler.plan import Budget, LayerSize, Tier, Workload, auto_plan
from offload.scheduler.planner import TIE, plan_job
from offload.scheduler.search_space import Point, Space
from offload.scheduler.setting import Goal, Job, Setting
from offload.sizes import format_size

MODELS = [OPT_13B, OPT_30B, LLAMA_2_70B, BLOOM_176B, TINY]
NEVER = 0.06  # ties, and a search that need not end in the very best

budgets = st.builds(
    Budget,
    st.integers(2 * GIB, 150 * GIB),
    st.sampled_from([0, 1, 20, 60, 110, 400]).map(GIB.__mul__),
)
jobs = st.builds(
    Job, st.integers(1, 4000), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 200))
)
rates = st.floats(0.3, 3.0)


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """The H200, but for other proportions; some have no disk, or no attention on the CPU."""
    attention, disk = draw(st.booleans()), draw(st.booleans())
    return replace(
        H200,
        link_up=55e9 * draw(rates),
        disk=1.7e9 * draw(rates) if disk else None,
        cpu_attention={"float16": ((1, 79e9 * draw(rates)),)} if attention else {},
        hbm=4.39e12 * draw(rates),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS), machines(), budgets, jobs, st.sampled_from(Goal),
    st.sampled_from([(), ("fp16", "int4"), ("int8",)]),
)  # fmt: skip
def test_what_is_chosen_fits_and_is_no_worse_than_what_is_simpler(
    model: ModelProfile,
    hardware: Hardware,
    budget: Budget,
    job: Job,
    goal: Goal,
    weights: tuple[str, ...],
) -> None:
    try:
        planned = plan_job(model, hardware, budget, job, goal, weights)
    except BudgetError:
        return
    choice = planned.choice
    for found in filter(None, (choice, planned.runner_up)):
        memory = footprint(model, found.job, found.setting)
        assert memory == found.memory and memory.fits(budget)
        how = found.setting
        assert how.resident + how.cpu + how.nvme == len(model.layers)
        assert min(how.resident, how.cpu, how.nvme, how.gpu_sequences, how.cpu_sequences) >= 0
        assert how.batch == (job.batch or (how.batch if goal is Goal.THROUGHPUT else 1))
        assert (how.cpu_sequences > 0) == (how.attention is not CpuAttention.NONE)
        assert how.weights in (weights or (model.native,))
        assert hardware.disk is not None or how.nvme == 0
    for simple in simpler(model, hardware, budget, choice.job, choice.setting.weights):
        score = estimate(model, hardware, choice.job, simple).score(goal)
        assert choice.score(goal) >= score * (1 - TIE - 1e-9)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(MODELS), machines(), budgets, jobs, st.sampled_from(Goal),
    st.sampled_from([FUSED, TRANSFORMERS]),
)  # fmt: skip
def test_a_plan_has_nothing_that_its_engine_does_not_do(
    model: ModelProfile, hardware: Hardware, budget: Budget, job: Job, goal: Goal, engine: Engine
) -> None:
    try:
        planned = plan_job(replace(model, engine=engine), hardware, budget, job, goal)
    except BudgetError:
        return
    for found in filter(None, (planned.choice, planned.runner_up)):
        how = found.setting
        assert how.attention in {CpuAttention.NONE, *engine.cpu_kv}
        assert how.prefill_passes == 1
        assert how.decode_micro_batches == 1 or (
            engine.overlaps if how.in_turns else engine.lockstep
        )
        assert not how.in_turns or how.cpu_sequences >= how.decode_micro_batches
        assert engine.chunks or how.prefill_rows == how.micro_batch * job.prompt


def test_modules_run_in_micro_batches_where_memory_is_tight() -> None:
    """The activations of all prompts at once would leave no room for keys and values."""
    model, budget = replace(LLAMA_2_70B, engine=TRANSFORMERS), Budget(24 * GIB, 160 * GIB)
    machine = replace(H200, launch=6e-6)
    planned = plan_job(model, machine, budget, Job(2000, 32)).choice
    how = planned.setting
    assert how.decode_micro_batches > 1 and how.prefill_rows == how.micro_batch * 2000
    whole = replace(how, decode_micro_batches=1, prefill_rows=how.batch * 2000)
    assert not footprint(model, planned.job, whole).fits(budget)
    # Where there is room, one batch takes the host less.
    small = replace(OPT_13B, engine=TRANSFORMERS)
    roomy = plan_job(small, machine, Budget(80 * GIB, 160 * GIB), Job(512, 32, 16)).choice
    assert roomy.setting.decode_micro_batches == 1
    # A batch that is given and does not fit at once is read in parts.
    batch = how.batch // 2 * 2
    given_batch = plan_job(model, machine, budget, Job(2000, 32, batch)).choice
    assert given_batch.memory.fits(budget) and given_batch.setting.batch == batch


def test_a_step_is_cut_where_that_lets_cores_and_the_gpu_work_at_once() -> None:
    model, budget = replace(LLAMA_2_70B, engine=FUSED), Budget(24 * GIB, 110 * GIB)
    machine = replace(H200, exchange=1e-4, launch=6e-6, hbm_copy=3.9e12)
    found = plan_job(model, machine, budget, Job(512, 128), weights=("int4",)).choice
    assert found.setting.in_turns and found.setting.depth == 2
    assert found.memory.slots == 3 * footprint(model, found.job, found.setting).slots // 3
    serial = replace(model, engine=replace(FUSED, overlaps=False))
    other = plan_job(serial, machine, budget, Job(512, 128), weights=("int4",)).choice
    assert not other.setting.in_turns
    assert found.decode_rate > 1.05 * other.decode_rate
    # Where the link takes longer than all else, one after the other is as quick, and simpler.
    slow = replace(machine, link_up=8e9, link_up_both=8e9, link_beside=8e9)
    how = plan_job(model, slow, budget, Job(512, 128, 64), weights=("int4",)).choice.setting
    assert not how.in_turns


@pytest.mark.parametrize("batch", [None, 16])
def test_parts_that_take_turns_all_have_sequences_that_cores_attend_to(batch: int | None) -> None:
    """One sequence is in no two parts: a step would not be cut, and half of the plan has none."""
    model, job = replace(OPT_30B, engine=FUSED), Job(512, 32, batch)
    space = Space(model, job, Budget(24 * GIB, 110 * GIB), disk=True)
    for sequences in (1, 2, 3):
        point = Point("fp16", CpuAttention.CPU, 0, sequences, parts=2, depth=2)
        how = space.complete(point)
        assert how is not None and how.cpu_sequences == sequences
        assert how.in_turns == (sequences > 1)
        assert estimate(model, H200, job, how.halved()).seconds > 0


@pytest.mark.parametrize("engine", [TRANSFORMERS, EVERYTHING], ids=lambda e: e.name)
def test_half_of_a_plan_fits_where_the_whole_does(engine: Engine) -> None:
    """A batch of 3 in parts of one does not become one of 2 in a single part, whose activations
    may be larger than the keys and values that are saved.
    """
    model = replace(llama("wide", 6, 1024, 16, 1, 8192), engine=engine)
    for batch, parts in itertools.product(range(2, 40), (1, 2, 4, 8, 16, 40)):
        count = min(parts, batch)
        parted = (1, count) if engine.lockstep else (count, 1)
        rows = -(-batch // count) * 3000 if engine.lockstep else 256
        how = Setting("fp16", 6, 0, 0, 0, batch, 0, CpuAttention.NONE, rows, *parted)
        whole, half = (footprint(model, Job(3000, 9), x) for x in (how, how.halved()))
        assert half.fits(Budget(whole.device, whole.cpu)), how


def simpler(
    model: ModelProfile, hardware: Hardware, budget: Budget, job: Job, weights: str
) -> Iterator[Setting]:
    """All layers resident, all streamed, and the greedy filling of `device_map="auto"`, with keys
    and values on the GPU: those that fit."""
    count, batch = len(model.layers), job.batch or 8
    base = Setting(weights, count, 0, 0, 0, batch, 0, CpuAttention.NONE, 2048, 1, 1)
    found = [base, replace(base, resident=0, cpu=count, depth=1)]
    found.append(replace(base, resident=0, nvme=count, depth=1))
    spare = footprint(model, job, replace(base, resident=0, nvme=count, depth=0))
    sizes = [LayerSize("", model.slot_bytes(x, base.precision), 1) for x in model.layers]
    work = Workload(model.outside_bytes, spare.device - model.outside_bytes - spare.slots, 2)
    try:
        tiers = auto_plan(sizes, budget, work)
    except BudgetError:
        tiers = None
    if tiers is not None and tiers.streamed_bytes:
        n = [tiers.count(tier) for tier in (Tier.DEVICE, Tier.CPU, Tier.NVME)]
        found.append(replace(base, resident=n[0], cpu=n[1], nvme=n[2], depth=tiers.depth))
    for how in found:
        if footprint(model, job, how).fits(budget) and (hardware.disk or not how.nvme):
            yield how


@settings(max_examples=15, deadline=None)
@given(machines(), budgets, jobs, st.sampled_from([Goal.THROUGHPUT, Goal.LATENCY]), st.data())
def test_more_of_anything_is_never_worse(
    hardware: Hardware, budget: Budget, job: Job, goal: Goal, data: st.DataObject
) -> None:
    model = data.draw(st.sampled_from([OPT_30B, LLAMA_2_70B]))
    try:
        before = plan_job(model, hardware, budget, job, goal).choice
    except BudgetError:
        return
    better = data.draw(
        st.sampled_from(["device", "cpu", "link_up", "disk", "hbm", "cpu_attention", "weights"])
    )
    weights: tuple[str, ...] = ()
    if better in ("device", "cpu"):
        budget = replace(budget, **{better: getattr(budget, better) * 5 // 4})
    elif better == "weights":
        weights = ("fp16", "int4")
    elif better == "cpu_attention":
        hardware = replace(hardware, cpu_attention={"float16": ((1, 300e9),)})
    elif getattr(hardware, better) is not None:
        hardware = replace(hardware, **{better: getattr(hardware, better) * 1.5})
    after = plan_job(model, hardware, budget, job, goal, weights).choice
    assert after.score(goal) >= before.score(goal) * (1 - NEVER)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(MODELS), machines(), jobs, st.integers(0, 40), st.integers(0, 40))
def test_a_refusal_says_the_least_that_would_do(
    model: ModelProfile, hardware: Hardware, job: Job, device: int, cpu: int
) -> None:
    budget = Budget(device * GIB // 8, cpu * GIB)
    try:
        plan_job(model, hardware, budget, job)
        return
    except BudgetError as error:
        message = str(error)
    names = (model.native,)
    enough = least_device(model, hardware, job, names, budget.cpu)
    assert f"{enough[0]} bytes ({format_size(enough[0])}) of GPU memory" in message
    plan_job(model, hardware, replace(budget, device=enough[0]), job, Goal.LATENCY)
    with pytest.raises(BudgetError):
        plan_job(model, hardware, replace(budget, device=enough[0] - 1), job)
    memory = least_cpu(model, hardware, job, names, budget.device)
    if memory is not None:
        assert f"{memory[0]} bytes" in message
        plan_job(model, hardware, replace(budget, cpu=memory[0]), job, Goal.LATENCY)
        with pytest.raises(BudgetError):
            plan_job(model, hardware, replace(budget, cpu=memory[0] - 1), job)


SMALL = llama("small", 6, 1024, 16, 4, 4096)


@pytest.mark.parametrize("goal", [Goal.THROUGHPUT, Goal.LATENCY])
@pytest.mark.parametrize("batch", [None, 24])
@pytest.mark.parametrize(("device", "cpu"), [(200, 160), (240, 400), (300, 200)])
def test_nothing_in_the_whole_space_is_much_better(
    device: int, cpu: int, batch: int | None, goal: Goal
) -> None:
    """Against every setting of a small model, of which there are many."""
    if batch is None and goal is not Goal.THROUGHPUT:
        return
    budget = Budget(device << 20, cpu << 20)
    job = Job(200, 40, batch)
    small = replace(H200, disk=1.7e9, link_up=20e9)
    chosen = plan_job(SMALL, small, budget, job, goal).choice
    best = max(
        estimate(SMALL, small, job, how, exact=False).score(goal)
        for how in every_setting(SMALL, job, budget)
    )
    # The bounds that are compared with are of passes in which no load ever waits.
    own = estimate(SMALL, small, job, chosen.setting, exact=False).score(goal)
    assert own >= 0.95 * best


def every_setting(model: ModelProfile, job: Job, budget: Budget) -> Iterator[Setting]:
    count = len(model.layers)
    sequences = [0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    for resident, way in itertools.product(range(count + 1), CpuAttention):
        for nvme, rows, passes in itertools.product(
            range(count - resident + 1), (256, 2048), {1, 3, job.batch or 8}
        ):
            for on_cpu in [0] if way is CpuAttention.NONE else sequences[1:]:
                for on_gpu in sequences if job.batch is None else [job.batch - on_cpu]:
                    if on_gpu < 0 or on_gpu + on_cpu == 0:
                        continue
                    how = Setting(
                        "fp16", resident, count - resident - nvme, nvme,
                        min(1, max(0, count - resident - 1)), on_gpu, on_cpu, way, rows,
                        min(passes, on_gpu + on_cpu), 1,
                    )  # fmt: skip
                    if footprint(model, job, how).fits(budget):
                        yield how


def test_the_simpler_plan_is_kept_where_it_ties() -> None:
    """Two sequences in CPU memory would free the room of one layer of 64; and int8 gains nothing
    where the matrix units set the time."""
    budget, job = Budget(24 * GIB, 400 * GIB), Job(512, 32, 2)
    planned = plan_job(OPT_66B, H200, budget, job, Goal.LATENCY)
    assert planned.choice.setting.attention is CpuAttention.NONE
    assert planned.runner_up is not None
    assert planned.runner_up.setting.attention is CpuAttention.CPU
    gain = planned.choice.seconds / planned.runner_up.seconds
    assert 1 < gain <= 1 / (1 - TIE)
    roomy = Budget(140 * GIB, 400 * GIB)
    both = plan_job(OPT_13B, H200, roomy, Job(2000, 2, 16), weights=("fp16", "int8"))
    assert both.choice.setting.weights == "fp16" and both.choice.setting.streamed == 0


@pytest.mark.parametrize(
    ("model", "budget", "job", "full"),
    [
        (OPT_13B, Budget(400 * GIB, 0), Job(8, 6), 4096),  # memory for far more than gain
        (OPT_13B, Budget(400 * GIB, 0), Job(512, 32), 800),
        (OPT_13B, Budget(24 * GIB, 110 * GIB), Job(512, 32), None),  # a stream wants all that fit
        (OPT_30B, Budget(24 * GIB, 110 * GIB), Job(512, 32), None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_no_more_sequences_than_keep_the_machine_busy(
    model: ModelProfile, budget: Budget, job: Job, full: int | None
) -> None:
    choice = plan_job(model, H200, budget, job).choice
    how = choice.setting
    fewer = estimate(model, H200, job, how.halved())
    assert fewer.setting.batch in (how.batch // 2, how.batch // 2 + 1)
    assert min(fewer.rate / choice.rate, fewer.decode_rate / choice.decode_rate) < 1 - TIE / 10
    if full is None:
        on_gpu = how.gpu_sequences + max(2, how.gpu_sequences // 10)
        assert not footprint(model, job, replace(how, gpu_sequences=on_gpu)).fits(budget)
        return
    assert how.batch < full
    every = estimate(model, H200, job, replace(how, gpu_sequences=full))
    assert every.memory.fits(budget)
    assert choice.rate >= (1 - TIE) * every.rate
    assert choice.decode_rate >= (1 - TIE) * every.decode_rate


def test_half_the_sequences() -> None:
    base = Setting("fp16", 0, 4, 0, 1, 5, 3, CpuAttention.CPU, 512, 1, 2)
    assert base.in_turns
    half = base.halved()
    assert (half.gpu_sequences, half.cpu_sequences, half.in_turns) == (3, 1, False)
    last = half.halved()
    assert (last.gpu_sequences, last.cpu_sequences) == (2, 0)
    assert last.attention is CpuAttention.NONE and last.halved().batch == 1
    lockstep = replace(base, cpu_sequences=0, attention=CpuAttention.NONE, decode_micro_batches=4)
    assert lockstep.halved().decode_micro_batches == 2 and not lockstep.halved().in_turns


def test_int8_holds_more_sequences_in_cpu_memory() -> None:
    """OPT-30B with 24 GiB on the GPU, where 110 GiB beside it are full in 16 bits."""
    budget, job = Budget(24 * GIB, 110 * GIB), Job(512, 32)
    hardware = replace(H200, cpu_attention={"float16": ((1, 90e9),)}, disk=None)
    chosen = []
    for int8, rates in ((False, {}), (True, {}), (True, {"int8": ((1, 68e9),)})):
        model = replace(OPT_30B, engine=replace(FUSED, int8_kv=int8))
        measured = replace(hardware, cpu_attention={**hardware.cpu_attention, **rates})
        found = plan_job(model, measured, budget, job).choice
        assert found.memory.fits(budget)
        chosen.append(found)
    wide, uncounted, counted = chosen
    assert wide.setting.cpu_sequences > 40
    assert counted.setting.cpu_sequences > 1.6 * wide.setting.cpu_sequences
    assert counted.rate > 1.1 * wide.rate
    assert wide.rate <= uncounted.rate <= counted.rate  # no gain of time is counted on


def test_keys_and_values_come_up_where_cores_are_few() -> None:
    """Of long contexts, where weights leave the link time."""
    model = replace(OPT_30B, engine=FUSED)
    job, budget, goal = Job(16000, 64), Budget(24 * GIB, 110 * GIB), Goal.THROUGHPUT
    rates = {}
    for rate in (20e9, 79e9):
        hardware = replace(H200, cpu_attention={"float16": ((1, rate),)})
        for engine in (FUSED, replace(FUSED, cpu_kv=frozenset({CpuAttention.CPU}))):
            model = replace(OPT_30B, engine=engine)
            choice = plan_job(model, hardware, budget, job, goal, ("int4",)).choice
            assert choice.setting.cpu_sequences
            rates[rate, engine is FUSED] = choice.decode_rate, choice.setting.attention
    assert rates[20e9, True][1] is CpuAttention.GPU
    assert rates[20e9, True][0] > 2 * rates[20e9, False][0]
    assert rates[79e9, True] == rates[79e9, False]


def test_fits_takes_the_least_memory_of_the_gpu() -> None:
    job, budget = Job(512, 32, 4), Budget(24 * GIB, 110 * GIB)
    least = least_device(OPT_30B, H200, job, ("fp16",), budget.cpu)
    planned = plan_job(OPT_30B, H200, budget, job, Goal.FITS)
    assert least is not None and planned.choice.memory.device == least[0]
    assert planned.runner_up is not None
    assert planned.runner_up.memory.device > least[0]
    assert planned.runner_up.seconds < planned.choice.seconds


def test_latency_fills_the_gpu_with_layers() -> None:
    choice = plan_job(OPT_30B, H200, Budget(24 * GIB, 110 * GIB), Job(16, 8), Goal.LATENCY).choice
    assert choice.setting.batch == 1 and choice.setting.resident >= 15
    layer = choice.memory.resident // choice.setting.resident
    assert choice.memory.device + layer > 24 * GIB
    assert choice.limit.startswith("link up")
    assert choice.full(Budget(24 * GIB, 110 * GIB)) == ("GPU memory",)


def test_tiers_are_those_of_the_counts() -> None:
    choice = plan_job(OPT_30B, H200, Budget(24 * GIB, 30 * GIB), Job(16, 8), Goal.LATENCY).choice
    how, tiers = choice.setting, choice.setting.tiers()
    assert [tiers.count(t) for t in (Tier.DEVICE, Tier.CPU, Tier.NVME)] == [
        how.resident,
        how.cpu,
        how.nvme,
    ]
    assert min(how.resident, how.cpu, how.nvme) > 0
    assert how.as_dict()["tiers"] == [tier.value for tier in tiers]


def test_layers_of_different_size() -> None:
    """A few dense layers before many sparse ones, as DeepSeek has them."""
    dense = LayerProfile(400 << 20, 0, 400 << 20, 50 << 20, 9)
    sparse = LayerProfile(3 << 30, 0, 200 << 20, 3 << 29, 12)
    mixed = replace(OPT_13B, layers=(dense,) * 3 + (sparse,) * 20)
    budget = Budget(40 * GIB, 200 * GIB)
    planned = plan_job(mixed, H200, budget, Job(100, 10, 4))
    assert planned.choice.memory.fits(budget)
    sizes = [mixed.layer_bytes(x, planned.choice.setting.precision) for x in mixed.layers]
    moved = sum(
        size
        for size, tier in zip(sizes, planned.choice.setting.tiers(), strict=True)
        if tier is not Tier.DEVICE
    )
    assert planned.choice.decode.busy["link up"] == pytest.approx(moved / 55e9)


@pytest.mark.parametrize("missing", ["hbm", "matrix", "link_up"])
def test_a_rate_that_is_needed_and_not_known(missing: str) -> None:
    lame = replace(H200, **{missing: {} if missing == "matrix" else None}, absent={missing: "why"})
    with pytest.raises(HardwareError, match=r"lack.*: why\. Measure on the machine"):
        plan_job(OPT_30B, lame, Budget(24 * GIB, 110 * GIB), Job(16, 8))


def test_unknown_weights_and_impossible_jobs() -> None:
    with pytest.raises(ValueError, match="'fp3' are not known; choose of fp32"):
        plan_job(OPT_30B, H200, Budget(1, 1), Job(1, 1), weights=("fp3",))
    with pytest.raises(ValueError, match="gen is 0; a job needs at least 1"):
        Job(1, 0)
    few = replace(OPT_30B, positions=64)
    assert plan_job(few, H200, Budget(24 * GIB, 110 * GIB), Job(60, 4, 1)).choice.job.length == 64
    with pytest.raises(ValueError, match=r"has 64 positions, fewer than the 60 \+ 5 tokens of a"):
        plan_job(few, H200, Budget(24 * GIB, 110 * GIB), Job(60, 5, 1))
    for job in ((10**400, 1), (1, (1 << 30) + 1), (1, 1, 10**400)):
        with pytest.raises(ValueError, match="; plans are made for at most 1073741824"):
            Job(*job)


@pytest.mark.parametrize("batch", [None, 1, 8])
def test_a_plan_takes_little_time(batch: int | None) -> None:
    """Of the largest models, with all precisions, where something of everything is needed."""
    large = [opt("opt-175b", 96, 12288), llama("llama-3-405b", 126, 16384, 128, 8, 53248)]
    for model in large:
        start = time.process_time()
        plan_job(
            model, H200, Budget(24 * GIB, 110 * GIB), Job(512, 32, batch),
            weights=("fp16", "int8", "int4"),
        )  # fmt: skip
        assert time.process_time() - start < 2


@pytest.mark.parametrize("goal", [Goal.THROUGHPUT, Goal.LATENCY])
@pytest.mark.parametrize(("batch", "budget"), [(10**6, (5, 100)), (1 << 30, (9_000, 99_000))])
def test_a_search_takes_larger_steps_over_more_sequences(
    goal: Goal, batch: int, budget: tuple[int, int]
) -> None:
    """Keys and values of a million short sequences of a small model are 36 GB."""
    few_words = replace(TINY, vocabulary=100, engine=EVERYTHING)
    job, room = Job(17, 32, batch), Budget(*(x * GIB for x in budget))
    planned = plan_job(few_words, H200, room, job, goal)
    assert planned.choice.setting.cpu_sequences > 4096
    assert planned.tried < 2000


def test_a_layer_that_is_left_in_a_file_makes_room_for_what_reads_it() -> None:
    model, job = replace(TINY, engine=FUSED), Job(62, 1, 2)
    point = Point("fp16", CpuAttention.CPU, 0, 1)

    def needed(budget: Budget, spared: int) -> Footprint | None:
        found = Space(model, job, budget, disk=True)._setting(replace(point, spared=spared), 0, 1)
        return None if found is None else footprint(model, job, found)

    all_in_memory, some = (needed(Budget(GIB, GIB), spared) for spared in (0, 1))
    assert all_in_memory is not None and all_in_memory.ring == 0
    assert some is not None and some.cpu > all_in_memory.cpu
    for room in (0, 1000, some.ring):
        budget = Budget(GIB, all_in_memory.cpu + room)
        found = [needed(budget, spared) for spared in range(5)]
        assert found[0] == all_in_memory
        assert all(need is None or need.fits(budget) for need in found)


@pytest.mark.parametrize("gpu_memory", [70, 110, 200])
def test_more_memory_does_not_take_sequences_beyond_what_few_rows_gain(gpu_memory: int) -> None:
    """Beyond the last row that is multiplied as stored, weights are made whole in every step."""
    hardware = replace(H200, few_rows={"int4": ((1, 4e12), (64, 2.5e12))})
    model, job = replace(LLAMA_2_70B, engine=FUSED), Job(512, 512)
    choice = plan_job(model, hardware, Budget(gpu_memory * GIB, 0), job, weights=("int4",)).choice
    assert choice.setting.streamed == 0
    for batch in (1, 16, 33, 64, 65, 128, 256):
        other = replace(choice.setting, gpu_sequences=batch)
        if footprint(model, job, other).device <= gpu_memory * GIB:
            rate = estimate(model, hardware, job, other).rate
            assert choice.rate >= (1 - TIE) * rate, batch
