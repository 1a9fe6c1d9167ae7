"""Copies that move what a kernel moves, from and to the same places, and compute nothing.

What they reach is what the pattern itself allows: how many streams are read and written at a time,
in pieces of what size. Triton, which torch brings along on a GPU, makes kernels of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from offload.kernels import QkvLayout

BLOCK_BYTES = 8192  # of one stream that a program moves
LARGE_TILE = 16384  # elements; from there on a program has more warps


@triton.jit
def _copy_streams(  # type: ignore[no-untyped-def]
    in0, in1, in2, out0, out1, out2, size, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    a = tl.load(in0 + at, mask=there)
    if COUNT > 1:
        b = tl.load(in1 + at, mask=there)
    if COUNT > 2:
        c = tl.load(in2 + at, mask=there)
    tl.store(out0 + at, a, mask=there)
    if COUNT > 1:
        tl.store(out1 + at, b, mask=there)
    if COUNT > 2:
        tl.store(out2 + at, c, mask=there)


def copy_streams(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """outputs[j] = inputs[j] for one to three pairs of one size, all at once.

    An output may be an input of another pair.
    """
    size = inputs[0].numel()
    block = BLOCK_BYTES // inputs[0].itemsize
    count = len(inputs)
    spare = [inputs[0]] * (3 - count)  # not touched
    grid = (triton.cdiv(size, block),)
    _copy_streams[grid](
        *inputs, *spare, *outputs, *spare, size, COUNT=count, BLOCK=block, num_warps=4
    )


@triton.jit
def _split_heads(  # type: ignore[no-untyped-def]
    qkv, query, key, value, row_stride, tokens, column, batch_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_TILE)[None, :]
    h = tl.arange(0, Q_TILE)[:, None]
    kv = tl.arange(0, KV_TILE)[:, None]
    a_query = (h < HEADS) & (d < HEAD_DIM)
    a_key = (kv < KV_HEADS) & (d < HEAD_DIM)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    source = qkv + row * row_stride
    q = tl.load(source + Q + h // GROUP * Q_STRIDE + h % GROUP * HEAD_DIM + d, mask=a_query)
    k = tl.load(source + K + kv * KV_STRIDE + d, mask=a_key)
    v = tl.load(source + V + kv * KV_STRIDE + d, mask=a_key)
    tl.store(query + row * (HEADS * HEAD_DIM) + h * HEAD_DIM + d, q, mask=a_query)
    place = row // tokens * batch_stride + (column + row % tokens) * HEAD_DIM + kv * head_stride + d
    tl.store(key + place, k, mask=a_key)
    tl.store(value + place, v, mask=a_key)


def split_heads(
    qkv: torch.Tensor,
    layout: QkvLayout,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: int,
) -> None:
    """RotaryAppend without a rotation, a bias or norms, a program a row.

    qkv [batch, tokens, layout.width], query [batch, tokens, heads, head_dim], contiguous; the
    caches [batch, kv_heads, capacity, head_dim], contiguous, whose `column` takes the first token.
    """
    batch, tokens, _ = qkv.shape
    tiles = [triton.next_power_of_2(n) for n in (layout.heads, layout.kv_heads, layout.head_dim)]
    is_large = (tiles[0] + 2 * tiles[1]) * tiles[2] > LARGE_TILE
    _split_heads[(batch * tokens,)](
        qkv, query, key_cache, value_cache,
        qkv.stride(1), tokens, column, key_cache.stride(0), key_cache.stride(1),
        layout.heads, layout.kv_heads, layout.head_dim,
        layout.q_offset, layout.k_offset, layout.v_offset,
        layout.q_group_stride, layout.kv_group_stride, *tiles,
        num_warps=8 if is_large else 4,
    )  # fmt: skip


def of_copies(copy: Callable[..., None], *arguments: Sequence[object]) -> Callable[[int], None]:
    """A function for `Case.peers` that runs `copy` on every argument's element i."""
    return lambda i: copy(*(each[i] for each in arguments))
