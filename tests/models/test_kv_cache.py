"""The fused engine's cache does what transformers' own does, whatever is asked of it in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import variants
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from offload.models.kv import layer as kv_layer
from offload.models.kv.cache import adopt, common_of, layers_of, new_cache
from offload.models.kv.host_kv import HostKv
from offload.models.kv.layer import MAX_AHEAD, KvCommon, KvLayer
from offload.models.specs.describe import describe
from offload.models.specs.spec import ModelSpec
from offload.row_copies import HostCopies

pytestmark = pytest.mark.compat

HEADS, WIDTH = 2, 3


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return describe(variants.build("llama"))


def states(batch: int, tokens: int, copies: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    made = [torch.randn(batch, HEADS, tokens, WIDTH) for _ in range(2)]
    return tuple(x.repeat_interleave(copies, dim=1) for x in made)  # type: ignore[return-value]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 5)),
        st.tuples(st.just("crop"), st.integers(1, 4)),
        st.tuples(st.just("reorder_cache"), st.permutations([0, 1, 2])),
        st.tuples(st.just("batch_select_indices"), st.lists(st.integers(0, 2), min_size=1)),
        st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 3)),
        st.tuples(st.just("reset"), st.none()),
    ),
    min_size=1,
    max_size=12,
)


@given(
    operations,
    st.sampled_from([1, 2]),
    st.sampled_from([0, 5, 100]),
    st.sampled_from([None, 0, 1, 4]),
    st.integers(0, 99),
)
def test_any_history_leaves_what_transformers_has(
    history: list[tuple[str, Any]], copies: int, max_length: int, gpu: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    host = None if gpu is None else HostKv(gpu, 1, HostCopies(), False)
    ours, theirs = KvLayer(KvCommon(max_length, host=host), copies), DynamicLayer()
    batch = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_layer, "MIN_AHEAD", 2)  # so that it must grow
        for name, value in history:
            length = theirs.get_seq_length()
            if name == "update":
                new = states(batch, value, copies)
                for a, b in zip(ours.update(*new), theirs.update(*new), strict=True):
                    assert torch.equal(a, b)
            elif name == "crop":
                remove = min(value, length)
                if remove:
                    ours.crop(-remove), theirs.crop(-remove)
            elif name == "reset":
                ours.reset()
                theirs = DynamicLayer()
            elif name == "batch_repeat_interleave":
                if length and batch * value <= 12:
                    ours.batch_repeat_interleave(value), theirs.batch_repeat_interleave(value)
                    batch *= value
            elif length:
                rows = torch.tensor([x % batch for x in value])
                if name == "reorder_cache":
                    rows = torch.cat([rows % batch, torch.arange(3, batch)])[:batch]
                getattr(ours, name)(rows), getattr(theirs, name)(rows)
                batch = rows.numel()
            length = theirs.get_seq_length()
            assert ours.get_seq_length() == length
            assert ours.get_mask_sizes(4) == theirs.get_mask_sizes(4)
            if length:
                assert ours.keys is not None and ours.values is not None
                assert torch.equal(ours.keys, theirs.keys[:, ::copies])
                assert torch.equal(ours.values, theirs.values[:, ::copies])
                assert ours.batch_size == ours.max_batch_size == batch
                assert ours.rows_on_cpu == (0 if gpu is None else max(0, batch - gpu))
            if length == 0:
                batch = 3 if ours.key_buffer is None else ours.batch_size


def test_reordering_and_cropping_move_nothing() -> None:
    layer = KvLayer(KvCommon(), 1)
    layer.update(*states(3, 4))
    layer.common.session = object()
    assert layer.key_buffer is not None
    before = layer.key_buffer.data_ptr()
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    layer.crop(-2)
    layer.update(*states(3, 1))
    assert layer.key_buffer.data_ptr() == before and layer.common.session is not None
    layer.update(*states(3, 1000))
    assert layer.key_buffer.data_ptr() != before and layer.common.session is None


def test_the_known_length_is_allocated_once_but_not_without_bound() -> None:
    layer = KvLayer(KvCommon(max_length=40), 1)
    layer.update(*states(2, 7))
    assert layer.key_buffer is not None and layer.key_buffer.shape == (2, HEADS, 40, WIDTH)
    layer = KvLayer(KvCommon(max_length=1 << 40), 1)
    layer.update(*states(1, 1))
    assert layer.key_buffer is not None and layer.key_buffer.shape[2] == 1 + MAX_AHEAD


def test_a_new_cache_is_one_of_transformers(spec: ModelSpec) -> None:
    cache = new_cache(spec, 9)
    assert type(cache) is DynamicCache and len(cache) == 3 and cache.get_seq_length() == 0
    assert not cache.is_compileable and cache.is_sliding == [False] * 3
    new = states(2, 4)
    for index in range(3):
        cache.update(*new, index)
    assert cache.get_seq_length() == 4 and cache.get_mask_sizes(2, 1) == (6, 0)
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 0]))
    for keys, values, *_ in cache:
        assert torch.equal(keys, new[0][[1, 0], :, :3])
        assert torch.equal(values, new[1][[1, 0], :, :3])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert len({id(layer.common) for layer in layers_of(cache)}) == 1


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("by_config", [False, True])
def test_adopting_keeps_object_and_contents(spec: ModelSpec, filled: bool, by_config: bool) -> None:
    config = variants.VARIANTS["llama"].configuration()
    cache = DynamicCache(config=config) if by_config else DynamicCache()
    new = states(2, 4)
    if filled:
        for index in range(3):
            cache.update(*new, index)
    assert adopt(cache, spec, 11) is None
    assert type(cache) is DynamicCache and all(isinstance(x, KvLayer) for x in cache.layers)
    assert common_of(cache).max_length == 11
    assert cache.get_seq_length() == (4 if filled else 0)
    for keys, values, *_ in cache if filled else ():
        assert torch.equal(keys, new[0]) and torch.equal(values, new[1])
    again = list(cache.layers)
    assert adopt(cache, spec, 20) is None and cache.layers == again
    assert common_of(cache).max_length == 20


def sliding(columns: int) -> DynamicCache:
    cache = DynamicCache(config=variants.VARIANTS["mistral"].configuration())  # a window of 8
    for index in range(3):
        cache.update(*states(1, columns), index)
    return cache


def test_sliding_layers_are_adopted_while_they_hold_everything(spec: ModelSpec) -> None:
    assert adopt(sliding(7), spec) is None
    assert "sliding window" in (adopt(sliding(8), spec) or "")


def test_what_cannot_be_adopted_is_left_alone(spec: ModelSpec) -> None:
    class Own(DynamicCache):
        pass

    config: PreTrainedConfig = variants.VARIANTS["llama"].configuration()
    uneven, short, long = DynamicCache(), DynamicCache(), DynamicCache()
    for index in range(3):
        uneven.update(*states(1, 1 + index), index)
    short.update(*states(1, 1), 0)
    for index in range(4):
        long.update(*states(1, 1), index)
    for cache, words in [
        (Own(), "Own"),
        (StaticCache(config=config, max_cache_len=8), "StaticCache"),
        (uneven, "differ in length"),
        (short, "differ in length"),
        (long, "4 layers"),
    ]:
        layers = list(cache.layers)
        assert words in (adopt(cache, spec) or "")
        assert cache.layers == layers
