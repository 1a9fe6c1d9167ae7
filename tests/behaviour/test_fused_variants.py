"""Each family on the fused engine: logits as exact as the plain model's, and the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import comparison
import exactness
import pytest
import torch

import offload

Folder = Callable[[str], Path]

# One tier and depth a variant; over all variants every pair of both appears.
ROTATION = [
    (name, comparison.TIERS[i % 4], comparison.DEPTHS[i // 4 % 4])
    for i, name in enumerate(exactness.FUSED)
]
IN_BFLOAT16 = ("gpt2", "bloom", "falcon-40b-like", "qwen3", "gemma3_text")  # the rest is slow
exact_logits = functools.cache(exactness.exact_logits)


def check(folder: Path, name: str, tier: str, depth: int, dtype: torch.dtype) -> None:
    plain = comparison.plain_model(folder, dtype=dtype)
    place = comparison.placement(tier, depth, folder, comparison.layer_names(plain))
    if tier == "auto" and dtype != torch.float32:
        place["max_memory"] = {k: v // 2 for k, v in place["max_memory"].items()}
    with offload.run(folder, dtype=dtype, **place | {"engine": "fused"}) as model:
        got = exactness.logits(model, name)
        said = exactness.tokens(model, name) if dtype == torch.float32 else {}
        report = model.offload.report()
    assert report.engine == "fused" and report.unserved == {}
    want = exactness.logits(plain, name)
    assert not exactness.worse(got, want, exact_logits(folder, name), dtype)
    for way, sequences in exactness.tokens(plain, name).items() if said else ():
        assert torch.equal(said[way], sequences), way


@pytest.mark.compat
@pytest.mark.parametrize(("name", "tier", "depth"), ROTATION)
def test_variant(variant_folder: Folder, name: str, tier: str, depth: int) -> None:
    check(variant_folder(name), name, tier, depth, torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_BFLOAT16 else pytest.param(name, marks=pytest.mark.slow)
        for name in exactness.FUSED
    ],
)
def test_variant_in_bfloat16(variant_folder: Folder, name: str) -> None:
    check(variant_folder(name), name, "nvme", 2, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("depth", comparison.DEPTHS)
@pytest.mark.parametrize("tier", comparison.TIERS)
@pytest.mark.parametrize("name", exactness.FUSED)
def test_variant_on_every_tier_and_depth(
    variant_folder: Folder, name: str, tier: str, depth: int
) -> None:
    check(variant_folder(name), name, tier, depth, torch.float32)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt-350m-like"])
def test_resident_and_live(variant_folder: Folder, name: str) -> None:
    """Nothing streams: from a folder, and from a model in memory whose weights lie apart."""
    folder = variant_folder(name)
    exact, plain = exact_logits(folder, name), comparison.plain_model(folder)
    want, said = exactness.logits(plain, name), exactness.tokens(plain, name)
    for source in (folder, comparison.plain_model(folder)):
        with offload.run(source, engine="fused", device="cpu") as model:
            assert model.offload.plan.streamed_bytes == 0
            assert not exactness.worse(exactness.logits(model, name), want, exact, torch.float32)
            for way, sequences in exactness.tokens(model, name).items():
                assert torch.equal(sequences, said[way]), way
            assert model.offload.report().unserved == {}
