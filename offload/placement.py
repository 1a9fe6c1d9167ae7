"""What rests where in a run: as its goal plans, as the user says, or filled by size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from offload.budget import memory_budget
from offload.checkpoint import Checkpoint
from offload.config import OffloadConfig
from offload.errors import BudgetError, UnsupportedError
from offload.kernels.host_library import why_not_host
from offload.models.fused.host_rows import why_not_on_cpu
from offload.models.kv.host_columns import HostColumns
from offload.models.kv.streamed_kv import places_bytes
from offload.models.modules import find_layers
from offload.models.parts import ModelParts
from offload.models.quantized.modules import scratch_bytes
from offload.models.shape import DEFAULT_LENGTH, ModelShape
from offload.models.specs.spec import ModelSpec
from offload.planned import plan_run
from offload.scheduler.plan import (
    CHUNK_BYTES,
    CHUNKS,
    LayerSize,
    Plan,
    Tier,
    Workload,
    auto_plan,
    fixed_plan,
)
from offload.scheduler.planner import Planned
from offload.sizes import format_size

DEFAULT_PREFETCH = {"cuda": 2, "cpu": 1}
# Disk requests in flight where the drive was not tuned (`offload bench nvme --tune`).
IN_FLIGHT = {"cuda": CHUNKS, "cpu": CHUNKS // 2}
# Tokens of prompts that stand at once in a layer, where all are too many.
PREFILL_ROWS = (8192, 4096, 2048, 1024)


@dataclass(frozen=True, slots=True)
class Placement:
    """The plan of a run, and what else was decided with it."""

    plan: Plan
    prefill_rows: int | None  # tokens of prompts that stand at once in a layer; None: all
    config: OffloadConfig  # without a goal, but with what that led to
    kv_cpu_bytes: int  # CPU memory for keys and values
    planned: Planned | None = None  # where there was a goal
    micro_batches: int | None = None  # of a decode step, which take turns; None: not planned


def place(
    network: PreTrainedModel,
    parts: ModelParts,
    spec: ModelSpec | None,
    checkpoint: Checkpoint | None,
    home: Path,
    config: OffloadConfig,
    io: Mapping[str, Any],
) -> Placement:
    """Where everything goes. `spec` None: the model's own modules run it; `home`: where weights are
    packed; `io`: the drive's tuned settings. Raises BudgetError, with the least that would do, and
    UnsupportedError.
    """
    untuned = {"block_size": CHUNK_BYTES, "queue_depth": IN_FLIGHT[config.compute.type]}
    io = {**untuned, **io}
    if config.goal is None:
        kv_cpu_bytes = _kv_cpu_bytes(network, spec, config)
        plan, rows = _filled(network, parts, spec, kv_cpu_bytes, config, io)
        return Placement(plan, rows, config, kv_cpu_bytes)
    extents = checkpoint.tensors.values() if checkpoint is not None else ()
    files = list(dict.fromkeys(extent.file for extent in extents))
    budget = memory_budget(config)
    found = plan_run(network, parts, spec, config, budget, files, home, io)
    kv_cpu_bytes = _kv_cpu_bytes(network, spec, found.config)
    return Placement(
        found.plan,
        found.prefill_rows,
        found.config,
        kv_cpu_bytes,
        found.planned,
        found.micro_batches,
    )


def own_tier_modules(network: PreTrainedModel, tiers: Mapping[str, Tier]) -> list[str]:
    """Modules outside the layers that were given a tier by name."""
    layers = find_layers(network)
    modules = {name for name, _ in network.named_modules()}
    unknown = [name for name in tiers if name not in modules]
    if unknown:
        raise ValueError(
            f"device_map names modules that {type(network).__name__} does not have: "
            f"{', '.join(map(repr, unknown))}; its layers are {next(iter(layers))!r} and so on"
        )
    inside = [n for n in tiers if any(n.startswith(f"{layer}.") for layer in layers)]
    if inside:
        raise ValueError(
            f"device_map names parts of a layer: {', '.join(map(repr, inside))}; what moves is the "
            f"whole layer"
        )
    if tiers:
        for layer in layers:
            _tier_of(layer, tiers)
    return [
        name
        for name, tier in tiers.items()
        if tier is not Tier.DEVICE
        and name not in layers
        and not any(layer.startswith(f"{name}.") or not name for layer in layers)
        and any(True for _ in network.get_submodule(name).parameters())
    ]


def _filled(
    network: PreTrainedModel,
    parts: ModelParts,
    spec: ModelSpec | None,
    kv_cpu_bytes: int,
    config: OffloadConfig,
    io: Mapping[str, Any],
) -> tuple[Plan, int | None]:
    """The plan, and how many tokens of prompts a layer computes at once (None: all). They are fewer
    only if the loads ahead that were asked for would not fit otherwise. Raises BudgetError.
    """
    few = spec is not None and config.compute.type != "cpu"  # whose memory is one of weights
    best: tuple[Plan, int | None] | None = None
    problem: BudgetError | None = None
    for rows in (*(() if config.kv_on_cpu else (None,)), *(PREFILL_ROWS if few else ())) or (None,):
        reserve = _reserve(network, spec, config, rows)
        try:
            plan = _plan(parts, config, reserve, kv_cpu_bytes, io)
        except BudgetError as error:
            problem = error
            continue
        if best is None or plan.depth > best[0].depth:
            best = plan, rows
        if not plan.notes:
            break
    if best is None:
        assert problem is not None
        raise problem
    return best


def _plan(
    parts: ModelParts,
    config: OffloadConfig,
    reserve_bytes: int,
    kv_cpu_bytes: int,
    io: Mapping[str, Any],
) -> Plan:
    sizes = [LayerSize(p.layer.name, p.layer.nbytes, p.layer.weight_bytes) for p in parts.layers]
    kind = config.compute.type
    work = Workload(
        outside_bytes=parts.outside_bytes,
        reserve_bytes=reserve_bytes,
        # Where the CPU computes, the budget is one of weights.
        kv_cpu_bytes=0 if kind == "cpu" else kv_cpu_bytes,
        depth=config.prefetch or DEFAULT_PREFETCH[kind],
        max_chunk_bytes=io["block_size"],
        max_chunks=io["queue_depth"],
    )
    budget = memory_budget(config)
    if not config.tiers:
        plan = auto_plan(sizes, budget, work)
    else:
        plan = fixed_plan(
            sizes, [_tier_of(p.layer.name, config.tiers) for p in parts.layers], budget, work
        )
    if config.asked_to_offload and not plan.streamed_bytes:
        raise BudgetError(
            f"device_map={config.device_map!r} asks for offloading, but none of the {len(sizes)} "
            f"layers ({format_size(sum(s.weight_bytes for s in sizes))}) was placed off the "
            "compute device"
        )
    return plan


def _tier_of(layer: str, tiers: Mapping[str, Tier]) -> Tier:
    """The tier of the longest name that is the layer or a prefix of it."""
    found = [n for n in tiers if n == layer or n == "" or layer.startswith(f"{n}.")]
    if not found:
        raise ValueError(
            f"device_map gives {layer!r} no place; name it, a prefix of it, or '' for everything "
            f"else"
        )
    return tiers[max(found, key=len)]


def _reserve(
    network: PreTrainedModel,
    spec: ModelSpec | None,
    config: OffloadConfig,
    prefill_rows: int | None,
) -> int:
    scratch = scratch_bytes(network)  # a quantised weight stands whole while it is multiplied with
    if config.compute.type == "cpu":
        return scratch  # there the budget is one of weights
    shape, itemsize = ModelShape.of(network.config), network.dtype.itemsize
    length, fused = _length(network, config), spec is not None
    if spec is not None and config.streamed_kv:
        heads = [(layer.layout.kv_heads, layer.layout.head_dim) for layer in spec.layers]
        scratch += places_bytes(config.kv_on_cpu, heads, length, network.dtype, config.int8_kv)
    return scratch + shape.reserve_bytes(
        config.batch_size, length, itemsize, fused, config.kv_on_cpu, prefill_rows
    )


def _length(network: PreTrainedModel, config: OffloadConfig) -> int:
    """Tokens of a sequence that memory is kept for."""
    return config.max_length or min(ModelShape.of(network.config).max_length, DEFAULT_LENGTH)


def _kv_cpu_bytes(network: PreTrainedModel, spec: ModelSpec | None, config: OffloadConfig) -> int:
    """CPU memory for keys and values; raises UnsupportedError where none can be used."""
    if not config.kv_on_cpu or spec is None:
        return 0
    problem = None if config.streamed_kv else why_not_on_cpu(spec, network.dtype)
    if problem is None and not config.streamed_kv and config.compute.type != "cpu":
        problem = why_not_host()
        problem = problem and f"{problem} (kv_attention='gpu' does without)"
    if problem is not None:
        raise UnsupportedError(f"kv_on_cpu={config.kv_on_cpu}: {problem}")
    columns = config.kv_on_cpu * _length(network, config)
    return columns * sum(column_bytes(spec, network.dtype, config))


def column_bytes(spec: ModelSpec, dtype: torch.dtype, config: OffloadConfig) -> list[int]:
    """Bytes in each layer of one token of a sequence in CPU memory."""
    shapes = [(2, layer.layout.kv_heads, 1, layer.layout.head_dim) for layer in spec.layers]
    return [HostColumns.nbytes(shape, dtype, config.int8_kv) for shape in shapes]
