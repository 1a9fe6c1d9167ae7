"""One query a sequence against its keys and values: the attention of a decode step."""

from __future__ import annotations

import torch

from offload.kernels import reference, structs
from offload.kernels.cache_checks import check_caches
from offload.kernels.call import Call, check, dtype_code, pointer, stride_of
from offload.kernels.scores import Scores
from offload.kernels.workspace import Workspace

__all__ = ["DecodeAttention"]

OP = "decode_attention"
COUNTERS = 3 * 1024  # OFFLOAD_DECODE_ATTENTION_COUNTERS
MOST_SPLITS = 1024  # OFFLOAD_DECODE_ATTENTION_SHARES
MOST_HEAD_DIM = 512


class DecodeAttention(Call):
    """out = softmax(scores of the columns that each query sees) @ values, one query a sequence.

    query: [batch, heads, head_dim], any strides but the last dimension's. key_cache, value_cache:
    [batch, kv_heads, capacity, head_dim] with equal strides, a head's columns next to each other;
    both may be views of larger buffers. Query head h reads KV head h // (heads // kv_heads). out:
    as query, contiguous. All of one dtype (float32, float16, bfloat16); head_dim up to 512.

    Row b sees column j if start[b] <= j < length[b] and, with a window, j >= length[b] - window.
    length, start: int32 [batch] on the same device, read at launch, so that a captured launch
    follows them; a length beyond `max_length` (default: the capacity) counts as max_length. A row
    that sees nothing gives zeros. Columns that are not seen may hold anything, NaN included.

    The batch's columns are split over the GPU's multiprocessors by their actual number
    (flash-decoding, arXiv:2311.01282, in stream-K shares, arXiv:2301.03598), so the time of ragged
    rows follows the sum of their lengths. `even` is a hint that all rows see about as many columns:
    the kernel then spends less on finding out how they differ. Partial results are float32 and are
    added in a fixed order. `workspace` may be shared with other calls of the same stream; without
    one the call has its own. `splits` (the most shares) and `variant` (see offload_kernels.h) are
    for measurements and tests; 0 lets the library choose.

    `early`: see ResidualNorm. Such a launch reads more than others before the kernel ahead of it
    has ended: length, start and all columns but each row's last visible one must have been written
    before the stream's latest launch that was not early. Only the query and the rows' last visible
    columns may come from that launch or a later one.

    Raises ValueError or TypeError for arguments that do not fit.
    """

    function = "offload_decode_attention"

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        length: torch.Tensor,
        scores: Scores,
        start: torch.Tensor | None = None,
        max_length: int | None = None,
        workspace: Workspace | None = None,
        splits: int = 0,
        variant: int = 0,
        even: bool = False,
        early: bool = False,
    ) -> None:
        dtype = _check_tensors(query, key_cache, value_cache, out, length, start)
        batch, heads, head_dim = query.shape
        kv_heads, capacity = key_cache.shape[1:3]
        scores.check(OP, heads, query)
        max_length = capacity if max_length is None else max_length
        if not 1 <= max_length <= capacity:
            raise ValueError(
                f"{OP}: max_length must be 1 to the caches' capacity of {capacity}, not "
                f"{max_length}"
            )
        if not 0 <= splits <= MOST_SPLITS:
            raise ValueError(f"{OP}: splits must be 0 to {MOST_SPLITS}, not {splits}")
        if not 0 <= variant < 2**31:
            raise ValueError(f"{OP}: variant must be 0 or more, not {variant}")
        if workspace is not None and workspace.device.type != query.device.type:
            raise ValueError(
                f"{OP}: workspace must be on {query.device}, not on {workspace.device}"
            )

        self.arguments = structs.DecodeAttentionStruct(
            query=pointer(query),
            key_cache=pointer(key_cache),
            value_cache=pointer(value_cache),
            output=pointer(out),
            start=pointer(start),
            length=pointer(length),
            slopes=pointer(scores.slopes),
            sinks=pointer(scores.sinks),
            query_batch_stride=stride_of(query, 0),
            query_head_stride=stride_of(query, 1),
            cache_batch_stride=stride_of(key_cache, 0),
            cache_head_stride=stride_of(key_cache, 1),
            scale=scores.scale,
            softcap=scores.softcap,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_length=max_length,
            window=scores.window,
            splits=splits,
            variant=variant,
            even=even,
            dtype=dtype,
            launch_early=early,
        )
        self._query, self._caches, self._out = query, (key_cache, value_cache), out
        self._length, self._start, self._scores = length, start, scores
        self._ready(query.device)
        if self._on_gpu:
            self._take_workspace(Workspace(query.device) if workspace is None else workspace)

    def _take_workspace(self, workspace: Workspace) -> None:
        nbytes = self._library.ask("offload_decode_attention_workspace", self.arguments)
        self._partials, self._counters = workspace.partials(nbytes), workspace.counters(COUNTERS)
        self.arguments.workspace = pointer(self._partials)
        self.arguments.workspace_bytes = self._partials.nbytes
        self.arguments.counters = pointer(self._counters)

    def _reference(self) -> None:
        result = reference.decode_attention(
            self._query,
            *self._caches,
            length=self._length.clamp(max=self.arguments.max_length),
            scores=self._scores,
            start=self._start,
        )
        self._out.copy_(result)


def _check_tensors(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    length: torch.Tensor,
    start: torch.Tensor | None,
) -> int:
    """Refuse tensors that do not fit together; returns the code of their dtype."""
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"{OP}: query must be a tensor, not {type(query).__name__}")
    dtype = dtype_code(OP, query)
    if query.dim() != 3 or query.shape[1] < 1 or query.shape[2] < 1:
        raise ValueError(f"{OP}: query must be [batch, heads, head_dim], not {list(query.shape)}")
    batch, heads, head_dim = query.shape
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"{OP}: head_dim must be at most {MOST_HEAD_DIM}, not {head_dim}")
    check(OP, "query", query, (batch, heads, head_dim), query, contiguous=False)
    check_caches(OP, key_cache, value_cache, query, batch=batch, head_dim=head_dim)
    kv_heads, capacity = key_cache.shape[1:3]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{OP}: {heads} query heads must be a multiple of {kv_heads} KV heads")
    if capacity < 1:
        raise ValueError(f"{OP}: key_cache has no columns; its shape is {list(key_cache.shape)}")
    check(OP, "out", out, (batch, heads, head_dim), query)
    check(OP, "length", length, (batch,), query, dtype=torch.int32)
    if start is not None:
        check(OP, "start", start, (batch,), query, dtype=torch.int32)
    return dtype
