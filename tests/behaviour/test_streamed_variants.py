"""All variants on every tier and prefetch depth answer bit for bit as plain transformers does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import comparison
import pytest
import torch
import variants

Folder = Callable[[str], Path]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
# One tier and depth a variant: over all variants every pair of both appears.
DEEP = {  # enough layers that every prefetch depth is one of its own
    "llama": {"num_hidden_layers": 7},
    "qwen3_moe-mixed": {"num_hidden_layers": 7},
    "t5": {"num_layers": 4},
}
ROTATION = [
    (name, comparison.TIERS[i % 4], comparison.DEPTHS[i // 4 % 4])
    for i, name in enumerate(variants.NAMES)
]


@functools.cache
def plain_answers(folder: Path, name: str, device: str) -> tuple[comparison.Answers, list[str]]:
    """What the plain model says, and the names of its layers."""
    model = comparison.plain_model(folder, device)
    return comparison.ask(model, name), comparison.layer_names(model)


def check(folder: Path, name: str, tier: str, depth: int, device: str) -> None:
    want, names = plain_answers(folder, name, device)
    got, counts = comparison.run_variant(name, tier, depth, folder, names, device)
    wrong = comparison.differences(got, want)
    if wrong and device != "cpu":
        again = comparison.ask(comparison.plain_model(folder, device), name)
        own = {key: comparison.spread(want[key], again[key]) for key in want}
        if any(own.values()):
            pytest.xfail(f"the plain {name} differs from itself on {device}: {own}; {wrong}")
    assert not wrong, wrong
    if tier == "dict":
        assert counts["device"] == counts["cpu"] == 1 and counts["nvme"] >= 1
    elif tier == "auto":
        assert counts["device"] + counts["cpu"] >= 1 and counts["nvme"] >= 1
    else:
        assert counts == {"device": 0, "cpu": 0, "nvme": 0} | {tier: len(names)}


def test_rotation_is_complete() -> None:
    assert {(tier, depth) for _, tier, depth in ROTATION} == {
        (tier, depth) for tier in comparison.TIERS for depth in comparison.DEPTHS
    }


@pytest.mark.compat
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "tier", "depth"), ROTATION)
def test_variant(variant_folder: Folder, name: str, tier: str, depth: int, device: str) -> None:
    check(variant_folder(name), name, tier, depth, device)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    @functools.cache
    def folder(name: str) -> Path:
        variant = variants.VARIANTS[name]
        deep = dataclasses.replace(variant, arguments=variant.arguments | DEEP[name])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(variants.VARIANTS, name, deep)
            return variants.save(name, tmp_path_factory.mktemp("deep"))

    return folder


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", comparison.DEPTHS)
@pytest.mark.parametrize("name", DEEP)
def test_depth_of_prefetch(deep_folder: Folder, name: str, depth: int, device: str) -> None:
    tier = comparison.TIERS[(depth + len(name)) % 4]
    check(deep_folder(name), name, tier, depth, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", comparison.DEPTHS)
@pytest.mark.parametrize("tier", comparison.TIERS)
@pytest.mark.parametrize("name", variants.NAMES)
def test_variant_on_every_tier_and_depth(
    variant_folder: Folder, name: str, tier: str, depth: int, device: str
) -> None:
    check(variant_folder(name), name, tier, depth, device)
