"""What every op computes, in plain torch: the CPU's implementation, and the tests' yardstick.

Inputs of float32, float16 and bfloat16 are computed with in float32 and rounded once, where a
result is returned; float64 stays float64. Nothing here checks its arguments: the ops' classes do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from offload.kernels.norm import Norm
from offload.kernels.qkv import QkvLayout
from offload.kernels.rotation import Rotation
from offload.kernels.scores import Scores


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype that is computed with."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def normalise(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """`norm` over the last dimension of x (float32 or float64), not rounded; None: x itself."""
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        x = x * (norm.weight.to(x.dtype) + norm.weight_offset)
    if norm.bias is not None:
        x = x + norm.bias.to(x.dtype)
    return x


def activate(x: torch.Tensor, kind: str | None) -> torch.Tensor:
    """The activation function called `kind`; None: x itself."""
    if kind is None:
        return x
    if kind == "relu":
        return functional.relu(x)
    if kind == "gelu":
        return functional.gelu(x)
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if kind == "silu":
        return functional.silu(x)
    raise ValueError(f"no activation is called {kind!r}")


def add_residual(
    *,
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    branch_norm: Norm | None = None,
) -> torch.Tensor:
    """residual + branch_norm(branch + bias) + (branch2 + bias2), not rounded; [..., width]."""
    total: torch.Tensor | None = None
    if residual is not None:
        total = wide(residual)
    if branch is not None:
        x = wide(branch) if bias is None else wide(branch) + wide(bias)
        x = normalise(x, branch_norm)
        total = x if total is None else total + x
    if branch2 is not None:
        x = wide(branch2) if bias2 is None else wide(branch2) + wide(bias2)
        total = x if total is None else total + x
    assert total is not None
    return total


def residual_norm(
    *,
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    branch_norm: Norm | None = None,
    norm: Norm | None = None,
    norm2: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """sum = residual + branch_norm(branch + bias) + (branch2 + bias2); norm(sum); norm2(sum).

    Tensors are [..., width], biases [width]; one of the three tensors must be given. The norms take
    the sum as it was before rounding. Without a norm its place is None.
    """
    given = next(x for x in (residual, branch, branch2) if x is not None)
    total = add_residual(
        branch=branch,
        residual=residual,
        bias=bias,
        branch2=branch2,
        bias2=bias2,
        branch_norm=branch_norm,
    )
    return (
        total.to(given.dtype),
        None if norm is None else normalise(total, norm).to(given.dtype),
        None if norm2 is None else normalise(total, norm2).to(given.dtype),
    )


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of x [..., width] (float32 or float64), and a scale a row, of x's dtype [...]:
    code * scale is x, to half a scale.

    A row whose largest magnitude is below 1e-30 has the scale of one with 1e-30; a row with an
    infinity or NaN has the scale NaN, and any codes.
    """
    most = x.abs().amax(-1).clamp(min=1e-30)
    finite = torch.isfinite(most)
    # A tensor is divided by a tensor: 127 / most is rounded twice, and on a GPU most / 127 is a
    # product with 1 / 127.
    largest_code = torch.full_like(most, 127)
    factor = torch.where(finite, largest_code / most, 0)
    codes = (x.double() * factor.double().unsqueeze(-1)).nan_to_num(0).round()
    return codes.to(torch.int8), torch.where(finite, most / largest_code, torch.nan)


def scale_sums(
    sums: torch.Tensor,
    row_scales: torch.Tensor,
    scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(sums * row_scales * scales + bias) + residual, not rounded; with a gate act(gate) * up.

    sums: integers [rows, columns]; row_scales: [rows]; scales: one a column, in any shape, or one.
    """
    row_scales = wide(row_scales)
    x = sums.to(row_scales.dtype) * row_scales.unsqueeze(-1) * wide(scales).reshape(-1)
    if bias is not None:
        x = x + wide(bias)
    if gated:
        gate, up = x.chunk(2, -1)
        x = activate(gate, activation) * up
    else:
        x = activate(x, activation)
    return x if residual is None else x + wide(residual)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Heads x [batch, tokens, heads, head_dim], with their first elements rotated."""
    c, s = (table.to(x.dtype).unsqueeze(2) for table in (rotation.cos, rotation.sin))
    turned, rest = x[..., : rotation.dim], x[..., rotation.dim :]
    if rotation.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned, rest), -1)


def split_qkv(
    qkv: torch.Tensor,
    layout: QkvLayout,
    *,
    bias: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The queries [batch, tokens, heads, head_dim], keys and values (kv_heads of them) of qkv.

    qkv: [batch, tokens, layout.width]; bias: [layout.width]; the norms run over head_dim, after
    the bias and before the rotation.
    """
    x = wide(qkv) if bias is None else wide(qkv) + wide(bias)
    batch, tokens = qkv.shape[:2]

    def heads(offset: int, group_stride: int, group: int) -> torch.Tensor:
        device = qkv.device
        columns = (
            offset
            + torch.arange(layout.kv_heads, device=device)[:, None] * group_stride
            + torch.arange(group * layout.head_dim, device=device)
        )
        count = layout.kv_heads * group
        return x[..., columns.flatten()].view(batch, tokens, count, layout.head_dim)

    q = normalise(heads(layout.q_offset, layout.q_group_stride, layout.group), q_norm)
    k = normalise(heads(layout.k_offset, layout.kv_group_stride, 1), k_norm)
    v = heads(layout.v_offset, layout.kv_group_stride, 1)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype)


def append(cache: torch.Tensor, new: torch.Tensor, column: torch.Tensor) -> None:
    """Write new [batch, tokens, kv_heads, head_dim] into cache [batch, kv_heads, capacity, ...].

    Row b's first token goes to column[b] (or all to column[0]); one outside of the cache is not
    written.
    """
    batch, tokens = new.shape[:2]
    place = column.long().expand(batch)[:, None] + torch.arange(tokens, device=new.device)
    inside = (place >= 0) & (place < cache.shape[2])
    row = torch.arange(batch, device=new.device)[:, None].expand(batch, tokens)
    cache.transpose(1, 2)[row[inside], place[inside]] = new[inside]


def rotary_append(
    qkv: torch.Tensor,
    *,
    layout: QkvLayout,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    bias: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> torch.Tensor:
    """Append the keys and values of qkv to the caches; returns the queries (see `split_qkv`)."""
    query, key, value = split_qkv(
        qkv, layout, bias=bias, rotation=rotation, q_norm=q_norm, k_norm=k_norm
    )
    append(key_cache, key, column)
    append(value_cache, value, column)
    return query


def activation(
    input: torch.Tensor,
    *,
    kind: str | None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(input + bias), or act(gate + bias) * (up + bias) where a row of input is [gate, up]."""
    x = wide(input) if bias is None else wide(input) + wide(bias)
    return _activated(x, kind, gated).to(input.dtype)


def _activated(x: torch.Tensor, kind: str | None, gated: bool) -> torch.Tensor:
    if not gated:
        return activate(x, kind)
    gate, up = x.chunk(2, -1)
    return activate(gate, kind) * up


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(norm(input) @ weight.T + bias) + residual; with a gate act(gate) * up + residual.

    input [..., depth], weight [outputs, depth] or with a gate [2 * outputs, depth], gate first;
    bias as many; residual [..., outputs].
    """
    x = normalise(wide(input), norm)
    x = functional.linear(x, wide(weight), None if bias is None else wide(bias))
    x = _activated(x, activation, gated)
    if residual is not None:
        x = x + wide(residual)
    return x.to(input.dtype)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    length: torch.Tensor,
    scores: Scores,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query a sequence, [batch, heads, head_dim], against caches [batch, kv_heads, capacity,
    head_dim]; returns [batch, heads, head_dim].

    Column j of row b is seen if start[b] <= j < length[b] and, with a window, j >= length[b] -
    window. A row that sees nothing gives zeros. Columns that are not seen may hold anything, NaN
    included.
    """
    q = wide(query)
    batch, heads, head_dim = query.shape
    kv_heads, capacity = key_cache.shape[1:3]
    column = torch.arange(capacity, device=query.device)
    seen = column < length[:, None]
    if start is not None:
        seen &= column >= start[:, None]
    if scores.window:
        seen &= column >= length[:, None] - scores.window
    seen = seen[:, None, None, :]  # [batch, 1, 1, capacity]
    k = torch.where(seen.mT, wide(key_cache), 0)
    v = torch.where(seen.mT, wide(value_cache), 0)
    q = q.view(batch, kv_heads, heads // kv_heads, head_dim)
    score = q @ k.mT * scores.scale  # [batch, kv_heads, group, capacity]
    if scores.softcap:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    sink = None if scores.sinks is None else scores.sinks.to(q.dtype).view(1, kv_heads, -1, 1)
    if scores.slopes is not None:
        # All less what the last column would add: far out, float32 has no digits for both.
        slope = scores.slopes.to(q.dtype).view(1, kv_heads, -1, 1)
        last = length.view(-1, 1, 1, 1) - 1
        score = score + slope * (column - last)
        sink = None if sink is None else sink - slope * last
    score = score.masked_fill(~seen, -math.inf)
    top = score.amax(-1, keepdim=True) if capacity else score.new_zeros(*score.shape[:3], 1)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top == -math.inf, 0, top)  # nothing is seen: all weights are exp(-inf)
    weights = torch.exp(score - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    out = weights @ v / torch.where(total == 0, 1, total)
    return out.view(batch, heads, head_dim).to(query.dtype)


def host_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    length: torch.Tensor,
    scores: Scores,
    key_scales: Sequence[torch.Tensor] | None = None,
    value_scales: Sequence[torch.Tensor] | None = None,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """decode_attention of sequences with a cache each, [kv_heads, capacity, head_dim], and, where
    these are int8, scales [kv_heads, capacity]; returns [batch, heads, head_dim].
    """
    out = torch.empty_like(query)
    for b, pair in enumerate(zip(keys, values, strict=True)):
        key, value = (x.to(wide(query).dtype) for x in pair)
        if key_scales is not None and value_scales is not None:
            key, value = key * key_scales[b][..., None], value * value_scales[b][..., None]
        row = slice(b, b + 1)
        out[row] = decode_attention(
            query[row],
            key[None],
            value[None],
            length=length[row],
            scores=scores,
            start=None if start is None else start[row],
        )
    return out


def append_columns(
    new: torch.Tensor,
    caches: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
    length: torch.Tensor,
) -> None:
    """Write row b of `new`, [batch, kv_heads, head_dim], to column length[b] - 1 of the cache of
    sequence b, [kv_heads, capacity, head_dim], as its dtype; int8 with scales [kv_heads, capacity].
    """
    for b, n in enumerate(length.tolist()):
        if n < 1:
            continue
        if scales is None:
            caches[b][:, n - 1] = new[b].to(caches[b].dtype)
        else:
            caches[b][:, n - 1], scales[b][:, n - 1] = int8_rows(new[b].float())
