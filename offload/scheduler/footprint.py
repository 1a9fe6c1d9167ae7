"""The memory that a setting takes, on the compute device and in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Protocol

from offload.scheduler.engine import CpuAttention, Engine
from offload.scheduler.kv_pieces import KV_PIECES, piece_limit
from offload.scheduler.model_profile import LayerProfile, ModelProfile, Precision
from offload.scheduler.plan import CHUNKS, Budget, chunk_bytes, spread
from offload.scheduler.setting import Job, Setting

SMALL, ALONE, BLOCK_STEP = 1 << 20, 10 << 20, 2 << 20  # of PyTorch's allocator, see `held_by_torch`


@dataclass(frozen=True)
class Weights:
    """A model in one precision, with the sums that every setting asks for. Bytes."""

    model: ModelProfile
    precision: Precision

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Weight bytes of every layer."""
        return tuple(self.model.layer_bytes(x, self.precision) for x in self.model.layers)

    @cached_property
    def slot_sizes(self) -> tuple[int, ...]:
        """Bytes of every layer in a slot."""
        return tuple(self.model.slot_bytes(x, self.precision) for x in self.model.layers)

    @cached_property
    def kinds(self) -> tuple[tuple[LayerProfile, int, int], ...]:
        """Layers that differ: one of each kind, its bytes, and how many there are."""
        counts: dict[LayerProfile, int] = {}
        for layer in self.model.layers:
            counts[layer] = counts.get(layer, 0) + 1
        size = self.model.layer_bytes
        return tuple((x, size(x, self.precision), n) for x, n in counts.items())

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """For every layer its place in `kinds`."""
        place = {layer: i for i, (layer, _, _) in enumerate(self.kinds)}
        return tuple(place[layer] for layer in self.model.layers)

    @cached_property
    def _size_sums(self) -> Sequence[int]:
        return [0, *accumulate(self.sizes[i] for i in spread(len(self.sizes)))]

    @cached_property
    def _slot_sums(self) -> Sequence[int]:
        return [0, *accumulate(self.slot_sizes[i] for i in spread(len(self.sizes)))]

    @cached_property
    def _largest_after(self) -> Sequence[int]:
        order = [self.slot_sizes[i] for i in reversed(spread(len(self.sizes)))]
        return [*reversed(list(accumulate(order, max))), 0]

    def moved(self, setting: Setting) -> tuple[int, int]:
        """Bytes that cross the link in one pass, and those of them that come from the disk."""
        sums, end = self._size_sums, setting.resident + setting.cpu
        return sums[-1] - sums[setting.resident], sums[-1] - sums[end]

    def standing(self, resident: int, cpu: int) -> tuple[int, int, int]:
        """Bytes of layers on the compute device, in CPU memory, and of one slot."""
        sums = self._slot_sums
        return (
            sums[resident],
            sums[resident + cpu] - sums[resident],
            self._largest_after[resident],
        )

    @cached_property
    def ring(self) -> int:
        """Bytes that disk reads pass through."""
        return chunk_bytes(max(self.slot_sizes, default=0)) * CHUNKS

    @cached_property
    def buffer(self) -> int:
        """Bytes for quantised weights made whole, if products need that: of one, or of a layer."""
        if not self.precision.quantised:
            return 0
        layers, all_at_once = self.model.layers, self.model.engine.whole_layers
        largest = max(max(x.largest, x.matrices if all_at_once else 0) for x in layers)
        return largest * self.model.itemsize(self.precision)


@lru_cache(maxsize=64)
def weights_of(model: ModelProfile, precision: Precision) -> Weights:
    """The same object for the same arguments: its sums over all layers are costly."""
    return Weights(model, precision)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by what they are for."""

    outside: int
    resident: int
    slots: int
    kv_device: int
    kv_slots: int  # for keys and values that come up the link
    hidden: int  # residuals of all prompts of a pass
    workspace: int  # activations of one micro-batch, logits, weights made wide
    cpu_layers: int
    kv_cpu: int
    ring: int

    @property
    def device(self) -> int:
        """On the compute device."""
        return (
            self.outside
            + self.resident
            + self.slots
            + self.kv_device
            + self.kv_slots
            + self.hidden
            + self.workspace
        )

    @property
    def cpu(self) -> int:
        """In CPU memory."""
        return self.cpu_layers + self.kv_cpu + self.ring

    def fits(self, budget: Budget) -> bool:
        """Whether both budgets hold it."""
        return self.device <= budget.device and self.cpu <= budget.cpu


def held_by_torch(nbytes: int, count: int) -> int:
    """Bytes of GPU memory that PyTorch's allocator takes for `count` blocks of `nbytes` that stay.
    It cuts blocks of up to 1 MiB out of 2 MiB, blocks below 10 MiB out of 20 MiB, and allocates
    larger ones singly, in steps of 2 MiB.
    """
    if nbytes >= ALONE:
        return count * -(-nbytes // BLOCK_STEP) * BLOCK_STEP
    each = -(-nbytes // 512) * 512
    whole = BLOCK_STEP if nbytes <= SMALL else 2 * ALONE
    return -(-count // (whole // each)) * whole if each else 0


class Widths(Protocol):
    """Elements of one token in one layer."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...


def working_bytes(
    engine: Engine, model: Widths, *, tokens: int, rows: int, batch: int, itemsize: int
) -> tuple[int, int]:
    """For a pass over `tokens` of `batch` sequences: the bytes of all residuals, and of what stands
    beside them: the activations of `rows` tokens where a layer needs most, and logits of one token
    a sequence, also in fp32. Attention is taken to be fused (no score matrix).
    """
    residuals = tokens * model.hidden * itemsize if engine.chunks or rows < tokens else 0
    activations = itemsize * engine.alive_elements(rows, model.hidden, model.intermediate)
    return residuals, activations + batch * model.vocabulary * (itemsize + 4)


def leaving_bytes(rows: int, on_cpu: int, wide: int = 0) -> int:
    """Bytes of keys and values of `rows` tokens on their way to CPU memory, `on_cpu` bytes each:
    those of one part of the prompts leave while the next part's are made. In int8 only codes leave;
    what they are made of (`wide` bytes a token) is free again at once.
    """
    return rows * (wide + 2 * on_cpu)


def _masks(engine: Engine, tokens: int, rows: int, prompt: int, itemsize: int) -> int:
    """Bytes of masks, for prompts of several lengths: the masks that are kept for the layers that
    follow take a byte an element, and the one in use is also needed as numbers to add to scores.
    """
    kept, one = engine.masks
    return min(kept, tokens * prompt) + itemsize * min(one, rows * prompt)


def _rising(model: ModelProfile, job: Job, setting: Setting) -> int:
    """Bytes of the places for keys and values that come up the link, and for a piece converted from
    int8.
    """
    sequences, precision = setting.cpu_sequences, setting.precision
    if not sequences or setting.attention is not CpuAttention.GPU:
        return 0
    head = model.kv_cpu_head_bytes(precision, job.length)
    whole = 0
    if model.engine.int8_kv:
        whole = model.kv_bytes(precision) * job.length // model.kv_heads
    return piece_limit(sequences, model.kv_heads, head) * (KV_PIECES * head + whole)


def _scores(model: ModelProfile, rows: int, prompt: int, itemsize: int) -> int:
    """Bytes of scores in float32, the softmax weights made of them, and those rounded."""
    if not model.score_heads:
        return 0
    elements = int(max(rows, prompt) * prompt * model.score_heads)
    return min(model.engine.scores, elements) * (4 + 4 + itemsize)


def _as_they_are(nbytes: int, count: int) -> int:
    return nbytes * count


def footprint(model: ModelProfile, job: Job, setting: Setting) -> Footprint:
    """What `setting` takes."""
    weights = weights_of(model, setting.precision)
    itemsize = model.itemsize(setting.precision)
    resident, cpu_layers, slot = weights.standing(setting.resident, setting.cpu)
    kv_layer = model.kv_bytes(setting.precision) * job.length
    tokens = setting.prefill_batch * job.prompt
    engine = model.engine
    # Parts of a step that take turns have memory of their own.
    rows = max(min(setting.prefill_rows, tokens), setting.micro_batch)
    if engine.lockstep:
        rows = setting.micro_batch * job.prompt
    elif not engine.micro_batches:
        rows = max(rows, job.prompt)
    residuals, working = working_bytes(
        engine, model, tokens=tokens, rows=rows, batch=setting.batch, itemsize=itemsize
    )
    on_cpu, wide = (f(setting.precision) for f in (model.kv_cpu_bytes, model.kv_bytes))
    # A prompt that is read in parts keeps all of its own until its last part has met them.
    leaving = leaving_bytes(max(rows, job.prompt), on_cpu, wide if engine.int8_kv else 0)
    below = on_cpu * job.length
    on_gpu = setting.gpu_sequences * kv_layer
    held = held_by_torch if model.allocator else _as_they_are
    return Footprint(
        outside=model.outside_bytes,
        resident=resident + (setting.resident * BLOCK_STEP if model.allocator else 0),
        slots=setting.slots * held(slot, 1),
        kv_device=held(on_gpu // 2, 2 * len(model.layers)),
        kv_slots=_rising(model, job, setting),
        hidden=residuals,
        workspace=working
        + (leaving if setting.cpu_sequences else 0)
        + weights.buffer
        + _scores(model, rows, job.prompt, itemsize)
        + (_masks(engine, tokens, rows, job.prompt, itemsize) if model.allocator else 0),
        cpu_layers=cpu_layers,
        kv_cpu=setting.cpu_sequences * below * len(model.layers),
        ring=weights.ring if setting.nvme else 0,
    )
