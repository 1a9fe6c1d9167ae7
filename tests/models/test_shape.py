"""A model's sizes as read from its config, against those of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import variants

from offload.models.kv.cache import cache_name
from offload.models.modules import find_layers
from offload.models.profile import model_profile
from offload.models.shape import ModelShape

pytestmark = pytest.mark.compat
ENCODERS = ("bert", "roberta")
LENGTH = 7  # shorter than every window


def kept(cache: Any) -> int:
    """Elements of keys and values that a cache holds."""
    halves = [
        half
        for name in ("self_attention_cache", "cross_attention_cache")
        if (half := getattr(cache, name, None)) is not None
    ]
    layers = [layer for each in halves or [cache] for layer in each.layers]
    return sum(layer.keys.numel() + layer.values.numel() for layer in layers)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [n for n in variants.NAMES if n not in ENCODERS])
def test_what_the_cache_keeps(name: str, rows: int) -> None:
    model = variants.build(name)
    tokens = variants.inputs(name, rows=rows, length=LENGTH)
    if "decoder_input_ids" in tokens:
        tokens["decoder_input_ids"] = tokens["input_ids"]
    with torch.no_grad():
        output = model(**tokens, use_cache=True)
        counted = kept(output[cache_name(output)])
    shape = ModelShape.of(model.config)
    expected = rows * LENGTH * shape.layers * shape.kv_width
    if name == "deepseek_v3":  # newer releases keep less than full keys and values
        assert 0 < counted <= expected
    else:
        assert counted == expected


@pytest.mark.parametrize("name", variants.NAMES)
def test_sizes(name: str) -> None:
    model = variants.build(name)
    shape = ModelShape.of(model.config)
    assert (shape.hidden, shape.heads, shape.vocabulary) == (32, 4, variants.VOCABULARY)
    sizes = {
        n for layer in find_layers(model).values() for p in layer.parameters() for n in p.shape
    }
    assert shape.intermediate in sizes or name == "qwen3_moe"  # whose experts are narrower
    assert shape.max_length >= 16


def test_reserve_grows_with_what_is_asked_for() -> None:
    shape = ModelShape(
        layers=3, hidden=32, intermediate=48, heads=4, kv_width=64, vocabulary=131, max_length=64
    )
    one = shape.reserve_bytes(1, 10, 2)
    cache, activations, logits = 3 * 64 * 10 * 2, 10 * (3 * 32 + 2 * 48) * 2, 131 * 6
    assert one == cache + activations + logits
    assert shape.reserve_bytes(4, 10, 2) == 4 * one
    assert shape.reserve_bytes(1, 20, 2) == 2 * (cache + activations) + logits
    assert shape.reserve_bytes(1, 10, 4) > one


def test_reserve_of_the_fused_engine() -> None:
    """Keys and values of sequences in CPU memory are not there, and few rows at once take less."""
    shape = ModelShape(
        layers=3, hidden=32, intermediate=48, heads=4, kv_width=64, vocabulary=131, max_length=64
    )
    whole = shape.reserve_bytes(8, 10, 2, fused=True)
    hidden, wide, logits = 80 * 32 * 2, 3 * 48 * 2, 8 * 131 * 6
    assert whole == 3 * 64 * 80 * 2 + 8 * hidden + 80 * wide + logits
    some = shape.reserve_bytes(8, 10, 2, fused=True, kv_on_cpu=6, prefill_rows=20)
    stages = 2 * 64 * 20 * 2
    assert some == 3 * 64 * 20 * 2 + hidden + 20 * (7 * 32 * 2 + wide) + stages + logits
    least = shape.reserve_bytes(8, 10, 2, fused=True, kv_on_cpu=8, prefill_rows=1)  # a sequence
    assert least == hidden + 10 * (7 * 32 * 2 + wide + 2 * 64 * 2) + logits


@pytest.mark.parametrize(("name", "heads"), [("bloom", 4.0), ("opt", 0.0), ("llama", 0.0)])
def test_whose_scores_are_written(name: str, heads: float) -> None:
    model = variants.build(name)
    assert model_profile(model, name).score_heads == heads
