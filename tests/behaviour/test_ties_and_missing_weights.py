"""Tied, doubled, contradicting and missing weights: as transformers has them, and never random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoints
import comparison
import pytest
import torch
from comparison import output

import offload

Folder = Callable[[str], Path]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_equal(folder: Path, name: str, **arguments: object) -> None:
    """On every tier the same as transformers makes of that folder."""
    want = output(comparison.plain_model(folder), name)
    for tier in ("cpu", "nvme"):
        with offload.run(folder, device_map=tier, **arguments) as model:
            assert torch.equal(output(model, name), want), tier


@pytest.mark.compat
def test_tied_weight_is_one_tensor(variant_folder: Folder) -> None:
    folder = variant_folder("llama-tied")
    plain = comparison.plain_model(folder)
    with offload.run(folder, device_map="nvme") as model:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        outside = plain.model.embed_tokens.weight.nbytes
        # The pair once, the final norm, and the rotary buffers; each aligned to 256 bytes.
        assert outside <= model.offload.plan.outside_bytes < outside + 2048


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tier", ["cpu", "nvme", "disk"])
def test_embedding_with_a_tier_of_its_own(variant_folder: Folder, tied: bool, tier: str) -> None:
    name = "llama-tied" if tied else "llama"
    folder = variant_folder(name)
    plain = comparison.plain_model(folder)
    want = comparison.ask(plain, name)
    place = {"": "nvme", "model.embed_tokens": tier}
    with offload.run(folder, device_map=place, prefetch=2) as model:
        assert not comparison.differences(comparison.ask(model, name), want)
        assert model.offload.plan.outside_bytes < plain.model.embed_tokens.weight.nbytes + 2048 - (
            plain.model.embed_tokens.weight.nbytes if tied else 0
        )
        assert model.get_input_embeddings().weight.is_meta
        assert model.lm_head.weight.is_meta == tied


def test_meta_tensors_are_not_taken_for_tied(variant_folder: Folder) -> None:
    """Addresses say nothing about tensors without memory."""
    with offload.run(variant_folder("llama"), device_map="nvme") as model:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        assert sum(p.is_meta for p in parameters.values()) > 20
        assert len({id(p) for p in parameters.values()}) == len(parameters)


def test_config_tied_but_file_has_another_head(variant_folder: Folder, tmp_path: Path) -> None:
    folder = checkpoints.edited(
        variant_folder("llama"), tmp_path / "both", tie_word_embeddings=True
    )
    check_equal(folder, "llama")
    with offload.run(folder, device_map="cpu") as model:
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_config_tied_and_file_has_the_head_twice(variant_folder: Folder, tmp_path: Path) -> None:
    def double(tensors: checkpoints.Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    folder = checkpoints.edited(variant_folder("llama-tied"), tmp_path / "double", double)
    check_equal(folder, "llama-tied")
    with offload.run(folder, device_map="cpu") as model:
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_config_tied_and_file_has_only_the_head(variant_folder: Folder, tmp_path: Path) -> None:
    def rename(tensors: checkpoints.Tensors) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)

    folder = checkpoints.edited(variant_folder("llama-tied"), tmp_path / "head", rename)
    want = output(comparison.plain_model(variant_folder("llama-tied")), "llama-tied")
    with offload.run(folder, device_map="nvme") as model:
        assert torch.equal(output(model, "llama-tied"), want)


def test_untied_head_missing(variant_folder: Folder, tmp_path: Path) -> None:
    folder = checkpoints.edited(
        variant_folder("llama"), tmp_path / "headless", lambda t: t.pop(HEAD) is None or None
    )
    with pytest.raises(offload.MissingWeightError, match=r"lm_head\.weight") as caught:
        offload.run(folder, device_map="nvme")
    assert "tie_word_embeddings" in str(caught.value) and "add the tensor" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_shapes_contradict_the_config(variant_folder: Folder, tmp_path: Path) -> None:
    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "wide", intermediate_size=50)
    with pytest.raises(offload.CheckpointError, match=r"mlp\.up_proj.*\(48, 32\).*\(50, 32\)"):
        offload.run(folder, device_map="nvme")


@pytest.mark.compat
@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.1.up_proj.weight"),
        ("deepseek_v3", "model.layers.2.mlp.experts.3.down_proj.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
    ],
)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_lost_tensor(
    variant_folder: Folder, tmp_path: Path, name: str, lost: str, tier: str
) -> None:
    folder = checkpoints.edited(
        variant_folder(name), tmp_path / "lost", lambda t: t.pop(lost) is None or None
    )
    layer = lost.split(".")[2] if "layers" in lost else "norm"
    with pytest.raises(offload.CheckpointError, match=layer) as caught:
        offload.run(folder, device_map=tier)
    assert len(str(caught.value).splitlines()) == 1
