"""A run with a goal: from a job and measured rates to what rests where and what runs at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from offload.aio import AioError
from offload.config import OffloadConfig
from offload.errors import BudgetError
from offload.kernels.choices import dtype_name
from offload.kernels.host_library import why_not_host
from offload.measure.cache import kept_hardware
from offload.measure.machine import disk_of
from offload.measure.quick import quick_disk, quick_hardware
from offload.models.fused.host_rows import why_not_on_cpu
from offload.models.parts import ModelParts
from offload.models.profile import built_profile
from offload.models.quantized.modules import scratch_bytes
from offload.models.specs.spec import ModelSpec
from offload.scheduler.engine import FUSED, TRANSFORMERS, CpuAttention, Engine
from offload.scheduler.footprint import Footprint, weights_of
from offload.scheduler.hardware import Hardware
from offload.scheduler.least import least_device
from offload.scheduler.model_profile import PRECISIONS, ModelProfile
from offload.scheduler.plan import Budget, LayerSize, Plan, Workload, chunk_bytes, fixed_plan
from offload.scheduler.planner import Planned, plan_job, refusal
from offload.scheduler.setting import Goal, Job, Setting
from offload.sizes import format_size

QUICK = "the rates that this was planned with were measured in a few seconds: "
UNMEASURED = (
    "`offload info --measure` measures this machine at length, once, and keeps what it finds"
)
LACKING = "those that `offload info --measure` kept lack "
# Bytes of the GPU that no tensor of the model takes: workspaces of cuBLAS (32 MiB on Hopper) for
# the streams that compute, capture graphs and measure products, and of cuBLASLt; and rounding by
# the allocator for up to 30 tensors that come and go.
BESIDE = (4 * 32 + 64) << 20
UNLIMITED = 1 << 62  # bytes


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A plan, and the config that it led to, which has no goal."""

    plan: Plan
    planned: Planned
    config: OffloadConfig
    prefill_rows: int | None  # tokens of prompts that stand at once in a layer; None: all
    micro_batches: int  # of a decode step, which take turns


def plan_run(
    network: PreTrainedModel,
    parts: ModelParts,
    spec: ModelSpec | None,
    config: OffloadConfig,
    budget: Budget,
    files: Sequence[str],
    home: Path,
    io: Mapping[str, int],
) -> PlannedRun:
    """The best plan for the goal, using what the engine (`spec` None: the model's own modules) can
    do.

    If this machine was not measured yet, its rates are measured now, within seconds: by reading
    `files`, or a test file that is written in `home`. `io`: bytes of a disk request, and how many
    at once. Raises BudgetError, which says the least budget that would do.
    """
    assert config.goal is not None and config.job is not None
    hardware, notes = _hardware(network.dtype, config, files, home)
    engine = _engine(network, spec, config, hardware)
    on_cpu = config.compute.type == "cpu"
    beside = 0 if on_cpu else BESIDE
    model, weights = built_profile(network, parts.layers, parts.outside_bytes + beside, engine)
    model = replace(model, allocator=not on_cpu)
    room = _apart(budget, model, weights, io)
    try:
        planned = plan_job(model, hardware, room, config.job, Goal(config.goal), (weights,))
    except BudgetError as error:
        if not on_cpu:
            raise
        told = _refusal_on_cpu(budget, model, hardware, config.job, weights, io)
        raise BudgetError(told) from error
    setting, need = planned.choice.setting, planned.choice.memory
    work = Workload(
        outside_bytes=parts.outside_bytes,
        # Where the CPU computes, the budget is one of weights.
        reserve_bytes=scratch_bytes(network) if on_cpu else beside + _reserve(need),
        kv_cpu_bytes=0 if on_cpu else need.kv_cpu,
        depth=setting.depth,
        max_chunk_bytes=io["block_size"],
        max_chunks=io["queue_depth"],
    )
    plan = _as_chosen(parts, setting, budget, work)
    if setting.micro_batch < setting.batch:
        notes += (
            f"planned for micro-batches of {setting.micro_batch} sequences, which share every load "
            "of a layer: `model.offload.generate` makes them",
        )
    whole = setting.prefill_rows >= setting.batch * config.job.prompt
    return PlannedRun(
        replace(plan, notes=(*plan.notes, *notes)),
        planned,
        _without_goal(config, setting),
        None if whole or not engine.chunks else setting.prefill_rows,
        2 if setting.in_turns else 1,
    )


def _as_chosen(parts: ModelParts, setting: Setting, budget: Budget, work: Workload) -> Plan:
    """The plan that puts layers where `setting` does. Raises BudgetError where it does not fit."""
    layers = [LayerSize(p.layer.name, p.layer.nbytes, p.layer.weight_bytes) for p in parts.layers]
    plan = fixed_plan(layers, setting.tiers(), budget, work)
    if plan.depth != min(setting.depth, max(0, setting.streamed - 1)):
        raise BudgetError(
            f"a plan of {setting.depth} loads ahead was chosen, and {plan.depth} fit: lower "
            "max_memory a little, so that another is chosen"
        )
    return plan


def _without_goal(config: OffloadConfig, setting: Setting) -> OffloadConfig:
    """`config` as a user would have written it to ask for `setting`."""
    assert config.job is not None
    below = setting.cpu_sequences
    return replace(
        config,
        goal=None,
        prompt_len=None,
        gen_len=None,
        choose_batch=False,
        batch_size=setting.batch,
        max_length=config.job.length,
        kv_on_cpu=below,
        kv_dtype=config.kv_dtype if below else "auto",
        kv_attention=setting.attention.value if below else "auto",
    )


def _hardware(
    dtype: torch.dtype, config: OffloadConfig, files: Sequence[str], home: Path
) -> tuple[Hardware, tuple[str, ...]]:
    """This machine's rates, and what to say of them. The kept ones are not used if they lack
    products of this dtype.
    """
    kept = kept_hardware(config.offload_folder, config.compute)
    if kept is None and config.offload_folder is not None:
        kept = kept_hardware(None, config.compute)
    if kept is not None and kept.link_up is not None and kept.multiplies(dtype_name(dtype)):
        if files and disk_of(Path(files[0]).resolve().parent) != kept.machine.disk:
            with contextlib.suppress(AioError, OSError):  # then it is as good a guess as any
                kept = replace(kept, disk=quick_disk(files, home))  # weights are on another one
        return kept, ()
    if kept is None:
        why = UNMEASURED
    else:
        name = dtype_name(dtype)
        why = LACKING + ("the link's rate" if kept.multiplies(name) else f"products in {name}")
    return quick_hardware(config.compute, dtype, tuple(files), home), (QUICK + why,)


def _engine(
    network: PreTrainedModel, spec: ModelSpec | None, config: OffloadConfig, hardware: Hardware
) -> Engine:
    """The engine that runs the model, without what it cannot do here."""
    if spec is None:
        return TRANSFORMERS
    problem, on_cpu = why_not_on_cpu(spec, network.dtype), config.compute.type == "cpu"
    if problem is None and not on_cpu:
        problem = why_not_host()
    without = {CpuAttention.CPU} if problem is not None else set()
    return replace(
        FUSED,
        cpu_kv=FUSED.cpu_kv - without,
        int8_kv=config.int8_kv,
        overlaps=not on_cpu,  # else the cores that attend are those that compute
    )


def _apart(budget: Budget, model: ModelProfile, weights: str, io: Mapping[str, int]) -> Budget:
    """Budgets that do not overlap. Where the CPU computes, what it computes with comes first, but
    leaves room for the buffers of disk reads. What this drive's requests need beyond what plans
    count is subtracted.
    """
    largest = max((layer.slot for layer in model.layers), default=0)
    ring = chunk_bytes(largest, io["block_size"]) * io["queue_depth"]
    counted = weights_of(model, PRECISIONS[weights]).ring
    beyond = max(0, ring - counted)
    if not budget.shared:
        return Budget(device=budget.device, cpu=max(0, budget.cpu - beyond))
    device = max(0, min(budget.device, budget.cpu - max(ring, counted)))
    return Budget(device=device, cpu=max(0, budget.cpu - device - beyond))


def _refusal_on_cpu(
    budget: Budget,
    model: ModelProfile,
    hardware: Hardware,
    job: Job,
    weights: str,
    io: Mapping[str, int],
) -> str:
    """Why memory does not suffice where the CPU computes: max_memory['cpu'] covers everything, and
    max_memory[0], if it is less, what the CPU computes with.
    """
    job = job if job.batch is not None else replace(job, batch=1)
    has = f"{format_size(budget.cpu)} of CPU memory"
    if budget.device < budget.cpu:
        has += f", of which max_memory[0] lets it compute with {format_size(budget.device)},"

    def least(room: Budget) -> int:
        return least_device(model, hardware, job, (weights,), room.cpu)[0]

    endless = Budget(UNLIMITED, UNLIMITED, shared=True)
    room = _apart(endless, model, weights, io)
    computed = least(room)
    every = endless.cpu - room.device + computed  # beside it is what disk reads pass through
    needs: dict[int | str, int] = {}
    if every > budget.cpu:
        needs["cpu"] = every
        if computed > budget.device != budget.cpu:  # where it is not named it is as much
            needs[0] = computed
    else:
        needs[0] = least(_apart(budget, model, weights, io))
    needed = (f"{n} bytes ({format_size(n)}) as max_memory[{p!r}]" for p, n in needs.items())
    held = f"the CPU computes, and the {has} hold"
    return refusal(model, held, job, (weights,), " and ".join(needed))


def _reserve(need: Footprint) -> int:
    """Bytes that are kept free on the GPU: for everything but weights."""
    return need.kv_device + need.kv_slots + need.hidden + need.workspace
