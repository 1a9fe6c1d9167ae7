"""What ops ask of caches of keys and values."""

from __future__ import annotations

import torch

from offload.kernels.call import check, check_equal_strides


def check_caches(
    op: str,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    like: torch.Tensor,
    *,
    batch: int,
    head_dim: int,
    kv_heads: int | None = None,
) -> None:
    """Refuse caches that are not [batch, kv_heads, capacity, head_dim] of the dtype and device of
    `like`, with equal strides and a head's columns next to each other. `kv_heads`: None for what
    key_cache has.
    """
    if not isinstance(key_cache, torch.Tensor) or key_cache.dim() != 4:
        what = list(key_cache.shape) if isinstance(key_cache, torch.Tensor) else key_cache
        raise ValueError(
            f"{op}: key_cache must be a tensor [batch, kv_heads, capacity, head_dim], not {what}"
        )
    heads = key_cache.shape[1] if kv_heads is None else kv_heads
    shape = (batch, heads, key_cache.shape[2], head_dim)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check(op, name, cache, shape, like, contiguous=False)
        check_columns(op, name, cache)
    check_equal_strides(op, {"key_cache": key_cache, "value_cache": value_cache}, (0, 1))


def check_columns(op: str, name: str, cache: torch.Tensor) -> None:
    """Refuse a cache [..., capacity, head_dim] whose columns have gaps between them."""
    capacity, head_dim = cache.shape[-2:]
    if capacity > 1 and cache.stride(-2) != head_dim:
        raise ValueError(
            f"{op}: the columns of {name} must lie next to each other ({head_dim} elements); "
            f"its strides are {list(cache.stride())}"
        )
