"""From a QKV product to rotated queries and a longer cache: bias, head norms, rotation, append."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels import reference, structs
from offload.kernels.activation import row_stride
from offload.kernels.cache_checks import check_caches
from offload.kernels.call import (
    Call,
    check,
    check_equal_strides,
    dtype_code,
    pointer,
    stride_of,
)
from offload.kernels.norm import Norm, norm_struct
from offload.kernels.qkv import QkvLayout

__all__ = ["QkvLayout", "RotaryAppend"]

OP = "rotary_append"


class RotaryAppend(Call):
    """Split rows of qkv, add their bias, normalise heads, rotate, write queries and cache columns.

    qkv: [batch, tokens, layout.width], rows at one stride. query, written: [batch, tokens, heads,
    head_dim], any strides but the last dimension's. key_cache, value_cache, appended to: [batch,
    kv_heads, capacity, head_dim] with equal strides, a head's columns next to each other; both may
    be views of larger buffers. column: int32 [1] or [batch] on the same device, where a row's first
    token goes; it is read at launch. A token whose column is outside of the cache is not written.
    bias: [layout.width]. cos, sin: float32 [1 or batch, tokens, rotary_dim / 2], for the first
    rotary_dim elements of every query and key, in pairs (2i, 2i + 1) where `interleaved`, else (i,
    i + rotary_dim / 2). q_norm, k_norm: over head_dim, before the rotation. Computed in float32,
    rounded once. `early`: see ResidualNorm.

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
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        interleaved: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        early: bool = False,
    ) -> None:
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
        stride = row_stride(OP, "qkv", qkv)
        query_shape = (batch, tokens, layout.heads, head_dim)
        check(OP, "query", query, query_shape, qkv, contiguous=False)
        _check_no_overlap("query", query)
        check_caches(
            OP, key_cache, value_cache, qkv,
            batch=batch, head_dim=head_dim, kv_heads=layout.kv_heads,
        )  # fmt: skip
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            _check_no_overlap(name, cache)
        if not isinstance(column, torch.Tensor) or tuple(column.shape) != (1,):
            check(OP, "column", column, (batch,), qkv, dtype=torch.int32)
        else:
            check(OP, "column", column, (1,), qkv, dtype=torch.int32)
        if bias is not None:
            check(OP, "bias", bias, (layout.width,), qkv)
        half, rotary_stride = _check_rotary(cos, sin, batch, tokens, head_dim, qkv)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                norm.check(OP, name, head_dim, qkv)

        self.arguments = structs.RotaryAppendStruct(
            qkv=pointer(qkv),
            bias=pointer(bias),
            query=pointer(query),
            key_cache=pointer(key_cache),
            value_cache=pointer(value_cache),
            cos=pointer(cos),
            sin=pointer(sin),
            column=pointer(column),
            q_norm=norm_struct(q_norm),
            k_norm=norm_struct(k_norm),
            row_stride=stride,
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
            rotary_batch_stride=rotary_stride,
            column_stride=0 if column.shape[0] == 1 else 1,
            cache_capacity=key_cache.shape[2],
            batch=batch,
            tokens=tokens,
            heads=layout.heads,
            kv_heads=layout.kv_heads,
            head_dim=head_dim,
            rotary_dim=2 * half,
            interleaved=interleaved,
            dtype=dtype,
            launch_early=early,
        )
        self._qkv, self._query = qkv, query
        self._options: dict[str, Any] = {
            "layout": layout,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "column": column,
            "bias": bias,
            "cos": cos,
            "sin": sin,
            "interleaved": interleaved,
            "q_norm": q_norm,
            "k_norm": k_norm,
        }
        self._ready(qkv.device)

    def _reference(self) -> None:
        self._query.copy_(reference.rotary_append(self._qkv, **self._options))


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


def _check_rotary(
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    batch: int,
    tokens: int,
    head_dim: int,
    qkv: torch.Tensor,
) -> tuple[int, int]:
    """Half of the rotary dimension and the stride from one row's angles to the next row's."""
    if cos is None and sin is None:
        return 0, 0
    if cos is None or sin is None:
        raise ValueError(f"{OP}: cos and sin must be given together")
    if not isinstance(cos, torch.Tensor) or cos.dim() != 3:
        what = list(cos.shape) if isinstance(cos, torch.Tensor) else cos
        raise ValueError(
            f"{OP}: cos must be a tensor [1 or {batch}, {tokens}, rotary_dim / 2], not {what}"
        )
    rows, half = (1 if cos.shape[0] == 1 else batch), cos.shape[2]
    if not 1 <= half <= head_dim // 2:
        raise ValueError(
            f"{OP}: cos has {half} angles a token; a head of {head_dim} elements takes 1 to "
            f"{head_dim // 2}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check(OP, name, table, (rows, tokens, half), qkv, dtype=torch.float32, contiguous=False)
        if tokens > 1 and table.stride(1) != half:
            raise ValueError(
                f"{OP}: the tokens' angles in {name} must lie next to each other; its strides are "
                f"{list(table.stride())}"
            )
    check_equal_strides(OP, {"cos": cos, "sin": sin}, (0,))
    return half, stride_of(cos, 0)
