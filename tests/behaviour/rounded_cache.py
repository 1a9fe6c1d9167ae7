"""What int8 keys and values are held against: transformers' own cache, rounded by torch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What is left of [..., width] in int8 with a scale a row, in plain torch."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return ((x.double() / scale).round() * scale).nan_to_num(0).to(x.dtype)


class RoundedCache(DynamicCache):
    """transformers' own, whose last rows are rounded: a prompt's columns once they were seen in
    full, those of a single token before.
    """

    def __init__(self, on_gpu: int) -> None:
        super().__init__()
        self.on_gpu = on_gpu

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **options: Any) -> Any:
        first = self.on_gpu
        if keys.shape[2] == 1:
            keys, values = (torch.cat([x[:first], rounded(x[first:])]) for x in (keys, values))
        seen = super().update(keys, values, layer_idx, *args, **options)
        layer = self.layers[layer_idx]
        layer.keys, layer.values = (
            torch.cat([x[:first], torch.cat([x[first:, :, :-n], rounded(x[first:, :, -n:])], 2)])
            for x, n in ((layer.keys, keys.shape[2]), (layer.values, keys.shape[2]))
        )
        return seen
