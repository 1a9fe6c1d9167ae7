"""The tensors of one call of attention on CPU cores: checked, and as what the library takes."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.kernels import reference
from offload.kernels.cache_checks import check_columns
from offload.kernels.call import check, check_equal_strides, pointer, stride_of
from offload.kernels.host_library import CACHE_DTYPES, QUERY_DTYPES, HostAttentionStruct
from offload.kernels.scores import Scores

OP = "host_attention"
MOST_HEAD_DIM = 512


@dataclass
class HostTensors:
    """What HostAttention takes, under the names and in the shapes that it documents. Raises
    ValueError or TypeError for tensors that do not fit together.
    """

    query: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    out: torch.Tensor
    length: torch.Tensor
    scores: Scores
    start: torch.Tensor | None = None
    key_scales: Sequence[torch.Tensor] | None = None
    value_scales: Sequence[torch.Tensor] | None = None
    new_key: torch.Tensor | None = None
    new_value: torch.Tensor | None = None
    kv_heads: int = field(init=False)
    cache_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        shape = _check_query(self.query)
        batch, heads, _ = shape
        self.kv_heads, self.cache_dtype = _check_caches(self.query, self.keys, self.values)
        _check_scales(self.keys, self.cache_dtype, self.key_scales, self.value_scales)
        check(OP, "out", self.out, shape, self.query)
        check(OP, "length", self.length, (batch,), self.query, dtype=torch.int32)
        if self.start is not None:
            check(OP, "start", self.start, (batch,), self.query, dtype=torch.int32)
        self.scores.check(OP, heads, self.query)
        _check_new(self.query, self.kv_heads, self.new_key, self.new_value)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.kv_heads

    def arguments(self) -> HostAttentionStruct:
        """The library's struct, but for how the work is to be done."""
        batch, heads, head_dim = self.query.shape
        found = HostAttentionStruct(
            query=pointer(self.query),
            output=pointer(self.out),
            keys=_addresses(self.keys),
            values=_addresses(self.values),
            head_strides=(c_int64 * batch)(*(stride_of(k, 0) for k in self.keys)),
            capacities=(c_int32 * batch)(*(k.shape[1] for k in self.keys)),
            length=pointer(self.length),
            start=pointer(self.start),
            slopes=pointer(self.scores.slopes),
            sinks=pointer(self.scores.sinks),
            query_batch_stride=stride_of(self.query, 0),
            query_head_stride=stride_of(self.query, 1),
            scale=self.scores.scale,
            softcap=self.scores.softcap,
            batch=batch,
            heads=heads,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            window=self.scores.window,
            query_dtype=QUERY_DTYPES[self.query.dtype],
            cache_dtype=CACHE_DTYPES[self.cache_dtype],
        )
        if self.key_scales is not None and self.value_scales is not None:
            found.key_scales = _addresses(self.key_scales)
            found.value_scales = _addresses(self.value_scales)
            found.scale_strides = (c_int64 * batch)(*(stride_of(s, 0) for s in self.key_scales))
        if self.new_key is not None:
            found.new_key = pointer(self.new_key)
            found.new_value = pointer(self.new_value)
            found.new_batch_stride = stride_of(self.new_key, 0)
            found.new_head_stride = stride_of(self.new_key, 1)
        return found

    def compute(self) -> None:
        """Do with torch what the library does; raises ValueError for a length beyond its cache."""
        for b, (n, keys) in enumerate(zip(self.length.tolist(), self.keys, strict=True)):
            if not 0 <= n <= keys.shape[1]:
                raise ValueError(
                    f"{OP}: length[{b}] is {n}: it must be 0 to {keys.shape[1]}, the capacity of "
                    "its cache"
                )
        if self.new_key is not None and self.new_value is not None:
            reference.append_columns(self.new_key, self.keys, self.key_scales, self.length)
            reference.append_columns(self.new_value, self.values, self.value_scales, self.length)
        result = reference.host_attention(
            self.query,
            self.keys,
            self.values,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
            length=self.length,
            start=self.start,
            scores=self.scores,
        )
        self.out.copy_(result)


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _check_query(query: Any) -> tuple[int, int, int]:
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"{OP}: query must be a tensor, not {type(query).__name__}")
    if query.dim() != 3 or query.shape[1] < 1 or query.shape[2] < 1:
        raise ValueError(f"{OP}: query must be [batch, heads, head_dim], not {list(query.shape)}")
    if query.device.type != "cpu":
        raise ValueError(f"{OP}: query must be on the CPU, not on {query.device}")
    if query.dtype not in QUERY_DTYPES:
        raise ValueError(f"{OP}: query must be float32, float16 or bfloat16, not {query.dtype}")
    batch, heads, head_dim = query.shape
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"{OP}: head_dim must be at most {MOST_HEAD_DIM}, not {head_dim}")
    check(OP, "query", query, (batch, heads, head_dim), query, contiguous=False)
    return batch, heads, head_dim


def _check_caches(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> tuple[int, torch.dtype]:
    """The number of KV heads, and the caches' dtype."""
    batch, heads, head_dim = query.shape
    for name, caches in (("keys", keys), ("values", values)):
        if len(caches) != batch:
            raise ValueError(
                f"{OP}: {name} must be {batch} tensors, one a sequence, not {len(caches)}"
            )
    if not batch:
        return 1, query.dtype
    first = keys[0]
    if not isinstance(first, torch.Tensor) or first.dim() != 3:
        what = list(first.shape) if isinstance(first, torch.Tensor) else first
        raise ValueError(
            f"{OP}: keys[0] must be a tensor [kv_heads, capacity, head_dim], not {what}"
        )
    kv_heads, dtype = first.shape[0], first.dtype
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{OP}: {heads} query heads must be a multiple of {kv_heads} KV heads")
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"{OP}: caches must be float32, float16, bfloat16 or int8, not {dtype}")
    for b, pair in enumerate(zip(keys, values, strict=True)):
        shape = (kv_heads, pair[0].shape[1] if pair[0].dim() == 3 else 0, head_dim)
        for name, cache in zip(("keys", "values"), pair, strict=True):
            check(OP, f"{name}[{b}]", cache, shape, query, dtype=dtype, contiguous=False)
            check_columns(OP, f"{name}[{b}]", cache)
        check_equal_strides(OP, {f"keys[{b}]": pair[0], f"values[{b}]": pair[1]}, (0,))
    return kv_heads, dtype


def _check_scales(
    keys: Sequence[torch.Tensor],
    dtype: torch.dtype,
    key_scales: Sequence[torch.Tensor] | None,
    value_scales: Sequence[torch.Tensor] | None,
) -> None:
    if not keys:
        return
    wanted = dtype == torch.int8
    if wanted != (key_scales is not None) or wanted != (value_scales is not None):
        raise ValueError(
            f"{OP}: key_scales and value_scales go with int8 caches, and with no others; the "
            f"caches are {dtype}"
        )
    if key_scales is None or value_scales is None:
        return
    for name, tensors in (("key_scales", key_scales), ("value_scales", value_scales)):
        if len(tensors) != len(keys):
            raise ValueError(f"{OP}: {name} must be {len(keys)} tensors, not {len(tensors)}")
        for b, (tensor, cache) in enumerate(zip(tensors, keys, strict=True)):
            shape = tuple(cache.shape[:2])
            check(OP, f"{name}[{b}]", tensor, shape, cache, dtype=torch.float32, contiguous=False)
    for b, (of_keys, of_values) in enumerate(zip(key_scales, value_scales, strict=True)):
        named = {f"key_scales[{b}]": of_keys, f"value_scales[{b}]": of_values}
        check_equal_strides(OP, named, (0,))


def _check_new(
    query: torch.Tensor,
    kv_heads: int,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
) -> None:
    if (new_key is None) != (new_value is None):
        missing = "new_key" if new_key is None else "new_value"
        raise ValueError(f"{OP}: new_key and new_value go together; {missing} is missing")
    if new_key is None or new_value is None or not query.shape[0]:
        return
    shape = (query.shape[0], kv_heads, query.shape[2])
    for name, tensor in (("new_key", new_key), ("new_value", new_value)):
        check(OP, name, tensor, shape, query, contiguous=False)
    check_equal_strides(OP, {"new_key": new_key, "new_value": new_value}, (0, 1))
