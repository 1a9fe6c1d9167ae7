"""The least memory that any plan of a job takes: what a refusal tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload.scheduler.footprint import footprint
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.setting import CpuAttention, Job, Setting

LEAST_ROWS = 256  # of a micro-batch: fewer save little memory and fill no matrix unit


def least_device(
    model: ModelProfile, hardware: Hardware, job: Job, weights: Sequence[str], cpu: int
) -> tuple[int, Setting] | None:
    """Bytes of the compute device that the smallest plan takes where CPU memory holds `cpu`, and
    that plan; None where CPU memory is what lacks.
    """
    found = [
        (need.device, setting)
        for setting in _smallest(model, hardware, job, weights)
        if (need := footprint(model, job, setting)).cpu <= cpu
    ]
    return min(found, key=lambda pair: pair[0], default=None)


def least_cpu(
    model: ModelProfile, hardware: Hardware, job: Job, weights: Sequence[str], device: int
) -> tuple[int, Setting] | None:
    """The same of CPU memory, where the compute device holds `device`."""
    found = [
        (need.cpu, setting)
        for setting in _smallest(model, hardware, job, weights)
        if (need := footprint(model, job, setting)).device <= device
    ]
    return min(found, key=lambda pair: pair[0], default=None)


def cpu_attentions(hardware: Hardware) -> tuple[CpuAttention, ...]:
    """Who may attend to keys and values in CPU memory, by the rates that are known."""
    ways = []
    if hardware.cpu_attention and hardware.link_up and hardware.link_down:
        ways.append(CpuAttention.CPU)
    if hardware.link_up and hardware.link_down:
        ways.append(CpuAttention.GPU)
    return tuple(ways)


def _smallest(
    model: ModelProfile, hardware: Hardware, job: Job, weights: Sequence[str]
) -> Iterator[Setting]:
    """Every setting that one of the two memories could be smallest with."""
    count, batch = len(model.layers), job.batch or 1
    same = len(set(model.layers)) == 1
    for name in weights:
        # Layers that are alike take no less room resident than in the slots that serve them all;
        # where they may rest in CPU memory alone, each that does not rest there helps.
        alone = hardware.disk is None
        residents = range(count + 1) if not same or alone else (0, count)
        for resident in residents:
            streamed = count - resident
            if streamed and hardware.link_up is None:
                continue
            for attention, sequences in _sequences(hardware, batch):
                yield Setting(
                    weights=name,
                    resident=resident,
                    cpu=streamed if alone else 0,
                    nvme=0 if alone else streamed,
                    depth=min(1, max(0, streamed - 1)),
                    gpu_sequences=batch - sequences,
                    cpu_sequences=sequences,
                    attention=attention,
                    prefill_rows=min(LEAST_ROWS, batch * job.prompt),
                    prefill_passes=batch,
                    decode_micro_batches=1,
                )


def _sequences(hardware: Hardware, batch: int) -> Iterator[tuple[CpuAttention, int]]:
    yield CpuAttention.NONE, 0
    for way in cpu_attentions(hardware):
        yield from ((way, n) for n in range(1, batch + 1))
