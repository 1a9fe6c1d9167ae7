"""Attention of many new tokens over the cache: PyTorch's own kernels, in pieces if large."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from offload.models.fused.padding import Padding
from offload.models.specs.spec import LayerSpec

MASK_ELEMENTS = 1 << 26  # of one mask, or of one piece of float32 scores
MIN_ROWS = 1024  # of a piece that is cut for a window's sake
KEPT_ELEMENTS = 1 << 28  # of all masks that are kept for the layers that follow
# Scores of a head, of all sequences, from which on torch's own choice is left alone: where that is
# cuDNN, the host takes some 50 ms to plan for each new length, and its kernel wins less back.
PLANNED_SCORES = 1 << 24
FLASH_WIDTH = 256  # of heads, at most, in steps of 8


class PrefillAttention:
    """Queries of one pass: [batch, tokens], behind `past` columns.

    A query sees the columns up to its own that are no padding and, in a layer with a window, only
    that many; one that would see nothing sees itself, so that it stays finite. What several layers
    can share, such as masks, is made once; `share` of what may be kept of them is this one's.
    """

    def __init__(self, past: int, tokens: int, padding: Padding | None, share: float = 1.0) -> None:
        self._past = past
        self._tokens = tokens
        self._padding = padding
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._kept = 0
        self._share = share

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: LayerSpec
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim] against [batch, kv_heads, past + tokens, head_dim].

        Returns [batch, tokens, heads * head_dim], contiguous.
        """
        batch, tokens, heads, head_dim = query.shape
        if layer.softcap or layer.slopes is not None:
            out = self._by_scores(query, keys, values, layer)
        else:
            out = self._by_sdpa(query.transpose(1, 2), keys, values, layer).transpose(1, 2)
        return out.reshape(batch, tokens, heads * head_dim)

    def _by_sdpa(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: LayerSpec
    ) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] by scaled_dot_product_attention."""
        window = self._window(layer)
        plain = self._padding is None and not self._past and not window
        group = query.shape[1] // keys.shape[1]
        # With a mask, or in float32, no kernel but the one that keeps all scores takes groups.
        native = plain and query.dtype != torch.float32
        if group > 1 and not native:
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        options: dict[str, Any] = {"scale": layer.scale, "enable_gqa": group > 1 and native}
        if plain:
            causal = self._tokens > 1
            if _by_flash(query):
                flash = torch.ops.aten._scaled_dot_product_flash_attention
                return flash(query, keys, values, 0.0, causal, scale=layer.scale)[0]
            return functional.scaled_dot_product_attention(
                query, keys, values, is_causal=causal, **options
            )
        out = torch.empty_like(query)
        rows = 1 if self._padding is None else query.shape[0]
        for first, last in self._pieces(rows * keys.shape[2], window):
            low, high = self._columns(first, last, window)
            out[:, :, first:last] = functional.scaled_dot_product_attention(
                query[:, :, first:last],
                keys[:, :, low:high],
                values[:, :, low:high],
                attn_mask=self._mask(first, last, window, query.device)[:, None],
                **options,
            )
        return out

    def _by_scores(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: LayerSpec
    ) -> torch.Tensor:
        """[batch, tokens, heads, head_dim] with the scores at hand, in float32: for a soft cap and
        ALiBi, which the library's kernels have no argument for.
        """
        batch, _, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        window = self._window(layer)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        slopes = None
        if layer.slopes is not None:
            slopes = torch.tensor(layer.slopes, dtype=torch.float32, device=query.device)
            slopes = slopes.view(1, kv_heads, group, 1, 1)
        for first, last in self._pieces(batch * heads * keys.shape[2], window):
            low, high = self._columns(first, last, window)
            q = query[:, first:last].reshape(batch, -1, kv_heads, group, head_dim)
            q = q.permute(0, 2, 3, 1, 4)  # [batch, kv_heads, group, rows, head_dim]
            rows = last - first
            q = q.reshape(batch * kv_heads, group * rows, head_dim)
            k = keys[:, :, low:high].reshape(batch * kv_heads, high - low, head_dim)
            v = values[:, :, low:high].reshape(batch * kv_heads, high - low, head_dim)
            scores = _scores(q, k).view(batch, kv_heads, group, rows, high - low)
            scores *= layer.scale
            if layer.softcap:
                scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
            if slopes is not None:
                # By the distance, which leaves the softmax as it is and rounds less.
                scores += slopes * self._distance(first, last, low, high, query.device)
            mask = self._mask(first, last, window, query.device)
            scores.masked_fill_(~mask[:, None, None], float("-inf"))
            weights = scores.softmax(-1).to(query.dtype).view(q.shape[0], group * rows, -1)
            piece = torch.bmm(weights, v).view(batch, kv_heads, group, rows, head_dim)
            out[:, first:last] = piece.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, head_dim)
        return out

    def _window(self, layer: LayerSpec) -> int:
        """The layer's window where it hides anything in this pass, else 0."""
        return layer.window if layer.window < self._past + self._tokens else 0

    def _pieces(self, elements: int, window: int) -> list[tuple[int, int]]:
        """Spans of queries, for `elements` of mask or scores that one query costs."""
        step = max(16, MASK_ELEMENTS // max(1, elements))
        if window:  # short spans see few columns
            step = min(step, max(window, MIN_ROWS))
        return [(a, min(a + step, self._tokens)) for a in range(0, self._tokens, step)]

    def _columns(self, first: int, last: int, window: int) -> tuple[int, int]:
        """The columns that any of the queries first to last may see."""
        low = max(0, self._past + first - window + 1) if window else 0
        return low, self._past + last

    def _distance(
        self, first: int, last: int, low: int, high: int, device: torch.device
    ) -> torch.Tensor:
        """Column less own column: int64 [last - first, high - low]."""
        own = torch.arange(self._past + first, self._past + last, device=device)
        return torch.arange(low, high, device=device) - own[:, None]

    def _mask(self, first: int, last: int, window: int, device: torch.device) -> torch.Tensor:
        """True where a query sees a column: [1 or batch, last - first, columns]."""
        kept = self._masks.get((first, last, window))
        if kept is not None:
            return kept
        low, high = self._columns(first, last, window)
        distance = self._distance(first, last, low, high, device)
        seen = distance <= 0
        if window:
            seen &= distance > -window
        seen = seen[None]
        if self._padding is not None:
            column = torch.arange(low, high, device=device)
            real = column >= self._padding.start[:, None]
            real &= column < self._padding.end[:, None]
            seen = seen & real[:, None]
            seen |= (distance == 0) & ~seen.any(-1, keepdim=True)
        if self._kept + seen.numel() <= KEPT_ELEMENTS * self._share:
            self._masks[first, last, window] = seen
            self._kept += seen.numel()
        return seen


def _by_flash(query: torch.Tensor) -> bool:
    """Whether queries [batch, heads, tokens, head_dim] attend by the kernel that needs no plan."""
    batch, _, tokens, width = query.shape
    return (
        query.is_cuda
        and query.dtype != torch.float32
        and width <= FLASH_WIDTH
        and not width % 8
        and 0 < batch * tokens * tokens < PLANNED_SCORES
    )


def _scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """query @ keys.T of [batches, rows, width] and [batches, columns, width], in float32."""
    if query.is_cuda and query.dtype != torch.float32:
        return torch.bmm(query, keys.mT, out_dtype=torch.float32)
    return torch.bmm(query.float(), keys.float().mT)
