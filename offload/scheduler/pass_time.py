"""The time of a prefill and of a decode pass, from bytes, FLOP and measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload.scheduler.decode_work import decode_work
from offload.scheduler.footprint import weights_of
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.plan import Tier
from offload.scheduler.prefill_work import prefill_work
from offload.scheduler.setting import Job, Setting
from offload.scheduler.timeline import LayerTime, first_pass_seconds, pass_seconds
from offload.scheduler.work import Work

CHAIN = "the layers one after the other"


@dataclass(frozen=True, slots=True)
class PassTime:
    """One pass: its seconds, and those that every resource works in it."""

    seconds: float
    busy: Mapping[str, float]
    compute: float  # of the seconds those that layers are computed, one after the other

    @property
    def limit(self) -> str:
        """What sets the time: the busiest resource, or nothing alone where each of them waits."""
        name = max(self.busy, key=self.busy.__getitem__)
        return name if self.busy[name] >= 0.9 * self.seconds else CHAIN


def decode_pass(
    model: ModelProfile, hardware: Hardware, job: Job, setting: Setting, *, exact: bool = True
) -> PassTime:
    """One token for every sequence, at the mean length of the job. Raises HardwareError.

    Without `exact`, a lower bound of it, which costs less: loads wait for nothing.
    """
    work = decode_work(model, hardware, job, setting)
    if not exact or not (work.link or work.rising):
        return _told(work, work.least)
    times = _layer_times(model, setting, work)
    # Parts that take turns use two layers at once for half of the time: a load ahead less.
    depth = max(0, setting.depth - setting.in_turns)
    return _told(work, max(work.down, pass_seconds(times, depth)))


def prefill_pass(
    model: ModelProfile, hardware: Hardware, job: Job, setting: Setting, *, exact: bool = True
) -> PassTime:
    """The prompts of `setting.prefill_batch` sequences, likewise. The first pass of a job finds the
    loads ahead of it done.
    """
    work = prefill_work(model, hardware, job, setting)
    first = setting.prefill_passes == 1
    left = max(0.0, 1 - (setting.depth + 1) / setting.streamed) if first and setting.streamed else 1
    told = replace(work, link=work.link * left, disk=work.disk * left)
    if not exact or not told.link:
        return _told(told, told.least)
    walk = first_pass_seconds if first else pass_seconds
    seconds = walk(_layer_times(model, setting, work), setting.depth)
    return _told(told, max(told.down, seconds))


def _told(work: Work, seconds: float) -> PassTime:
    busy = {
        "link up": work.link + work.rising,
        "disk": work.disk,
        "link down": work.down,
        "HBM": work.hbm,
        "matrix units": work.matrix,
        "kernel launches": work.launch,
        "CPU attention": work.cpu,
    }
    busy = {name: value for name, value in busy.items() if value}
    return PassTime(seconds, busy, work.compute)


def _layer_times(model: ModelProfile, setting: Setting, work: Work) -> list[LayerTime]:
    weights = weights_of(model, setting.precision)
    sizes, (moved, read) = weights.sizes, weights.moved(setting)
    rising = work.rising / len(sizes)
    made: dict[tuple[int, Tier], LayerTime] = {}  # layers alike on one tier share theirs
    times = []
    for size, kind, tier in zip(sizes, weights.kind_of, setting.tiers(), strict=True):
        if (kind, tier) not in made:
            link = 0.0 if tier is Tier.DEVICE else work.link * size / moved
            disk = work.disk * size / read if tier is Tier.NVME else 0.0
            compute = work.layers[kind][tier is not Tier.DEVICE]
            made[kind, tier] = LayerTime(compute, link, disk, rising)
        times.append(made[kind, tier])
    times[0] = replace(times[0], compute=times[0].compute + work.before)
    times[-1] = replace(times[-1], compute=times[-1].compute + work.after)
    return times
