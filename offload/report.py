"""What landed where, what a pass was predicted to cost, and what it did cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offload.scheduler.cost import Rates, predict_busy, predict_pass
from offload.scheduler.engine import CpuAttention
from offload.scheduler.plan import Plan, Tier
from offload.scheduler.planner import Planned
from offload.sizes import format_count, format_size
from offload.trace import Picture

_TIER_TEXT = {
    Tier.DEVICE: "compute device",
    Tier.CPU: "CPU memory",
    Tier.NVME: "NVMe (files)",
}


@dataclass(frozen=True)
class Report:
    """Facts of one offloaded model; `str()` gives the table, `as_dict()` the same for machines.
    Sizes are bytes.
    """

    model: str
    engine: str
    engine_reason: str
    device: str
    plan: Plan
    rates: Rates
    passes: int = 0
    pass_seconds: Sequence[float] = ()
    loads: int = 0
    loaded_bytes: int = 0
    pageable_bytes: int = 0
    pageable_reason: str = ""
    io: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unserved: Mapping[str, int] = field(default_factory=dict)  # calls the engine left, by reason
    picture: Picture | None = None  # of a pass, where some were traced
    planned: Planned | None = None  # where there was a goal

    @property
    def predicted_seconds(self) -> float | None:
        """What the weights of one pass cost at the measured rates; None where nothing moves."""
        return predict_pass(self.plan, self.rates)

    @property
    def median_seconds(self) -> float | None:
        """Median time of the latest passes."""
        return statistics.median(self.pass_seconds) if self.pass_seconds else None

    @property
    def achieved(self) -> str:
        """What passes did cost, against the bound: one line that can stand alone."""
        predicted = self.predicted_seconds
        if not self.pass_seconds or predicted is None:
            return self._achieved
        return f"{self._achieved} ({predicted * 1e3:.1f} ms: {self.rates})"

    @property
    def _achieved(self) -> str:
        """The same below a line that has the bound."""
        median, predicted = self.median_seconds, self.predicted_seconds
        if median is None:
            return "achieved: no pass so far"
        passes = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        text = f"achieved: {passes}, median {median * 1e3:.1f} ms"
        if predicted is None:
            return text
        moved = format_size(self.loaded_bytes)
        return f"{text}, {moved} moved, {predicted / median:.0%} of the bound"

    @property
    def busy(self) -> Mapping[str, float]:
        """Seconds that link and disk work in one pass, as predicted from their rates."""
        return predict_busy(self.plan, self.rates)

    @property
    def busy_shares(self) -> Mapping[str, float]:
        """The same as shares of the median pass: what is left, each of them waited."""
        median = self.median_seconds
        return {n: s / median for n, s in self.busy.items()} if median else {}

    @property
    def predicted(self) -> Mapping[str, float]:
        """Seconds of one pass by resource, and all of it as "pass", as far as they are known."""
        if self.planned is not None:
            decode = self.planned.choice.decode
            return {**decode.busy, "compute": decode.compute, "pass": decode.seconds}
        names = {"link": "link up"}
        found = {names.get(name, name): seconds for name, seconds in self.busy.items()}
        whole = self.predicted_seconds
        return found if whole is None else {**found, "pass": whole}

    @property
    def disk_bytes(self) -> int:
        """Weight bytes that rest in files."""
        return self.plan.weight_bytes(Tier.NVME)

    @property
    def streamed_bytes(self) -> int:
        """Weight bytes that move in one pass."""
        return self.plan.streamed_bytes

    @property
    def resident_bytes(self) -> int:
        """Weight bytes that stay on the compute device."""
        return self.plan.outside_bytes + self.plan.weight_bytes(Tier.DEVICE)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return {
            "model": self.model,
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "unserved": dict(self.unserved),
            "device": self.device,
            "tiers": {
                t.value: {"layers": self.plan.count(t), "bytes": self.plan.weight_bytes(t)}
                for t in Tier
            },
            "outside_bytes": self.plan.outside_bytes,
            "slots": self.plan.slots,
            "slot_bytes": self.plan.slot_bytes,
            "prefetch": self.plan.depth,
            "ring_bytes": self.plan.ring_bytes,
            "reserve_bytes": self.plan.reserve_bytes,
            "device_bytes": self.plan.device_bytes,
            "streamed_bytes": self.streamed_bytes,
            "rates": asdict(self.rates),
            "predicted_pass_seconds": self.predicted_seconds,
            "predicted_busy_seconds": dict(self.busy),
            "busy_shares": dict(self.busy_shares),
            "passes": self.passes,
            "median_pass_seconds": self.median_seconds,
            "loads": self.loads,
            "loaded_bytes": self.loaded_bytes,
            "pageable_bytes": self.pageable_bytes,
            "io": dict(self.io),
            "notes": list(self.notes),
            "planned": None if self.planned is None else self.planned.as_dict(),
            "picture": None if self.picture is None else self.picture.as_dict(),
        }

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"{self.model}: engine {self.engine} ({self.engine_reason}), computing on "
            f"{self.device}",
            f"  {'where':<18}{'layers':>8}{'weights':>14}{'moved per pass':>18}",
        ]
        for tier in Tier:
            nbytes = plan.weight_bytes(tier)
            moved = 0 if tier is Tier.DEVICE else nbytes
            numbers = f"{plan.count(tier):>8}{format_size(nbytes):>14}{format_size(moved):>18}"
            lines.append(f"  {_TIER_TEXT[tier]:<18}{numbers}")
        lines.append(
            f"  {'outside the layers':<26}{format_size(plan.outside_bytes):>14}{format_size(0):>18}"
        )
        if plan.slots:
            lines.append(
                f"  {format_count(plan.slots, 'slot')} of {format_size(plan.slot_bytes)}, "
                f"{format_count(plan.depth, 'load')} ahead; "
                f"{format_size(plan.ring_bytes)} for disk reads; "
                f"{format_size(plan.reserve_bytes)} kept free for activations and KV cache"
            )
        lines.append(
            f"  on the compute device: {format_size(plan.device_bytes)} of a budget of "
            f"{format_size(plan.budget.device)}"
        )
        lines += [f"  {line}" for line in self._plan_lines()]
        lines += [f"  {line}" for line in self._pass_lines()]
        lines += [
            f"  {format_count(count, 'call')} ran on transformers' modules: {reason}"
            for reason, count in self.unserved.items()
        ]
        lines += [f"  note: {note}" for note in self.notes]
        if self.picture is not None:
            lines += [f"  {line}" for line in self.picture.lines(self.predicted)]
        return "\n".join(lines)

    def _pass_lines(self) -> list[str]:
        """The bound of a pass and whose it is, what passes did cost, and how that compares with
        the plan and with the work of what is not the bound.
        """
        lines = []
        predicted, others = self.predicted_seconds, dict(self.busy_shares)
        if predicted is not None:
            slowest = max(self.busy, key=lambda name: self.busy[name])
            others.pop(slowest, None)
            lines.append(
                f"bound of a pass: {predicted * 1e3:.1f} ms, the {slowest}'s ({self.rates})"
            )
        if not self.passes:
            return lines
        lines.append(self._achieved)
        lines += [
            f"{name}: predicted to work {self.busy[name] * 1e3:.1f} ms of a pass, which is "
            f"{share:.0%} of the median"
            for name, share in others.items()
        ]
        planned, median = self.planned, self.median_seconds
        if planned is not None and median is not None and planned.choice.job.gen > 2:
            how, step = planned.choice.setting, planned.choice.decode.seconds
            lines.append(  # most passes are decode steps
                f"the median pass, of whatever batch, took {median / step:.3f} times what was "
                f"predicted for a decode step of batch {how.batch}"
            )
        return lines

    def _plan_lines(self) -> list[str]:
        """What was planned and predicted."""
        if self.planned is None:
            return []
        found = self.planned.choice
        job, how, decode = found.job, found.setting, found.decode
        busy = sorted(decode.busy.items(), key=lambda pair: -pair[1])
        below = ""
        if how.cpu_sequences:
            below = f", keys and values of {how.cpu_sequences} in CPU memory"
        if how.attention is CpuAttention.GPU:
            below += ", which come up for attention"
        return [
            f"planned for {self.planned.goal.value}: batch {how.batch} of {job.prompt} + {job.gen} "
            f"tokens{below}; limit: {found.limit}",
            f"predicted: prefill {found.prefill_seconds:.3g} s, a decode step "
            f"{_duration(decode.seconds)}, {found.decode_rate:.4g} tokens/s",
            "predicted to work in a decode step: "
            + ", ".join(f"{name} {_duration(seconds)}" for name, seconds in busy),
        ]


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
