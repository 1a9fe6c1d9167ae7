"""The time of a prefill and of a decode pass, from bytes, FLOP and measured rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offload.scheduler.engine import OWN_SHARE, STORED_SHARE, UNPACKED_ROWS, CpuAttention
from offload.scheduler.footprint import weights_of
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import LayerProfile, ModelProfile
from offload.scheduler.plan import Tier
from offload.scheduler.setting import Job, Setting
from offload.scheduler.timeline import LayerTime, pass_seconds

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


@dataclass(frozen=True, slots=True)
class _Work:
    """What one pass asks of the machine: seconds, of all layers where not said otherwise."""

    layers: tuple[float, ...]  # of one layer of each kind: GPU and CPU attention, as they join
    compute: float  # the same of all layers, and the head
    after: float  # the head, and what the host does before the next pass
    rising: float  # bytes of keys and values that come up the link for each layer
    link: float  # all that comes up, at the rate that holds while it moves
    disk: float
    down: float
    hbm: float
    matrix: float
    launch: float
    cpu: float

    @property
    def least(self) -> float:
        """No order of loads makes the pass shorter."""
        return max(self.compute, self.link, self.disk, self.down)


def decode_pass(
    model: ModelProfile, hardware: Hardware, job: Job, setting: Setting, *, exact: bool = True
) -> PassTime:
    """One token for every sequence, at the mean length of the job. Raises HardwareError.

    Without `exact`, a lower bound of it, which costs less: loads wait for nothing.
    """
    return _pass_time(model, setting, _decode_work(model, hardware, job, setting), exact)


def prefill_pass(
    model: ModelProfile, hardware: Hardware, job: Job, setting: Setting, *, exact: bool = True
) -> PassTime:
    """The prompts of `setting.prefill_batch` sequences, likewise."""
    return _pass_time(model, setting, _prefill_work(model, hardware, job, setting), exact)


def _pass_time(model: ModelProfile, setting: Setting, work: _Work, exact: bool) -> PassTime:
    seconds = work.least
    if exact and setting.depth == 0:
        seconds = max(work.compute + max(work.link, work.disk), work.down)
    elif exact and work.link:
        seconds = max(work.down, pass_seconds(_layer_times(model, setting, work), setting.depth))
    busy = {
        "link up": work.link,
        "disk": work.disk,
        "link down": work.down,
        "HBM": work.hbm,
        "matrix units": work.matrix,
        "kernel launches": work.launch,
        "CPU attention": work.cpu,
    }
    busy = {name: value for name, value in busy.items() if value}
    return PassTime(seconds, busy, work.compute)


def _layer_times(model: ModelProfile, setting: Setting, work: _Work) -> list[LayerTime]:
    weights = weights_of(model, setting.precision)
    sizes, (moved, read) = weights.sizes, weights.moved(setting)
    total = moved + work.rising * len(sizes)
    made: dict[tuple[int, Tier], LayerTime] = {}  # layers alike on one tier share theirs
    times = []
    for size, kind, tier in zip(sizes, weights.kind_of, setting.tiers(), strict=True):
        if (kind, tier) not in made:
            up = (0 if tier is Tier.DEVICE else size) + work.rising
            disk = work.disk * size / read if tier is Tier.NVME else 0.0
            made[kind, tier] = LayerTime(work.layers[kind], work.link * up / total, disk)
        times.append(made[kind, tier])
    last = times[-1]
    times[-1] = LayerTime(last.compute + work.after, last.link, last.disk)
    return times


def _decode_work(model: ModelProfile, hardware: Hardware, job: Job, setting: Setting) -> _Work:
    weights = weights_of(model, setting.precision)
    length = job.prompt + job.gen / 2
    kv = model.kv_bytes(setting.precision) * length
    below = model.kv_cpu_bytes(setting.precision) * length
    parts, batch = setting.decode_micro_batches, setting.batch
    on_gpu, rises = setting.gpu_sequences, setting.attention is CpuAttention.GPU
    at_cpu = setting.cpu_sequences if setting.attention is CpuAttention.CPU else 0
    hbm_rate = hardware.needed("hbm")
    whole = _made_whole(model, setting)
    tiles = _unpackings(model, setting, whole)
    matrix_rate = _few_rows_rate(model, hardware, setting, whole)
    attention = kv * (batch - at_cpu) / hbm_rate

    moved, read = weights.moved(setting)
    rising = below * (batch - on_gpu) if rises else 0.0
    up = moved + rising * len(model.layers)
    exchange = at_cpu * (model.query_width + model.kv_width) * model.itemsize(setting.precision)
    attended = _attention_on_cpu(model, hardware, setting, at_cpu * length) * len(model.layers)
    link, cpu = _stream_beside_cpu(hardware, up, attended, exchange * len(model.layers))
    cpu_layer = cpu / len(model.layers)
    one = hardware.launch or 0.0
    launch = one * model.engine.kernels * parts
    layers, compute, hbm, matrix = [], 0.0, 0.0, 0.0
    for layer, size, count in weights.kinds:
        touched, products = _products(layer, size, batch, parts, hbm_rate, matrix_rate)
        fused = max(touched, products)
        if tiles is not None:
            fused = touched * tiles / STORED_SHARE
        # Written ahead of the product, which reads them. The engine takes what is quicker.
        wide = parts * layer.active * model.itemsize(setting.precision) / hbm_rate
        if whole or (tiles is not None and touched + wide + max(wide, products) < fused):
            gemm = max(touched + wide + max(wide, products), launch)
            touched += 2 * wide
        else:
            gemm = max(fused, launch)
        if parts > 1:
            layers.append(max(gemm + attention, cpu_layer))
        else:  # both attend at once, and join before the output projection
            layers.append(gemm + max(attention, cpu_layer))
        compute += count * layers[-1]
        hbm += count * (touched + attention)
        matrix += count * products
    head = parts * model.vocabulary * model.hidden * model.itemsize(setting.precision) / hbm_rate
    down = exchange * len(model.layers)
    idle = one * model.engine.between_steps  # the GPU has nothing to do
    return _Work(
        layers=tuple(layers),
        compute=compute + head + idle,
        after=head + idle,
        rising=rising,
        link=link,
        disk=read / hardware.needed("disk") if read else 0.0,
        down=down / hardware.needed("link_down") if down else 0.0,
        hbm=hbm + head,
        matrix=matrix,
        launch=launch * len(model.layers),
        cpu=cpu,
    )


def _made_whole(model: ModelProfile, setting: Setting) -> bool:
    """Whether a decode pass multiplies with quantised weights that were made wide before."""
    most = model.engine.stored_rows
    rows = setting.batch / setting.decode_micro_batches
    return setting.precision.quantised and most is not None and rows > most


def _unpackings(model: ModelProfile, setting: Setting, whole: bool) -> int | None:
    """How often fused products unpack a quantised weight; None: they are not the engine's."""
    if whole or not setting.precision.quantised or not model.engine.own_rows:
        return None
    return math.ceil(setting.batch / setting.decode_micro_batches / UNPACKED_ROWS)


def _few_rows_rate(model: ModelProfile, hardware: Hardware, setting: Setting, whole: bool) -> float:
    """FLOP/s of a decode pass's products. With few rows what was measured is how fast the weights
    are read: fewer bytes a weight take less time, down to that of the matrix units.
    """
    dtype, precision = model.dtype(setting.precision), setting.precision
    rows, engine = setting.batch / setting.decode_micro_batches, model.engine
    rate = hardware.matrix_rate(dtype, rows)
    if whole or (precision.quantised and engine.own_rows):  # the latter are not read as they are
        return rate
    if not precision.quantised:
        own = 2 * rows * OWN_SHARE * hardware.needed("hbm") / model.itemsize(precision)
        return max(rate, own) if rows <= engine.own_rows else rate
    group = precision.group
    fewer = model.itemsize(precision) * group / precision.weight_bytes(group)
    return max(rate, min(rate * fewer, hardware.matrix_rate(dtype, 1 << 30)))


def _products(
    layer: LayerProfile, size: int, batch: int, parts: int, hbm_rate: float, matrix_rate: float
) -> tuple[float, float]:
    """Seconds that a layer's weights take to be read, and that its products take."""
    chosen = layer.active / max(1, layer.matrices + layer.others)
    touched = min(1.0, chosen * batch / parts)  # few tokens meet few experts
    return parts * size * touched / hbm_rate, 2 * layer.active * batch / matrix_rate


def _prefill_work(model: ModelProfile, hardware: Hardware, job: Job, setting: Setting) -> _Work:
    weights, precision = weights_of(model, setting.precision), setting.precision
    itemsize = model.itemsize(precision)
    tokens = setting.prefill_batch * job.prompt
    parts = -(-tokens // setting.prefill_rows)
    hbm_rate = hardware.needed("hbm")
    matrix_rate = hardware.matrix_rate(model.dtype(precision), min(tokens, setting.prefill_rows))
    # Of a causal prompt every token meets half on average, in two products.
    attention = 2 * model.query_width * job.prompt * tokens / matrix_rate
    # What stands between the products is read and written once.
    elements = model.engine.moved_elements(model.hidden, model.intermediate)
    between = tokens * elements * itemsize / hbm_rate
    kernels = model.engine.prompt_kernels or model.engine.kernels
    launch = (hardware.launch or 0.0) * kernels * parts

    moved, read = weights.moved(setting)
    share = setting.cpu_sequences / setting.batch
    down = share * tokens * model.kv_cpu_bytes(precision) * len(model.layers)
    link, link_down = _both_ways(hardware, moved, down)
    layers, compute, hbm, matrix = [], 0.0, 0.0, 0.0
    for layer, size, count in weights.kinds:
        # Each micro-batch reads the weights; quantised ones are made wide, written and read.
        wide = 2 * layer.active * itemsize if precision.quantised else 0
        touched = parts * (size + wide) / hbm_rate
        products = 2 * layer.active * tokens / matrix_rate + attention
        if precision.quantised:
            busy = products + parts * (size + wide / 2) / hbm_rate
        else:
            busy = max(products, touched)
        layers.append(max(busy + between, launch))
        compute += count * layers[-1]
        hbm += count * (touched + between)
        matrix += count * products
    head = model.vocabulary * model.hidden * itemsize / hbm_rate
    return _Work(
        layers=tuple(layers),
        compute=compute + head,
        after=head,
        rising=0.0,
        link=link,
        disk=read / hardware.needed("disk") if read else 0.0,
        down=link_down,
        hbm=hbm + head,
        matrix=matrix,
        launch=launch * len(model.layers),
        cpu=0.0,
    )


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


def _stream_beside_cpu(
    hardware: Hardware, up: float, attended: float, exchange: float
) -> tuple[float, float]:
    """Seconds of the stream up the link and of attention on the CPU, which takes `attended` of them
    alone, each slowed by the other for as long as both work. `exchange`: bytes down before it, and
    at most as many up after.
    """
    link_rate = hardware.needed("link_up") if up else 1.0
    if not attended:
        return up / link_rate, 0.0
    link_beside = hardware.link_beside or link_rate
    slower = 1.0
    if hardware.host_read and hardware.host_read_beside:
        slower = min(1.0, hardware.host_read_beside / hardware.host_read)
    link, cpu = _together(
        (up / link_rate, up / min(link_rate, link_beside)),
        (attended, attended / slower),
    )
    return link, cpu + exchange / hardware.needed("link_down") + exchange / hardware.needed(
        "link_up"
    )


def _both_ways(hardware: Hardware, up: float, down: float) -> tuple[float, float]:
    """Seconds of bytes up and bytes down the link, each slowed while both move."""
    up_rate = hardware.needed("link_up") if up else 1.0
    down_rate = hardware.needed("link_down") if down else 1.0
    if not up or not down:
        return up / up_rate, down / down_rate
    return _together(
        (up / up_rate, up / min(up_rate, hardware.link_up_both or up_rate)),
        (down / down_rate, down / min(down_rate, hardware.link_down_both or down_rate)),
    )


def _together(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Seconds of two works that begin at once, each given as (alone, beside the other): the longer
    one goes on alone.
    """
    (a_alone, a_beside), (b_alone, b_beside) = a, b
    if a_beside <= b_beside:
        return a_beside, a_beside + b_alone * (1 - a_beside / b_beside)
    return b_beside + a_alone * (1 - b_beside / a_beside), b_beside
