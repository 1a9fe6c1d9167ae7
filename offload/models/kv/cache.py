"""Caches of keys and values for the fused engine, as transformers' DynamicCache.

Their layers are `KvLayer`s, so `generate`, beams, `crop` and repeated turns work on such a cache,
and both engines can run on the same one.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from offload.models.kv.host_kv import HostKv
from offload.models.kv.layer import KvCommon, KvLayer
from offload.models.specs.spec import ModelSpec


def new_cache(spec: ModelSpec, max_length: int = 0, host: HostKv | None = None) -> DynamicCache:
    """An empty cache for the model, of at least `max_length` columns when it is first filled."""
    cache = DynamicCache()
    _fill(cache, spec, KvCommon(max_length, host=host))
    return cache


def cache_name(names: Container[str]) -> str:
    """What transformers' release at hand calls a cache, by the names of a forward's arguments or of
    what it returns.
    """
    return "cache" if "cache" in names else "past_key_values"


def common_of(cache: DynamicCache) -> KvCommon:
    """What the layers of a cache of KvLayers share."""
    return layers_of(cache)[0].common


def session_of(cache: DynamicCache | None, spec: ModelSpec) -> Any:
    """The calls made for a cache's buffers and this model, if there are any."""
    layer = cache.layers[0] if cache is not None and cache.layers else None
    if not isinstance(layer, KvLayer) or layer.common.spec is not spec:
        return None
    return layer.common.session


def dtype_of(cache: Any) -> torch.dtype | None:
    """The dtype of the keys and values in a DynamicCache that is not empty."""
    layer = cache.layers[0]
    keys = layer.key_buffer if isinstance(layer, KvLayer) else layer.keys
    return None if keys is None else keys.dtype


def layers_of(cache: DynamicCache) -> list[KvLayer]:
    """The layers of a cache of KvLayers."""
    return cache.layers  # type: ignore[return-value]


def adopt(
    cache: Any, spec: ModelSpec, max_length: int = 0, host: HostKv | None = None
) -> str | None:
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
        if common.spec is not spec:  # another model went on with it, whose weights its calls read
            common.session, common.spec = None, spec
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
    _fill(cache, spec, KvCommon(max_length, host=host))
    for old, new in zip(found, layers_of(cache), strict=False):
        if old.get_seq_length():
            new.update(old.keys, old.values)
    return None


def _fill(cache: DynamicCache, spec: ModelSpec, common: KvCommon) -> None:
    common.spec = spec
    cache.layers = [KvLayer(common, spec.cache_copies) for _ in spec.layers]
    cache.layer_class_to_replicate = None
