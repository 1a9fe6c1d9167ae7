"""What a decode pass, one token for every sequence, asks of a machine."""

from __future__ import annotations

import math

from offload.scheduler.engine import KV_PIECE, CpuAttention
from offload.scheduler.footprint import weights_of
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.products import FewRows
from offload.scheduler.setting import Job, Setting
from offload.scheduler.work import Work, beside_cpu


def decode_work(model: ModelProfile, hardware: Hardware, job: Job, setting: Setting) -> Work:
    """At the mean length of the job. Raises HardwareError for a rate that is needed and not
    known.
    """
    weights, precision = weights_of(model, setting.precision), setting.precision
    engine, count = model.engine, len(model.layers)
    length = job.prompt + job.gen / 2
    parts, batch = setting.decode_micro_batches, setting.batch
    at_cpu = setting.cpu_sequences if setting.attention is CpuAttention.CPU else 0
    rise = setting.cpu_sequences if setting.attention is CpuAttention.GPU else 0
    hbm_rate = hardware.needed("hbm")

    below = rise * model.kv_cpu_bytes(precision) * length  # a layer's
    seen = model.kv_bytes(precision) * length * (batch - at_cpu)
    attention = seen / hardware.gpu_attention_rate(model.group)
    if engine.int8_kv:  # what came up as codes is made whole first
        attention += (below + rise * model.kv_bytes(precision) * length) / hbm_rate
    moved, read = weights.moved(setting)
    attended = _attention_on_cpu(model, hardware, setting, at_cpu * length) * count
    link, cpu = beside_cpu(hardware, model.group, moved + below * count, attended)
    rising = link * below * count / (moved + below * count) if below else 0.0
    exchange, exchanged = _exchange(model, hardware, setting, at_cpu)
    cpu += exchange * count

    few = FewRows(model, hardware, precision, batch, parts)
    one = hardware.launch or 0.0
    if at_cpu:
        one = hardware.launch_after_cores or one
    launch = one * engine.kernels * parts + one * engine.piece_kernels * math.ceil(below / KV_PIECE)
    load = one * engine.load_kernels
    # Runs of resident layers are launched at once, as graphs, where nothing is for the host to do.
    hidden = engine.graphs and not setting.cpu_sequences
    # With few rows the norms are a part of the products.
    between = engine.small_kernels[few.rows <= OWN_ROWS] * parts * (hardware.kernel or 0.0)
    layers, compute, hbm, matrix = [], 0.0, 0.0, 0.0
    stay = setting.resident / count
    for layer, size, number in weights.kinds:
        both = []
        for resident, share in ((True, stay), (False, 1 - stay)):
            products = few.of(layer, size, resident)
            issued = 0.0 if hidden and resident else launch + load * (not resident)
            gemm = max(products.seconds + between, issued)
            if parts > 1 and engine.overlaps:
                both.append(max(gemm + attention, cpu / count))
            else:  # both attend at once, and join before the output projection
                both.append(gemm + max(attention, cpu / count))
            compute += share * number * both[-1]
            hbm += share * number * (products.hbm + seen / hbm_rate)
            matrix += share * number * products.matrix
        layers.append((both[0], both[1]))
    head = parts * model.vocabulary * model.hidden * model.itemsize(precision) / hbm_rate
    idle = engine.step_calls * (hardware.call or 0.0)  # the GPU has nothing to do
    return Work(
        layers=tuple(layers),
        compute=compute + head + idle,
        before=0.0,
        after=head + idle,
        link=link - rising,
        rising=rising,
        disk=read / hardware.needed("disk") if read else 0.0,
        down=exchanged * count / hardware.needed("link_down") if exchanged else 0.0,
        hbm=hbm + head,
        matrix=matrix,
        launch=launch * count * (1 - stay if hidden else 1) + load * count * (1 - stay),
        cpu=cpu,
    )


OWN_ROWS = 16  # that own kernels multiply with plain weights


def _exchange(
    model: ModelProfile, hardware: Hardware, setting: Setting, at_cpu: int
) -> tuple[float, float]:
    """Seconds that a layer's way to CPU cores and back takes but for attention, and bytes that go
    down. What comes up is no more.
    """
    if not at_cpu:
        return 0.0, 0.0
    width = model.query_width + model.kv_width
    nbytes = at_cpu * width * model.itemsize(setting.precision)
    moved = nbytes / hardware.needed("link_down") + nbytes / hardware.needed("link_up")
    return moved + (hardware.exchange or 0.0), nbytes


def _attention_on_cpu(
    model: ModelProfile, hardware: Hardware, setting: Setting, tokens: float
) -> float:
    """Seconds of attention to so many tokens of a layer, alone. What int8 gains is counted on where
    it was measured.
    """
    if not tokens:
        return 0.0
    nbytes, rate = tokens * model.kv_bytes(setting.precision), hardware.attention_rate(model.group)
    if rate is None:
        raise hardware.lacks("the rate of attention on the CPU", "cpu_attention")
    in_int8 = hardware.attention_rate(model.group, int8=True)
    if model.engine.int8_kv and in_int8 is not None:
        nbytes, rate = tokens * model.kv_cpu_bytes(setting.precision), in_int8
    return nbytes / rate
