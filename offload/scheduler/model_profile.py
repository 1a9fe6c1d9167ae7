"""What the planner knows of a model: sizes and counts, from its config and headers alone."""

from __future__ import annotations

from dataclasses import dataclass

from offload.scheduler.engine import EVERYTHING, Engine

ALIGNMENT = 256  # of every tensor in a slot, bytes
KV_SCALE = 4  # bytes, of keys or values of one token and head in int8


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights of matrices are kept; other weights keep the model's own type."""

    name: str
    bits: int
    group: int = 0  # weights that share a scale of 2 bytes; 0: none do

    @property
    def quantised(self) -> bool:
        """Whether the numbers change, so that products may need the weights made whole."""
        return self.group > 0

    def weight_bytes(self, weights: int) -> int:
        """Bytes of so many weights."""
        scales = 2 * -(-weights // self.group) if self.group else 0
        return -(-weights * self.bits // 8) + scales


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", 32),
        Precision("fp16", 16),
        Precision("bf16", 16),
        Precision("int8", 8, 64),
        Precision("int4", 4, 64),
    )
}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One block, in counts of parameters."""

    matrices: int  # in tensors of two and more dimensions
    others: int
    active: int  # that one token meets: fewer where it chooses among experts
    largest: int  # in the largest tensor
    tensors: int
    stored: int = 0  # bytes as they are stored, where that is known; else they are worked out
    slot: int = 0  # likewise as they stand in a slot


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """A decoder. Widths are elements of one token in one layer. Each object equals itself alone, so
    that sums over its layers can be cached.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    native: str  # the precision of the weights as they are
    outside_bytes: int  # embeddings, head, norms: resident
    hidden: int
    intermediate: int
    query_width: int
    kv_width: int  # keys plus values
    kv_heads: int
    group: int  # queries a KV head
    vocabulary: int
    # Query heads whose scores the fused block writes to memory (ALiBi, a soft cap), a layer's mean.
    score_heads: float = 0.0
    unfused: str = ""  # why the fused engine cannot run it
    positions: int | None = None  # that it learnt embeddings of, where it did
    engine: Engine = EVERYTHING  # that runs it
    allocator: bool = False  # whether memory is counted in the blocks that PyTorch takes on a GPU

    def itemsize(self, precision: Precision) -> int:
        """Bytes of an element of activations, keys and values."""
        return (PRECISIONS[self.native] if precision.quantised else precision).bits // 8

    def dtype(self, precision: Precision) -> str:
        """What products compute in."""
        return _DTYPES[self.native if precision.quantised else precision.name]

    def layer_bytes(self, layer: LayerProfile, precision: Precision) -> int:
        """Weight bytes of one layer."""
        if layer.stored:
            return layer.stored
        other = layer.others * self.itemsize(precision)
        return precision.weight_bytes(layer.matrices) + other

    def slot_bytes(self, layer: LayerProfile, precision: Precision) -> int:
        """The most that a layer takes in a slot: every tensor begins at a multiple of 256 bytes."""
        if layer.slot:
            return layer.slot
        parts = layer.tensors * (2 if precision.quantised else 1)  # scales, too
        return self.layer_bytes(layer, precision) + ALIGNMENT * parts

    def kv_bytes(self, precision: Precision) -> int:
        """Bytes of keys and values of one token in one layer."""
        return self.kv_width * self.itemsize(precision)

    def kv_cpu_bytes(self, precision: Precision) -> int:
        """The same for a sequence whose keys and values rest in CPU memory."""
        if not self.engine.int8_kv:
            return self.kv_bytes(precision)
        return self.kv_width + 2 * self.kv_heads * KV_SCALE

    def kv_cpu_head_bytes(self, precision: Precision, tokens: int) -> int:
        """The same for one KV head of a sequence of so many tokens."""
        return -(-self.kv_cpu_bytes(precision) * tokens // self.kv_heads)
