"""The block over many rows: products by the kept libraries, fused kernels for all between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from offload.kernels import Norm
from offload.kernels.call import Call
from offload.kernels.linear import Linear
from offload.kernels.quant_gemm import QuantGemm
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.kernels.workspace import Workspace
from offload.models.layer_weights import LayerWeights, Product
from offload.models.prefill_attention import PrefillAttention
from offload.models.shape import MLP_ROWS
from offload.models.spec import Angles, LayerSpec


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
        """Memory of that name that the layers use one after the other, with any content."""
        count = torch.Size(shape).numel()
        found = self.buffers.get(name)
        if found is None or found.numel() < count:
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
        into = _normed(rows, weights.attention_norm, normed, work)
        branch = _attention(spec, weights, into, hidden.shape[:2], keys, values, work)
        bias, norm_out = weights.attention_out.bias, weights.attention_norm_out
        sum_norm, mlp_norm = weights.attention_sum_norm, weights.mlp_norm
        into = _add(rows, branch, bias, norm_out, sum_norm, mlp_norm, normed, work)
        branch = _mlp(spec, weights, into, branch, work)
        bias, norm_out = weights.mlp_out.bias, weights.mlp_norm_out
        _add(rows, branch, bias, norm_out, weights.mlp_sum_norm, None, normed, work)
        return
    for_mlp = into = _normed(rows, weights.attention_norm, normed, work)
    if spec.mlp_norm != spec.attention_norm:
        second = work.scratch("normed for the MLP", tuple(rows.shape), rows)
        for_mlp = _normed(rows, weights.mlp_norm, second, work)
    branch = _attention(spec, weights, into, hidden.shape[:2], keys, values, work)
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
    rows: torch.Tensor, norm: Norm | None, out: torch.Tensor, work: Prefill
) -> torch.Tensor:
    if norm is None:
        return rows
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
) -> torch.Tensor:
    """Add the branch to rows, in place; returns what comes next sees, perhaps in `out`."""
    if sum_norm is not None:
        ResidualNorm(
            residual=rows,
            branch=branch,
            bias=bias,
            branch_norm=branch_norm,
            norm=sum_norm,
            out=rows,
        ).launch(work.stream)
        return _normed(rows, next_norm, out, work)
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


def _attention(
    spec: LayerSpec,
    weights: LayerWeights,
    into: torch.Tensor,
    shape: torch.Size,
    keys: torch.Tensor,
    values: torch.Tensor,
    work: Prefill,
) -> torch.Tensor:
    """The attention branch of [rows, width] without its last bias, for `shape` [batch, tokens]."""
    layout, count = spec.layout, into.shape[0]
    qkv = work.scratch("wide", (*shape, layout.width), into)
    # Its bias is added where heads are rotated and kept.
    _linear(into, weights.qkv, qkv.view(count, -1), work)
    query = work.scratch("query", (*shape, layout.heads, layout.head_dim), into)
    cos, sin = work.angles[spec.rotary] if spec.rotary is not None else (None, None)
    RotaryAppend(
        qkv,
        layout=layout,
        query=query,
        key_cache=keys,
        value_cache=values,
        column=work.column,
        bias=weights.qkv.bias,
        cos=cos,
        sin=sin,
        interleaved=spec.interleaved,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
    ).launch(work.stream)
    attended = work.attention(query, keys[:, :, : work.end], values[:, :, : work.end], spec)
    out = work.scratch("attention", tuple(into.shape), into)
    _linear(attended.view(count, -1), weights.attention_out, out, work)
    return out


def _mlp(
    spec: LayerSpec, weights: LayerWeights, into: torch.Tensor, out: torch.Tensor, work: Prefill
) -> torch.Tensor:
    """The MLP branch of [rows, width] without its last bias, in `out`."""
    width = weights.mlp_in.outputs // (2 if spec.gated else 1)
    for first in range(0, into.shape[0], MLP_ROWS):
        piece = into[first : first + MLP_ROWS]
        inner = work.scratch("wide", (piece.shape[0], width), into)
        bias = weights.mlp_in.bias
        after = {"bias": bias, "activation": spec.activation, "gated": spec.gated}
        _linear(piece, weights.mlp_in, inner, work, **after)
        _linear(inner, weights.mlp_out, out[first : first + MLP_ROWS], work)
    return out


def _linear(
    into: torch.Tensor, product: Product, out: torch.Tensor, work: Prefill, **after: Any
) -> None:
    """The product, and of what stands behind it, its bias too, what `after` says."""
    stored = product.as_stored(into.shape[0])
    if stored is not None:
        call: Call = QuantGemm(
            into, stored.form, stored.tensors, out, workspace=work.workspace, **after
        )
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
