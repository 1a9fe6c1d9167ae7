"""Keys and values in one buffer a layer: the fused kernels append to it, transformers may use it.

Layout: the keys and the values of a layer are two tensors [batch, kv_heads, capacity, head_dim],
contiguous, in the model's dtype. Column j holds token j of the sequence, padding included, in the
first `length` columns; the rest has any content. A sliding window drops nothing: the kernels read
no more than its columns.

The cache itself is transformers' DynamicCache whose layers are `KvLayer`s, so `generate`, beams,
`crop` and repeated turns work on it, and both engines can run on the same cache.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from offload.models.spec import ModelSpec

MAX_AHEAD = 4096  # columns allocated before they are needed, where the final length is known
MIN_AHEAD = 128  # and where it is not: these, or half of what is needed

# Until 5.16 `crop` took the length to keep; later releases take the columns to remove, negative.
_CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


@dataclass(slots=True)
class KvCommon:
    """What the layers of one cache share."""

    max_length: int = 0  # columns that will be needed in the end; 0: unknown
    session: Any = None  # calls that were made for these buffers; dropped when one of them moves

    def __deepcopy__(self, memo: Any) -> KvCommon:
        return KvCommon(self.max_length)  # a copy's buffers lie elsewhere


class KvLayer(CacheLayerMixin):
    """One layer's `key_buffer` and `value_buffer`, of which the first `length` columns count."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    record_past = False  # nothing is ever dropped

    # The parent's __init__ would set `keys` and `values`, which are views here.
    def __init__(self, common: KvCommon, copies: int = 1) -> None:
        self.common = common
        self.copies = copies
        self.length = 0
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether there are buffers."""
        return self.key_buffer is not None

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """[batch, kv_heads, length, head_dim], a view."""
        return None if self.key_buffer is None else self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """[batch, kv_heads, length, head_dim], a view."""
        return None if self.value_buffer is None else self.value_buffer[:, :, : self.length]

    @property
    def batch_size(self) -> int:
        """Rows; 0 before anything was kept."""
        return 0 if self.key_buffer is None else self.key_buffer.shape[0]

    max_batch_size = batch_size

    @property
    def device(self) -> torch.device | None:
        """Where the buffers are."""
        return None if self.key_buffer is None else self.key_buffer.device

    def reserve(self, columns: int, like: torch.Tensor, batch: int, heads: int, width: int) -> None:
        """Make room for `columns` columns of [batch, heads, columns, width], dtype as `like`."""
        if self.key_buffer is not None:
            if columns <= self.key_buffer.shape[2]:
                return
            batch, heads, _, width = self.key_buffer.shape
        if self.common.max_length:
            ahead = min(max(self.common.max_length - columns, 0), MAX_AHEAD)
        else:
            ahead = max(columns // 2, MIN_AHEAD)
        self.common.session = None  # its calls would keep the old buffers alive
        shape = (batch, heads, columns + ahead, width)
        for name in ("key_buffer", "value_buffer"):
            old = getattr(self, name)
            with torch.inference_mode(False):
                new = torch.empty(shape, dtype=like.dtype, device=like.device)
            if old is not None:
                new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, tokens, width = key_states.shape
        self.reserve(tokens, key_states, batch, heads // self.copies, width)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, tokens, head_dim] each; returns all that is kept."""
        batch, heads, tokens, width = key_states.shape
        self.reserve(self.length + tokens, key_states, batch, heads // self.copies, width)
        end = self.length + tokens
        assert self.key_buffer is not None and self.value_buffer is not None
        # Of several equal heads one is kept.
        self.key_buffer[:, :, self.length : end] = key_states[:, :: self.copies]
        self.value_buffer[:, :, self.length : end] = value_states[:, :: self.copies]
        self.length = end
        keys, values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        if self.copies > 1:
            keys, values = (x.repeat_interleave(self.copies, dim=1) for x in (keys, values))
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def activate_past_recording(self) -> None:
        """Nothing to do: no column is ever dropped."""

    def crop(self, tokens_to_remove: int) -> None:
        """As DynamicLayer's in the release at hand: a length to keep, or minus what to remove."""
        if tokens_to_remove < 0:
            self.length = max(0, self.length + tokens_to_remove)
        elif tokens_to_remove or _CROPS_TO_LENGTH:
            self.length = min(self.length, tokens_to_remove)

    def reset(self) -> None:
        self.length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """In place, so that calls and graphs made for the buffers stay good."""
        self._pick(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pick(torch.arange(self.batch_size).repeat_interleave(repeats))

    def _pick(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        if self.key_buffer is None:
            return
        rows = rows.to(self.key_buffer.device)
        if rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        for name in ("key_buffer", "value_buffer"):
            buffer = getattr(self, name)
            kept = buffer[:, :, : self.length].index_select(0, rows)
            if rows.numel() != buffer.shape[0]:
                self.common.session = None
                with torch.inference_mode(False):
                    buffer = buffer.new_empty(rows.numel(), *buffer.shape[1:])
                setattr(self, name, buffer)
            buffer[:, :, : self.length] = kept

    def offload(self) -> None:
        raise NotImplementedError("keys and values of the fused engine stay where they are")

    prefetch = offload


def new_cache(spec: ModelSpec, max_length: int = 0) -> DynamicCache:
    """An empty cache for the model, of at least `max_length` columns when it is first filled."""
    cache = DynamicCache()
    _fill(cache, spec, KvCommon(max_length))
    return cache


def common_of(cache: DynamicCache) -> KvCommon:
    """What the layers of a cache of KvLayers share."""
    return layers_of(cache)[0].common


def session_of(cache: DynamicCache | None) -> Any:
    """What was made for the buffers of a cache; None where nothing was."""
    layer = cache.layers[0] if cache is not None and cache.layers else None
    return layer.common.session if isinstance(layer, KvLayer) else None


def layers_of(cache: DynamicCache) -> list[KvLayer]:
    """The layers of a cache of KvLayers."""
    return cache.layers  # type: ignore[return-value]


def adopt(cache: Any, spec: ModelSpec, max_length: int = 0) -> str | None:
    """Turn the layers of a transformers cache into KvLayers, in place; None, or why not.

    The cache stays the object that its owner holds, with the columns that it had.
    """
    if type(cache) is not DynamicCache:
        return f"a cache of the kind {type(cache).__name__}"
    if cache.offloading:
        return "a cache that is offloaded to CPU memory"
    found: list[Any] = list(cache.layers)
    if len(found) == len(spec.layers) and all(isinstance(x, KvLayer) for x in found):
        common = common_of(cache)
        common.max_length = max(common.max_length, max_length)
        return None
    if len(found) > len(spec.layers):
        return f"a cache of {len(found)} layers"
    for layer in found:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a cache with layers of the kind {type(layer).__name__}"
        length = layer.get_seq_length()
        if length and (layer.keys is None or layer.keys.shape[-2] != length):
            return "a cache that dropped what lies before its sliding window"
    lengths = {layer.get_seq_length() for layer in found}
    if len(lengths) > 1 or (lengths - {0} and len(found) < len(spec.layers)):
        return "a cache whose layers differ in length"
    _fill(cache, spec, KvCommon(max_length))
    for old, new in zip(found, layers_of(cache), strict=False):
        if old.get_seq_length():
            new.update(old.keys, old.values)
    return None


def _fill(cache: DynamicCache, spec: ModelSpec, common: KvCommon) -> None:
    cache.layers = [KvLayer(common, spec.cache_copies) for _ in spec.layers]
    cache.layer_class_to_replicate = None
