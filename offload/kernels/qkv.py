"""Where the queries, keys and values of every head lie in a row of a QKV product."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QkvLayout:
    """Offsets and strides, in elements, into a row of `width` elements.

    Head h belongs to group g = h // (heads // kv_heads). Its query begins at q_offset +
    g * q_group_stride + (h % (heads // kv_heads)) * head_dim; the group's key at k_offset +
    g * kv_group_stride, its value at v_offset + g * kv_group_stride.
    """

    heads: int
    kv_heads: int
    head_dim: int
    width: int
    q_offset: int
    k_offset: int
    v_offset: int
    q_group_stride: int
    kv_group_stride: int

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"QkvLayout: {name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"QkvLayout: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        for name, stride, size in (
            ("q", self.q_group_stride, self.group * self.head_dim),
            ("k", self.kv_group_stride, self.head_dim),
            ("v", self.kv_group_stride, self.head_dim),
        ):
            offset = getattr(self, f"{name}_offset")
            last = offset + (self.kv_heads - 1) * stride + size
            if offset < 0 or stride < 0 or last > self.width:
                raise ValueError(
                    f"QkvLayout: {name} at offset {offset} with a group stride of {stride} does "
                    f"not fit a row of {self.width} elements"
                )

    @property
    def group(self) -> int:
        """How many query heads share a key and a value."""
        return self.heads // self.kv_heads

    @classmethod
    def apart(cls, heads: int, kv_heads: int, head_dim: int) -> QkvLayout:
        """All queries, then all keys, then all values (Llama, OPT, GPT-2, ...)."""
        queries, keys = heads * head_dim, kv_heads * head_dim
        group = queries // kv_heads if kv_heads > 0 else 0
        return cls(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=queries + 2 * keys,
            q_offset=0,
            k_offset=queries,
            v_offset=queries + keys,
            q_group_stride=group,
            kv_group_stride=head_dim,
        )

    @classmethod
    def grouped(cls, heads: int, kv_heads: int, head_dim: int) -> QkvLayout:
        """For every key-value head its queries, its key, its value (GPT-NeoX, BLOOM, Falcon)."""
        queries = heads // kv_heads * head_dim if kv_heads > 0 else 0
        stride = queries + 2 * head_dim
        return cls(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            width=kv_heads * stride,
            q_offset=0,
            k_offset=queries,
            v_offset=queries + head_dim,
            q_group_stride=stride,
            kv_group_stride=stride,
        )
