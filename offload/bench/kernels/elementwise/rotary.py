"""Rotary appends of real models' QKV rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.bench.kernels.case import Case, copies, launches
from offload.bench.kernels.elementwise.calls import (
    in_variants,
    is_small,
    only_copied,
    peers,
    random,
    short,
    torch_norm,
)
from offload.kernels import Norm, QkvLayout, RotaryAppend, Rotation

SPARE = 16  # columns that a cache has beyond the tokens
COLUMN = 3  # where the tokens go


@dataclass(frozen=True)
class Heads:
    """The QKV rows of one model's layer."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    grouped: bool = False
    interleaved: bool = False
    bias: bool = False
    normed: bool = False
    weight_offset: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def case(
        self, device: torch.device, batch: int, tokens: int, variants: Sequence[int] = ()
    ) -> Case:
        """Beside its peers, or beside the library's own `variants`."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": device}
        make = QkvLayout.grouped if self.grouped else QkvLayout.apart
        layout = make(self.heads, self.kv_heads, self.head_dim)
        rows = batch * tokens
        size = 2 * rows * layout.width * self.dtype.itemsize
        count = copies(size, device)
        capacity = tokens + SPARE
        qkv = [random(batch, tokens, layout.width, **like) for _ in range(count)]
        queries, keys, values = (
            [torch.empty(shape, **like) for _ in range(count)]
            for shape in (
                (batch, tokens, self.heads, self.head_dim),
                (batch, self.kv_heads, capacity, self.head_dim),
                (batch, self.kv_heads, capacity, self.head_dim),
            )
        )
        bias = random(layout.width, **like) if self.bias else None
        norm = None
        if self.normed:
            weight = random(self.head_dim, **like)
            norm = Norm("rms", weight, weight_offset=self.weight_offset)
        rotation = None
        if self.rotary_dim:
            angles = torch.rand(1, tokens, self.rotary_dim // 2, device=device)
            rotation = Rotation(angles.cos(), angles.sin(), self.interleaved)
        layouts, columns = [layout] * count, [COLUMN] * count
        copied = only_copied(device, "split_heads", qkv, layouts, queries, keys, values, columns)
        column = torch.full((1,), COLUMN, dtype=torch.int32, device=device)
        calls = [
            RotaryAppend(
                qkv[i],
                layout=layout,
                query=queries[i],
                key_cache=keys[i],
                value_cache=values[i],
                column=column,
                bias=bias,
                rotation=rotation,
                q_norm=norm,
                k_norm=norm,
                early=is_small(rows),
            )
            for i in range(count)
        ]

        eager = self._eager(layout, bias, norm, rotation)
        what = [f"{self.heads}/{self.kv_heads} x {self.head_dim}", f"rotary {self.rotary_dim}"]
        flags = ("interleaved", "grouped", "bias", "normed")
        what += [name for name in flags if getattr(self, name)]
        return Case(
            op="rotary_append",
            shape=f"{self.model} {batch} x {tokens} {short(self.dtype)}: {', '.join(what)}",
            bytes=size,
            flop=0.0,
            ours=launches(calls),
            peers=copied
            | (in_variants(calls, "variant", variants) or peers(eager, qkv, keys, values)),
            copies=count,
        )

    def _eager(
        self,
        layout: QkvLayout,
        bias: torch.Tensor | None,
        norm: Norm | None,
        rotation: Rotation | None,
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """The same by torch's operations: appends to key and value, returns the queries."""

        def turned(x: torch.Tensor) -> torch.Tensor:
            x = x if norm is None else torch_norm(x, norm)
            return x if rotation is None else torch_rotation(x, rotation)

        def eager(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            x = x if bias is None else x + bias
            (batch, tokens), d = x.shape[:2], self.head_dim
            if self.grouped:
                x = x.view(batch, tokens, self.kv_heads, layout.group + 2, d)
                q = x[..., :-2, :].reshape(batch, tokens, self.heads, d)
                k, v = x[..., -2, :], x[..., -1, :]
            else:
                parts = x.split([n * d for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
                q, k, v = (part.view(batch, tokens, -1, d) for part in parts)
            key[:, :, COLUMN : COLUMN + tokens] = turned(k).transpose(1, 2)
            value[:, :, COLUMN : COLUMN + tokens] = v.transpose(1, 2)
            return turned(q)

        return eager


def torch_rotation(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Heads rotated as transformers does it: in their own dtype."""
    tables = rotation.cos, rotation.sin
    x, rest = x[..., : rotation.dim], x[..., rotation.dim :]
    if rotation.interleaved:
        c, s = (t.repeat_interleave(2, -1).to(x.dtype).unsqueeze(2) for t in tables)
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        c, s = (torch.cat((t, t), -1).to(x.dtype).unsqueeze(2) for t in tables)
        a, b = x.chunk(2, -1)
        other = torch.cat((-b, a), -1)
    x = x * c + other * s
    return torch.cat((x, rest), -1) if rest.shape[-1] else x


ROTARIES = (
    Heads("Llama-7B", 32, 32, 128, 128),
    Heads("Llama-70B", 64, 8, 128, 128),
    Heads("Qwen3-14B", 40, 8, 128, 128, normed=True),
    Heads("GPT-NeoX-20B", 64, 64, 96, 24, grouped=True, bias=True),
    Heads("GPT-J-6B", 16, 16, 256, 64, interleaved=True),
    Heads("OPT-13B", 40, 40, 128, 0, bias=True),
    Heads("Gemma-3-12B", 16, 8, 256, 256, normed=True, weight_offset=1.0),
    Heads("Llama-7B", 32, 32, 128, 128, dtype=torch.float32),
)
