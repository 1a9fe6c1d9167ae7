"""torch.ops.offload.rotary_append."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels.norm import Norm
from offload.kernels.ops.norm_fields import norm_fields, norm_of, norm_schema
from offload.kernels.ops.registration import define, launch
from offload.kernels.qkv import QkvLayout
from offload.kernels.rotary import RotaryAppend
from offload.kernels.rotation import Rotation


def _rotary_query(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return qkv.new_empty(*qkv.shape[:2], heads, head_dim)


def _rotary_append(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    places: list[int],
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    **options: Any,
) -> torch.Tensor:
    if len(places) != 5:
        raise ValueError(
            "rotary_append: places must be [q_offset, k_offset, v_offset, q_group_stride, "
            f"kv_group_stride], not {places}"
        )
    rotation = None
    if cos is not None and sin is not None:
        rotation = Rotation(cos, sin, interleaved)
    elif cos is not None or sin is not None:
        raise ValueError("rotary_append: cos and sin must be given together")
    layout = QkvLayout(heads, kv_heads, head_dim, qkv.shape[-1], *places)
    query = _rotary_query(qkv, key_cache, value_cache, column, heads, kv_heads, head_dim)
    call = RotaryAppend(
        qkv,
        layout=layout,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        column=column,
        rotation=rotation,
        q_norm=norm_of("q_norm", options),
        k_norm=norm_of("k_norm", options),
        **options,
    )
    launch(call, qkv.device)
    return query


define(
    "rotary_append(Tensor qkv, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor column, "
    "SymInt heads, SymInt kv_heads, SymInt head_dim, SymInt[] places, *, Tensor? bias=None, "
    "Tensor? cos=None, Tensor? sin=None, bool interleaved=False, "
    + ", ".join(map(norm_schema, ("q_norm", "k_norm")))
    + ") -> Tensor",
    _rotary_append,
    _rotary_query,
)


def rotary_append(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    layout: QkvLayout,
    *,
    bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> torch.Tensor:
    """Append qkv's keys and values to the caches; the queries [batch, tokens, heads, head_dim].

    See `RotaryAppend` for shapes, dtypes and errors.
    """
    return torch.ops.offload.rotary_append(
        qkv,
        key_cache,
        value_cache,
        column,
        layout.heads,
        layout.kv_heads,
        layout.head_dim,
        [
            layout.q_offset,
            layout.k_offset,
            layout.v_offset,
            layout.q_group_stride,
            layout.kv_group_stride,
        ],
        bias=bias,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        **norm_fields("q_norm", q_norm),
        **norm_fields("k_norm", k_norm),
    )
