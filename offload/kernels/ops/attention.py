"""torch.ops.offload.decode_attention."""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels.attention import DecodeAttention
from offload.kernels.ops.registration import define, launch
from offload.kernels.ops.scratch import workspace
from offload.kernels.scores import Scores


def _attention_output(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


def _decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    **options: Any,
) -> torch.Tensor:
    out = _attention_output(query)
    call = DecodeAttention(
        query,
        key_cache,
        value_cache,
        out,
        length=length,
        scores=Scores(scale, softcap, window, slopes, sinks),
        workspace=workspace(query.device),
        **options,
    )
    launch(call, query.device)
    return out


define(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor length, "
    "float scale, *, Tensor? start=None, Tensor? slopes=None, Tensor? sinks=None, "
    "float softcap=0.0, SymInt window=0, SymInt? max_length=None) -> Tensor",
    _decode_attention,
    _attention_output,
)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    start: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    max_length: int | None = None,
) -> torch.Tensor:
    """One query a sequence against its cache, [batch, heads, head_dim]; see `DecodeAttention`."""
    return torch.ops.offload.decode_attention(
        query,
        key_cache,
        value_cache,
        length,
        scale,
        start=start,
        slopes=slopes,
        sinks=sinks,
        softcap=softcap,
        window=window,
        max_length=max_length,
    )
