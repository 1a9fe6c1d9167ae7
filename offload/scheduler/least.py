"""The least memory that any plan of a job takes, for the text of a refusal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from offload.scheduler.engine import CpuAttention, Engine
from offload.scheduler.footprint import footprint
from offload.scheduler.hardware import Hardware
from offload.scheduler.largest import largest
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.setting import Job, Setting

LEAST_ROWS = 256  # of a micro-batch: fewer save little memory and fill no matrix unit
EVERY_ROW = 1 << 40  # where an engine reads prompts whole


def least_device(
    model: ModelProfile, hardware: Hardware, job: Job, weights: Sequence[str], cpu: int
) -> tuple[int, Setting]:
    """Bytes of the compute device that the smallest plan takes where CPU memory holds `cpu` bytes,
    and that plan. There always is one: with all on the device CPU memory holds nothing.
    """

    def most_on_cpu(base: Setting) -> int:
        def need(sequences: int) -> int:
            return footprint(model, job, _with_cpu_sequences(base, sequences)).cpu

        return largest(need, cpu, 1, base.batch) if need(1) <= cpu else 1

    found = [
        (need.device, setting)
        for setting in _smallest(model, hardware, job, weights, most_on_cpu)
        if (need := footprint(model, job, setting)).cpu <= cpu
    ]
    return min(found, key=lambda pair: pair[0])


def least_cpu(
    model: ModelProfile, hardware: Hardware, job: Job, weights: Sequence[str], device: int
) -> tuple[int, Setting] | None:
    """The same of CPU memory, where the compute device holds `device` bytes; None where it cannot
    hold even what every plan keeps there.
    """

    def fewest_on_cpu(base: Setting) -> int:
        def need(on_gpu: int) -> int:
            return footprint(model, job, _with_cpu_sequences(base, base.batch - on_gpu)).device

        if need(0) > device:
            return base.batch
        return base.batch - largest(need, device, 0, base.batch - 1)

    found = [
        (need.cpu, setting)
        for setting in _smallest(model, hardware, job, weights, fewest_on_cpu)
        if (need := footprint(model, job, setting)).device <= device
    ]
    return min(found, key=lambda pair: pair[0], default=None)


def cpu_attentions(model: ModelProfile, hardware: Hardware) -> tuple[CpuAttention, ...]:
    """Who may attend to keys and values in CPU memory, by the rates that are known and what the
    engine does.
    """
    ways = []
    if hardware.cpu_attention and hardware.link_up and hardware.link_down:
        ways.append(CpuAttention.CPU)
    if hardware.link_up and hardware.link_down:
        ways.append(CpuAttention.GPU)
    return tuple(way for way in ways if way in model.engine.cpu_kv)


def _smallest(
    model: ModelProfile,
    hardware: Hardware,
    job: Job,
    weights: Sequence[str],
    sequences: Callable[[Setting], int],
) -> Iterator[Setting]:
    """Every setting that may be the one that takes least of one of the two memories. `sequences`:
    how many keep keys and values in CPU memory, if any do; both memories change linearly with that
    number.
    """
    count, batch, engine = len(model.layers), job.batch or 1, model.engine
    # Equal layers take no less room resident than streamed, through slots that serve them all. But
    # without files all that moves rests in CPU memory, and each resident layer takes less of that.
    alone = hardware.disk is None
    residents = range(count + 1) if alone or len(set(model.layers)) > 1 else (0, count)
    for name, resident in itertools.product(weights, residents):
        streamed = count - resident
        if streamed and hardware.link_up is None:
            continue
        base = Setting(
            weights=name,
            resident=resident,
            cpu=streamed if alone else 0,
            nvme=0 if alone else streamed,
            depth=min(1, max(0, streamed - 1)),
            gpu_sequences=batch,
            cpu_sequences=0,
            attention=CpuAttention.NONE,
            prefill_rows=min(_least_rows(engine, job), batch * job.prompt),
            prefill_passes=batch if engine.micro_batches else 1,
            decode_micro_batches=batch if engine.lockstep else 1,
        )
        yield base
        for way in cpu_attentions(model, hardware):
            there = replace(base, attention=way)
            yield _with_cpu_sequences(there, sequences(there))


def _least_rows(engine: Engine, job: Job) -> int:
    if engine.lockstep:
        return job.prompt
    return LEAST_ROWS if engine.chunks else EVERY_ROW


def _with_cpu_sequences(setting: Setting, sequences: int) -> Setting:
    return replace(setting, gpu_sequences=setting.batch - sequences, cpu_sequences=sequences)
