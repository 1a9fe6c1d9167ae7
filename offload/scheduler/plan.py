"""Which layer lives on which tier, and how many slots the stream gets: pure arithmetic on bytes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.errors import BudgetError
from offload.sizes import format_size

# Of pinned memory that disk reads pass through: bytes of a request and requests in flight, at most.
CHUNK_BYTES, CHUNKS = 8 << 20, 16


class Tier(str, enum.Enum):
    """Where a layer's weights rest between passes."""

    DEVICE = "device"  # on the compute device, never moved
    CPU = "cpu"  # in (pinned) CPU memory
    NVME = "nvme"  # in files


@dataclass(frozen=True, slots=True)
class LayerSize:
    """What the planner knows of a layer."""

    name: str
    slot_bytes: int  # padded, as it stands in a slot
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be used. `shared`: compute device and CPU tier are the same memory, and `cpu`
    caps their sum.
    """

    device: int
    cpu: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What stands where. All sizes are bytes."""

    layers: tuple[LayerSize, ...]
    tiers: tuple[Tier, ...]
    slots: int
    depth: int  # loads kept ahead of the layer in use
    chunk_bytes: int  # of one disk request
    chunks: int  # in flight
    outside_bytes: int  # embeddings, norms, buffers: what stands outside the layers, resident
    reserve_bytes: int  # left free for activations and KV cache
    budget: Budget
    notes: tuple[str, ...] = field(default=())
    kv_cpu_bytes: int = 0  # of CPU memory, for keys and values

    @property
    def slot_bytes(self) -> int:
        """Size of one slot: the largest streamed layer."""
        return max((s.slot_bytes for s, t in self._pairs() if t is not Tier.DEVICE), default=0)

    @property
    def ring_bytes(self) -> int:
        """Pinned memory that disk reads pass through in every pass; loading alone gives it back."""
        return self.chunk_bytes * self.chunks if Tier.NVME in self.tiers else 0

    @property
    def streamed_bytes(self) -> int:
        """Weight bytes that cross the link in one pass."""
        return self.weight_bytes(Tier.CPU) + self.weight_bytes(Tier.NVME)

    @property
    def device_bytes(self) -> int:
        """What the plan puts on the compute device, the reserve not counted."""
        return self.outside_bytes + self.slot_total + self._slot_sum(Tier.DEVICE)

    @property
    def slot_total(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def cpu_bytes(self) -> int:
        """What the plan puts in CPU memory: weights at rest, disk reads, keys and values."""
        return self._slot_sum(Tier.CPU) + self.ring_bytes + self.kv_cpu_bytes

    def weight_bytes(self, tier: Tier) -> int:
        """Weight bytes of the layers on `tier`."""
        return sum(s.weight_bytes for s, t in self._pairs() if t is tier)

    def count(self, tier: Tier) -> int:
        """How many layers rest on `tier`."""
        return self.tiers.count(tier)

    def _pairs(self) -> zip[tuple[LayerSize, Tier]]:
        return zip(self.layers, self.tiers, strict=True)

    def _slot_sum(self, tier: Tier) -> int:
        return sum(s.slot_bytes for s, t in self._pairs() if t is tier)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a plan is made for, besides the layers."""

    outside_bytes: int
    reserve_bytes: int
    depth: int
    max_chunk_bytes: int = CHUNK_BYTES
    max_chunks: int = CHUNKS
    kv_cpu_bytes: int = 0  # that keys and values take in CPU memory


def fixed_plan(
    layers: Sequence[LayerSize], tiers: Sequence[Tier], budget: Budget, work: Workload
) -> Plan:
    """The plan for tiers that the user chose; only the depth gives way. Raises BudgetError."""
    plan = _fit_depth(layers, tiers, budget, work)
    if plan is None:
        least = _assemble(layers, tiers, budget, work, min(1, work.depth))
        raise BudgetError(_too_small([least], budget))
    _check_cpu([plan], budget)
    return plan


def auto_plan(layers: Sequence[LayerSize], budget: Budget, work: Workload) -> Plan:
    """Fill the compute device, then CPU memory; the rest stays in files. Raises BudgetError."""
    resident = [Tier.DEVICE] * len(layers)
    plan = _assemble(layers, resident, budget, work, work.depth)
    if _device_need(plan) <= _device_limit(budget):
        return plan
    streamed = [Tier.NVME] * len(layers)
    least = _fit_depth(layers, streamed, budget, work)
    tried = [plan, _assemble(layers, streamed, budget, work, 1)]
    # A slot is as large as the largest layer that moves: one that stays may cost less than that.
    for index in sorted(range(len(layers)), key=lambda i: -layers[i].slot_bytes):
        if least is not None:
            break
        streamed[index] = Tier.DEVICE
        least = _fit_depth(layers, streamed, budget, work)
        tried.append(_assemble(layers, streamed, budget, work, 1))
    if least is None:
        raise BudgetError(_too_small(tried, budget))
    tiers = _promote(layers, streamed, Tier.DEVICE, budget, work, least.depth)
    # With nothing left in files no memory is needed for disk reads: that is tried first.
    no_files = [Tier.CPU if tier is Tier.NVME else tier for tier in tiers]
    plan = _assemble(layers, no_files, budget, work, least.depth)
    if not _holds(plan, budget):
        tiers = _promote(layers, tiers, Tier.CPU, budget, work, least.depth)
        tried = [plan]
        plan = _assemble(layers, tiers, budget, work, least.depth)
        _check_cpu([plan, *tried], budget)
    return plan


def _promote(
    layers: Sequence[LayerSize],
    tiers: Sequence[Tier],
    tier: Tier,
    budget: Budget,
    work: Workload,
    depth: int,
) -> list[Tier]:
    """Move layers from files to `tier` while the budget holds them, evenly over the model."""
    holds = _device_holds if tier is Tier.DEVICE else _holds
    chosen = list(tiers)
    before: list[Tier] = []
    while chosen != before:  # a large layer that moves makes slots smaller: then others fit, too
        before = list(chosen)
        for index in spread(len(layers)):
            trial = [*chosen[:index], tier, *chosen[index + 1 :]]
            if chosen[index] is Tier.NVME and holds(
                _assemble(layers, trial, budget, work, depth), budget
            ):
                chosen = trial
    return chosen


@functools.lru_cache(maxsize=64)
def spread(n: int) -> tuple[int, ...]:
    """0 .. n-1 such that every prefix is spread evenly: layers that need no link sit between those
    that do.
    """
    bits = max(1, (n - 1).bit_length())
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return tuple(dict.fromkeys(i * n >> bits for i in reversed_bits))


def _fit_depth(
    layers: Sequence[LayerSize], tiers: Sequence[Tier], budget: Budget, work: Workload
) -> Plan | None:
    """The plan with the largest depth up to the one asked for that the compute device holds."""
    streamed = sum(t is not Tier.DEVICE for t in tiers)
    asked = min(work.depth, max(0, streamed - 1))
    for depth in range(asked, -1, -1):
        if depth == 0 and asked > 0:
            break  # without a second slot nothing overlaps: that is an error, not a plan
        plan = _assemble(layers, tiers, budget, work, depth)
        if _device_holds(plan, budget):
            return plan
    return None


def _assemble(
    layers: Sequence[LayerSize], tiers: Sequence[Tier], budget: Budget, work: Workload, depth: int
) -> Plan:
    moving = [s.slot_bytes for s, t in zip(layers, tiers, strict=True) if t is not Tier.DEVICE]
    depth = min(depth, max(0, len(moving) - 1))
    largest = max((s.slot_bytes for s in layers), default=0)
    notes: tuple[str, ...] = ()
    if moving and depth < min(work.depth, len(moving) - 1):
        notes = (
            f"prefetch lowered from {work.depth} to {depth}: {work.depth + 1} slots of "
            f"{format_size(max(moving))} do not fit the budget",
        )
    return Plan(
        layers=tuple(layers),
        tiers=tuple(tiers),
        slots=depth + 1 if moving else 0,
        depth=depth,
        chunk_bytes=chunk_bytes(largest, work.max_chunk_bytes),
        chunks=work.max_chunks,
        outside_bytes=work.outside_bytes,
        reserve_bytes=work.reserve_bytes,
        budget=budget,
        notes=notes,
        kv_cpu_bytes=work.kv_cpu_bytes,
    )


def chunk_bytes(largest: int, most: int = CHUNK_BYTES) -> int:
    """Bytes of a disk request where the largest layer takes `largest` in a slot: a quarter of that
    in whole blocks of 4 KiB, so that its first bytes move on while others are read.
    """
    return min(most, max(1, largest // 4 // 4096) * 4096)


def _device_limit(budget: Budget) -> int:
    return min(budget.device, budget.cpu) if budget.shared else budget.device


def _device_need(plan: Plan) -> int:
    return plan.device_bytes + plan.reserve_bytes


def _cpu_need(plan: Plan, budget: Budget) -> int:
    return plan.cpu_bytes + (_device_need(plan) if budget.shared else 0)


def _device_holds(plan: Plan, budget: Budget) -> bool:
    """Whether the compute device has room; where it is the CPU, the CPU tier counts too."""
    return _device_need(plan) <= _device_limit(budget) and (
        not budget.shared or _cpu_need(plan, budget) <= budget.cpu
    )


def _holds(plan: Plan, budget: Budget) -> bool:
    return _device_holds(plan, budget) and _cpu_need(plan, budget) <= budget.cpu


def _check_cpu(plans: Sequence[Plan], budget: Budget) -> None:
    """Raises BudgetError where CPU memory does not hold the first, with the least of all."""
    if _cpu_need(plans[0], budget) > budget.cpu:
        plan = min(plans, key=lambda plan: _cpu_need(plan, budget))
        need = _cpu_need(plan, budget)
        raise BudgetError(
            "CPU memory: the layers placed there take "
            f"{format_size(plan.cpu_bytes - plan.ring_bytes - plan.kv_cpu_bytes)}, disk reads "
            f"{format_size(plan.ring_bytes)} and keys and values {format_size(plan.kv_cpu_bytes)}, "
            f"{need} bytes ({format_size(need)}) of it in all, and the budget is "
            f"{format_size(budget.cpu)}. Raise max_memory['cpu'], or place layers on 'nvme', or "
            "use device_map='auto'"
        )


def _too_small(plans: Sequence[Plan], budget: Budget) -> str:
    """What the budget lacks for that of `plans` which takes least; it holds none of them."""

    def total(plan: Plan) -> int:
        return _cpu_need(plan, budget)

    held = [plan for plan in plans if not budget.shared or total(plan) <= budget.cpu]
    if held:  # what max_memory lets the compute device hold is what lacks, on a CPU too
        where, key, limit, reads = "the compute device", "0", budget.device, False
        plan = min(held, key=_device_need)
        need = _device_need(plan)
    else:
        where, key, limit, reads = "CPU memory", "'cpu'", budget.cpu, True
        plan = min(plans, key=total)
        need = total(plan)
    return (
        f"a budget of {format_size(limit)} on {where} cannot hold what a run needs at least, "
        f"{need} bytes ({format_size(need)}): {format_size(plan.outside_bytes)} outside the layers "
        "and resident layers of "
        f"{format_size(plan.device_bytes - plan.outside_bytes - plan.slot_total)}, {plan.slots} "
        f"slots of {format_size(plan.slot_bytes)}, {format_size(plan.ring_bytes if reads else 0)} "
        f"for disk reads, {format_size(plan.cpu_bytes - plan.ring_bytes if reads else 0)} of "
        f"layers at rest there, {format_size(plan.reserve_bytes)} for activations and KV cache. "
        f"Raise max_memory[{key}], or lower batch_size or max_length, or place the embedding on a "
        "tier of its own (device_map={...})"
    )
