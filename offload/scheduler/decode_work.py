"""What a decode pass, one token for every sequence, asks of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offload.scheduler.engine import CpuAttention
from offload.scheduler.footprint import weights_of
from offload.scheduler.hardware import Hardware
from offload.scheduler.kv_pieces import piece_count
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.products import FewRows
from offload.scheduler.setting import Job, Setting
from offload.scheduler.work import Work, beside_cpu

# Rows up to which the engine's own kernels multiply with plain weights, and take a norm ahead into
# the product: what those kernels are compiled for.
OWN_ROWS = 16


def decode_work(model: ModelProfile, hardware: Hardware, job: Job, setting: Setting) -> Work:
    """The work of a step at the job's mean length. Raises HardwareError for a rate that is needed
    and not known.
    """
    weights, precision = weights_of(model, setting.precision), setting.precision
    engine, count = model.engine, len(model.layers)
    length = job.prompt + job.gen / 2
    parts, batch = setting.decode_micro_batches, setting.batch
    at_cpu = setting.cpu_sequences if setting.attention is CpuAttention.CPU else 0
    rise = setting.cpu_sequences if setting.attention is CpuAttention.GPU else 0
    hbm_rate = hardware.needed("hbm")

    risen = rise * model.kv_cpu_bytes(precision) * length  # bytes of a layer that come up
    seen = model.kv_bytes(precision) * length * (batch - at_cpu)  # bytes that the GPU attends to
    attention = seen / hardware.gpu_attention_rate(model.group)
    if engine.int8_kv:  # what came up as codes is made whole first
        attention += (risen + rise * model.kv_bytes(precision) * length) / hbm_rate
    moved, read = weights.moved(setting)
    attended = _attention_on_cpu(model, hardware, setting, at_cpu * length) * count
    kept = "int8" if engine.int8_kv else model.dtype(precision)
    link, cpu = beside_cpu(hardware, model.group, kept, moved + risen * count, attended)
    rising = link * risen * count / (moved + risen * count) if risen else 0.0
    exchange, exchanged = _exchange(model, hardware, setting, at_cpu)
    if not setting.in_turns:  # else cores attend for the other part meanwhile
        cpu += exchange * count

    few = FewRows(model, hardware, precision, batch, parts)
    # With few rows the norms are a part of the products.
    small = engine.small_kernels[few.rows <= OWN_ROWS]
    issue = _issue(model, hardware, job, setting)
    beside = _Beside(
        attention=attention,
        cpu=cpu / count,
        kernels=small * parts * (hardware.kernel or 0.0),
        issue=issue,
        exchange=exchange if setting.in_turns else None,
    )
    layers, compute, hbm, matrix, ends = [], 0.0, 0.0, 0.0, 0.0
    stay = setting.resident / count
    for layer, size, number in weights.kinds:
        both = []
        for resident, share in ((True, stay), (False, 1 - stay)):
            products = few.of(layer, size, resident)
            # What stands behind attention is made whole meanwhile.
            behind = 1 - (model.query_width + model.kv_width) * model.hidden / layer.active
            both.append(beside.layer(products.seconds, products.made * max(0.0, behind), resident))
            compute += share * number * both[-1]
            hbm += share * number * (products.hbm + seen / hbm_rate)
            matrix += share * number * products.matrix
            if setting.in_turns:  # cores wait for the first queries, and have done the last layer
                ends = beside.computed(products.seconds, resident) / parts + exchange
        layers.append((both[0], both[1]))
    heads = 1 if setting.in_turns else parts
    head = heads * model.vocabulary * model.hidden * model.itemsize(precision) / hbm_rate
    idle = engine.step_layers * (hardware.prompt_layer or 0.0)  # the GPU has nothing to do
    return Work(
        layers=tuple(layers),
        compute=compute + ends + head + idle,
        before=0.0,
        after=ends + head + idle,
        link=link - rising,
        rising=rising,
        disk=read / hardware.needed("disk") if read else 0.0,
        down=exchanged * count / hardware.needed("link_down") if exchanged else 0.0,
        hbm=hbm + head,
        matrix=matrix,
        launch=issue.layer * count * (1 - stay if issue.graphs else 1)
        + issue.load * count * (1 - stay),
        cpu=cpu,
    )


class _Issue(NamedTuple):
    """Seconds that the host takes to issue one layer of a step."""

    layer: float  # its kernels
    load: float  # its load, where it comes through a slot
    graphs: bool  # whether resident layers are launched as graphs, which take next to nothing

    def seconds(self, resident: bool) -> float:
        """Everything that is issued for a layer."""
        if resident:
            return 0.0 if self.graphs else self.layer
        return self.layer + self.load


def _issue(model: ModelProfile, hardware: Hardware, job: Job, setting: Setting) -> _Issue:
    engine, pieces = model.engine, 0
    if setting.cpu_sequences and setting.attention is CpuAttention.GPU:
        # Cut when a cache is made, for the tokens that it will hold in the end.
        head = model.kv_cpu_head_bytes(setting.precision, job.length)
        pieces = piece_count(setting.cpu_sequences, model.kv_heads, head)
    one = hardware.launch or 0.0
    if setting.attention is CpuAttention.CPU and setting.cpu_sequences:
        one = hardware.launch_after_cores or one
    return _Issue(
        layer=one * engine.kernels * setting.decode_micro_batches
        + one * engine.piece_kernels * pieces,
        load=one * engine.load_kernels,
        # With rows in CPU memory there is work for the host between the kernels of each layer.
        graphs=engine.graphs and not setting.cpu_sequences,
    )


@dataclass(frozen=True, slots=True)
class _Beside:
    """What a layer takes beside its products, the same for all layers: seconds."""

    attention: float  # on the compute device
    cpu: float  # attention on CPU cores; the way there and back, unless parts take turns
    kernels: float  # small ones between the products
    issue: _Issue
    exchange: float | None  # of a part's way to cores and back, where two parts take turns

    def computed(self, products: float, resident: bool) -> float:
        """Seconds of what the compute device does of a layer."""
        return max(products + self.kernels, self.issue.seconds(resident)) + self.attention

    def layer(self, products: float, early: float, resident: bool) -> float:
        """Seconds of the whole layer; `early`: those of its products that the compute device can do
        while cores attend.
        """
        computed = self.computed(products, resident)
        if self.exchange is not None:
            # Whoever takes longer sets the pace, unless a part's own way through both does.
            return max(computed, self.cpu, (computed + self.cpu) / 2 + self.exchange)
        # Both attend at once, and join before the output projection.
        return computed + max(0.0, self.cpu - early - self.attention)


def _exchange(
    model: ModelProfile, hardware: Hardware, setting: Setting, at_cpu: int
) -> tuple[float, float]:
    """For a layer's exchange with CPU cores: seconds without attention, of parts that take turns of
    one of them, and bytes that go down. What comes up is no more than that.
    """
    if not at_cpu:
        return 0.0, 0.0
    width = model.query_width + model.kv_width
    nbytes = at_cpu * width * model.itemsize(setting.precision)
    part = nbytes / (setting.decode_micro_batches if setting.in_turns else 1)
    moved = part / hardware.needed("link_down") + part / hardware.needed("link_up")
    return moved + (hardware.exchange or 0.0), nbytes


def _attention_on_cpu(
    model: ModelProfile, hardware: Hardware, setting: Setting, tokens: float
) -> float:
    """Seconds of attention to so many tokens of a layer, with nothing beside it. A gain from int8
    counts only where it was measured.
    """
    if not tokens:
        return 0.0
    nbytes, dtype = tokens * model.kv_bytes(setting.precision), model.dtype(setting.precision)
    rate = hardware.attention_rate(model.group, dtype)
    if rate is None:
        raise hardware.lacks("the rate of attention on the CPU", "cpu_attention")
    in_int8 = hardware.attention_rate(model.group, "int8")
    if model.engine.int8_kv and in_int8 is not None:
        nbytes, rate = tokens * model.kv_cpu_bytes(setting.precision), in_int8
    return nbytes / rate
