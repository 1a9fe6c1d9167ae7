"""The block over many rows: products by the kept libraries, fused kernels for all between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from offload.kernels import Norm
from offload.kernels.call import Call
from offload.kernels.int8_linear import Int8Linear, Int8Rows
from offload.kernels.linear import Linear
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.quantize_rows import QuantizeRows
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.kernels.rotation import Rotation
from offload.kernels.workspace import Workspace
from offload.models.fused.layer_weights import LayerWeights, Product
from offload.models.fused.prefill_attention import PrefillAttention
from offload.models.shape import MLP_ROWS
from offload.models.specs.spec import Angles, LayerSpec

Rows = torch.Tensor | Int8Rows  # [rows, width]


@dataclass(slots=True)
class Prefill:
    """What all layers of a pass over [batch, tokens] share; `buffers` also with passes over other
    sequences that alternate with it.
    """

    attention: PrefillAttention
    column: torch.Tensor  # int32 [1]: where the first token goes
    end: int  # columns that count once the new tokens are there
    angles: dict[str, Angles]
    stream: int
    workspace: Workspace
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def scratch(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Scratch memory by name, which the layers use one after the other; its content is
        undefined.
        """
        count = torch.Size(shape).numel()
        found = self.buffers.get(name)
        if found is None or found.numel() < count:
            self.buffers.pop(name, None)  # first: both would be there at once
            found = None
            with torch.inference_mode(False):  # another pass may be in another mode
                found = torch.empty(count, dtype=like.dtype, device=like.device)
            self.buffers[name] = found
        return found[:count].view(shape)


def run_block(
    spec: LayerSpec,
    weights: LayerWeights,
    hidden: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    work: Prefill,
) -> None:
    """Replace hidden [batch, tokens, width], contiguous, by the block's output.

    keys, values: the layer's buffers [batch, kv_heads, capacity, head_dim], which are appended to.
    """
    rows = hidden.view(-1, hidden.shape[-1])
    normed = work.scratch("normed", tuple(rows.shape), rows)
    if not spec.parallel:
        into = _normed(rows, weights.attention_norm, normed, work, weights.qkv)
        branch = _attention(spec, weights, into, hidden, keys, values, work)
        bias, norm_out = weights.attention_out.bias, weights.attention_norm_out
        sum_norm, mlp_norm = weights.attention_sum_norm, weights.mlp_norm
        following = weights.mlp_in
        into = _add(rows, branch, bias, norm_out, sum_norm, mlp_norm, normed, work, following)
        branch = _mlp(spec, weights, into, branch, work)
        bias, norm_out = weights.mlp_out.bias, weights.mlp_norm_out
        _add(rows, branch, bias, norm_out, weights.mlp_sum_norm, None, normed, work)
        return
    for_mlp = into = _normed(rows, weights.attention_norm, normed, work)
    if spec.mlp_norm != spec.attention_norm:
        second = work.scratch("normed for the MLP", tuple(rows.shape), rows)
        for_mlp = _normed(rows, weights.mlp_norm, second, work)
    branch = _attention(spec, weights, into, hidden, keys, values, work)
    second = work.scratch("MLP", tuple(rows.shape), rows)
    ResidualNorm(
        residual=rows,
        branch=branch,
        bias=weights.attention_out.bias,
        branch2=_mlp(spec, weights, for_mlp, second, work),
        bias2=weights.mlp_out.bias,
        sum_out=rows,
    ).launch(work.stream)


def _normed(
    rows: torch.Tensor,
    norm: Norm | None,
    out: torch.Tensor,
    work: Prefill,
    following: Product | None = None,
) -> Rows:
    """The rows as the product `following` sees them: in `out`, or rounded to int8."""
    if norm is None:
        return rows
    if _rounds(following, rows):
        in_int8 = _int8(rows, work)
        in_int8.made_of(rows, norm=norm).launch(work.stream)
        return in_int8
    ResidualNorm(residual=rows, norm=norm, out=out).launch(work.stream)
    return out


def _add(
    rows: torch.Tensor,
    branch: torch.Tensor,
    bias: torch.Tensor | None,
    branch_norm: Norm | None,
    sum_norm: Norm | None,
    next_norm: Norm | None,
    out: torch.Tensor,
    work: Prefill,
    following: Product | None = None,
) -> Rows:
    """Add the branch to rows, in place; returns what the product `following` sees: `rows`, `out`,
    or rows rounded to int8.
    """
    if sum_norm is not None:
        ResidualNorm(
            residual=rows,
            branch=branch,
            bias=bias,
            branch_norm=branch_norm,
            norm=sum_norm,
            out=rows,
        ).launch(work.stream)
        return _normed(rows, next_norm, out, work, following)
    if next_norm is not None and _rounds(following, rows):
        in_int8 = _int8(rows, work)
        before = {"branch": branch, "bias": bias, "branch_norm": branch_norm, "norm": next_norm}
        in_int8.made_of(rows, **before, sum_out=rows).launch(work.stream)
        return in_int8
    ResidualNorm(
        residual=rows,
        branch=branch,
        bias=bias,
        branch_norm=branch_norm,
        sum_out=rows,
        norm=next_norm,
        out=None if next_norm is None else out,
    ).launch(work.stream)
    return rows if next_norm is None else out


def _rounds(product: Product | None, rows: torch.Tensor) -> bool:
    """Whether what is ahead of the product rounds its rows to int8."""
    return product is not None and product.int8 and QuantizeRows.holds(rows.shape[1], rows.dtype)


def _int8(rows: torch.Tensor, work: Prefill) -> Int8Rows:
    """Memory for the rows in int8."""
    size = -(-Int8Rows.nbytes(*rows.shape) // rows.element_size())
    memory = work.scratch("normed in int8", (size,), rows).view(torch.uint8)
    return Int8Rows.within(memory, *rows.shape)


def _attention(
    spec: LayerSpec,
    weights: LayerWeights,
    into: Rows,
    hidden: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    work: Prefill,
) -> torch.Tensor:
    """The attention branch of rows without its last bias, for `hidden` [batch, tokens, width]."""
    layout, shape = spec.layout, hidden.shape[:2]
    count = shape.numel()
    qkv = work.scratch("wide", (*shape, layout.width), hidden)
    # Its bias is added where heads are rotated and kept.
    _linear(into, weights.qkv, qkv.view(count, -1), work)
    query = work.scratch("query", (*shape, layout.heads, layout.head_dim), hidden)
    rotation = None
    if spec.rotary is not None:
        rotation = Rotation(*work.angles[spec.rotary], spec.interleaved)
    RotaryAppend(
        qkv,
        layout=layout,
        query=query,
        key_cache=keys,
        value_cache=values,
        column=work.column,
        bias=weights.qkv.bias,
        rotation=rotation,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
    ).launch(work.stream)
    attended = work.attention(query, keys[:, :, : work.end], values[:, :, : work.end], spec)
    out = work.scratch("attention", (count, hidden.shape[2]), hidden)
    _linear(attended.view(count, -1), weights.attention_out, out, work)
    return out


def _mlp(
    spec: LayerSpec, weights: LayerWeights, into: Rows, out: torch.Tensor, work: Prefill
) -> torch.Tensor:
    """The MLP branch of [rows, width] without its last bias, in `out`."""
    width = weights.mlp_in.outputs // (2 if spec.gated else 1)
    for first in range(0, out.shape[0], MLP_ROWS):
        rows = slice(first, min(first + MLP_ROWS, out.shape[0]))
        inner = work.scratch("wide", (rows.stop - first, width), out)
        bias = weights.mlp_in.bias
        after = {"bias": bias, "activation": spec.activation, "gated": spec.gated}
        _linear(into[rows], weights.mlp_in, inner, work, **after)
        _linear(inner, weights.mlp_out, out[rows], work)
    return out


def _linear(into: Rows, product: Product, out: torch.Tensor, work: Prefill, **after: Any) -> None:
    """out = the product, with what `after` asks for: its bias, an activation, a gate."""
    stored = product.as_stored(out.shape[0])
    call: Call
    if stored is not None and product.int8:
        call = Int8Linear(into, stored.form, stored.tensors, out, workspace=work.workspace, **after)
        call.launch(work.stream)
        return
    assert isinstance(into, torch.Tensor)
    if stored is not None:
        after |= {"scratch": product.weight, "workspace": work.workspace}
        call = QuantLinear(into, stored.form, stored.tensors, out, **after)
    else:
        if product.filling is not None:
            product.filling.launch(work.stream)
        call = Linear(
            into,
            product.weight,
            out,
            transposed=product.transposed,
            workspace=work.workspace,
            **after,
        )
    call.launch(work.stream)
