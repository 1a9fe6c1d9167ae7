"""What a pass costs: bytes over rates."""

from __future__ import annotations

from dataclasses import dataclass

from offload.scheduler.plan import Plan, Tier


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured on this machine, bytes per second; None was not measured."""

    link: float | None = None  # pinned CPU memory to the compute device
    disk: float | None = None  # files to pinned CPU memory

    def __str__(self) -> str:
        known = [
            f"{name} {rate / 1e9:.2f} GB/s"
            for name, rate in (("link", self.link), ("disk", self.disk))
            if rate
        ]
        return ", ".join(known) or "nothing measured"


def predict_busy(plan: Plan, rates: Rates) -> dict[str, float]:
    """Seconds that link and disk each work in one pass; without those that have nothing to do or
    whose rate is unknown.
    """
    work = (
        ("link", plan.streamed_bytes, rates.link),
        ("disk", plan.weight_bytes(Tier.NVME), rates.disk),
    )
    return {name: nbytes / rate for name, nbytes, rate in work if nbytes and rate}


def predict_pass(plan: Plan, rates: Rates) -> float | None:
    """Seconds that the weights of one pass need: the slower of disk and link, which work side by
    side.

    None where nothing moves or a rate that the plan depends on is unknown.
    """
    disk, link = plan.weight_bytes(Tier.NVME), plan.streamed_bytes
    if not link or rates.link is None or (disk and rates.disk is None):
        return None
    return max(predict_busy(plan, rates).values())
