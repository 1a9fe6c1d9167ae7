"""From a QKV product to rotated queries and a longer cache: bias, head norms, rotation, append."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels import reference, structs
from offload.kernels.activation import row_stride
from offload.kernels.cache_checks import check_caches
from offload.kernels.call import Call, check, dtype_code, pointer, stride_of
from offload.kernels.norm import Norm, norm_struct
from offload.kernels.qkv import QkvLayout
from offload.kernels.rotation import Rotation

__all__ = ["QkvLayout", "RotaryAppend"]

OP = "rotary_append"


class RotaryAppend(Call):
    """Split rows of qkv, add their bias, normalise heads, rotate, write queries and cache columns.

    qkv: [batch, tokens, layout.width], rows at one stride. query, written: [batch, tokens, heads,
    head_dim], any strides but the last dimension's. key_cache, value_cache, appended to: [batch,
    kv_heads, capacity, head_dim] with equal strides, a head's columns next to each other; both may
    be views of larger buffers. column: int32 [1] or [batch] on the same device, where a row's first
    token goes; it is read at launch. A token whose column is outside of the cache is not written.
    bias: [layout.width]. rotation: of queries and keys; None: they are not rotated. q_norm, k_norm:
    over head_dim, before the rotation. Computed in float32, rounded once. `early`: see
    ResidualNorm.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    function = "offload_rotary_append"

    def __init__(
        self,
        qkv: torch.Tensor,
        *,
        layout: QkvLayout,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        column: torch.Tensor,
        bias: torch.Tensor | None = None,
        rotation: Rotation | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        early: bool = False,
    ) -> None:
        dtype = _check_tensors(qkv, layout, query, key_cache, value_cache, column, bias)
        batch, tokens, _ = qkv.shape
        head_dim = layout.head_dim
        if rotation is not None:
            rotation.check(OP, batch, tokens, head_dim, qkv)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                norm.check(OP, name, head_dim, qkv)

        self.arguments = structs.RotaryAppendStruct(
            qkv=pointer(qkv),
            bias=pointer(bias),
            query=pointer(query),
            key_cache=pointer(key_cache),
            value_cache=pointer(value_cache),
            column=pointer(column),
            q_norm=norm_struct(q_norm),
            k_norm=norm_struct(k_norm),
            row_stride=row_stride(OP, "qkv", qkv),
            q_offset=layout.q_offset,
            k_offset=layout.k_offset,
            v_offset=layout.v_offset,
            q_group_stride=layout.q_group_stride,
            kv_group_stride=layout.kv_group_stride,
            query_batch_stride=stride_of(query, 0),
            query_token_stride=stride_of(query, 1),
            query_head_stride=stride_of(query, 2),
            cache_batch_stride=stride_of(key_cache, 0),
            cache_head_stride=stride_of(key_cache, 1),
            column_stride=0 if column.shape[0] == 1 else 1,
            cache_capacity=key_cache.shape[2],
            batch=batch,
            tokens=tokens,
            heads=layout.heads,
            kv_heads=layout.kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            launch_early=early,
        )
        if rotation is not None:
            self.arguments.cos = pointer(rotation.cos)
            self.arguments.sin = pointer(rotation.sin)
            self.arguments.rotary_batch_stride = stride_of(rotation.cos, 0)
            self.arguments.rotary_dim = rotation.dim
            self.arguments.interleaved = rotation.interleaved
        self._qkv, self._query = qkv, query
        self._options: dict[str, Any] = {
            "layout": layout,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "column": column,
            "bias": bias,
            "rotation": rotation,
            "q_norm": q_norm,
            "k_norm": k_norm,
        }
        self._ready(qkv.device)

    def _reference(self) -> None:
        self._query.copy_(reference.rotary_append(self._qkv, **self._options))


def _check_tensors(
    qkv: torch.Tensor,
    layout: QkvLayout,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    bias: torch.Tensor | None,
) -> int:
    """Refuse what does not fit together; returns the code of the tensors' dtype."""
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"{OP}: qkv must be a tensor, not {type(qkv).__name__}")
    if not isinstance(layout, QkvLayout):
        raise TypeError(f"{OP}: layout must be a QkvLayout, not {type(layout).__name__}")
    dtype = dtype_code(OP, qkv)
    if qkv.dim() != 3:
        raise ValueError(f"{OP}: qkv must be [batch, tokens, width], not {list(qkv.shape)}")
    batch, tokens, _ = qkv.shape
    head_dim = layout.head_dim
    check(OP, "qkv", qkv, (batch, tokens, layout.width), qkv, contiguous=False)
    query_shape = (batch, tokens, layout.heads, head_dim)
    check(OP, "query", query, query_shape, qkv, contiguous=False)
    _check_no_overlap("query", query)
    check_caches(
        OP, key_cache, value_cache, qkv, batch=batch, head_dim=head_dim, kv_heads=layout.kv_heads
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _check_no_overlap(name, cache)
    one = isinstance(column, torch.Tensor) and tuple(column.shape) == (1,)
    check(OP, "column", column, (1,) if one else (batch,), qkv, dtype=torch.int32)
    if bias is not None:
        check(OP, "bias", bias, (layout.width,), qkv)
    return dtype


def _check_no_overlap(name: str, tensor: torch.Tensor) -> None:
    """Refuse an output of which two elements share an address (an expanded tensor)."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise ValueError(
                    f"{OP}: elements of {name} overlap; its shape is {list(tensor.shape)} and its "
                    f"strides are {list(tensor.stride())}"
                )
            reach += stride * (size - 1)
