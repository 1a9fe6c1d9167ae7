"""Models built without reading a weight equal those of `from_pretrained`, in dtype and value."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import variants

from offload.checkpoint import open_checkpoint
from offload.checkpoint.lazy import LazyTensor
from offload.models.build import build_model

pytestmark = pytest.mark.compat
Folder = Callable[[str], Path]


def value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, LazyTensor) else tensor.detach()


def places(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def ties(model: torch.nn.Module) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


@pytest.mark.parametrize("dtype", ["auto", torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", variants.NAMES)
def test_it_is_what_from_pretrained_makes(
    name: str, dtype: Any, variant_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variant_folder(name)
    cls = type(variants.build(name))
    plain = cls.from_pretrained(folder, dtype=dtype)
    checkpoint = open_checkpoint(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)  # not one weight is read
        model = build_model(checkpoint, dtype=dtype)
    assert type(model) is cls and model.dtype == plain.dtype and not model.training
    mine, its = places(model), places(plain)
    assert list(mine) == list(its)
    for key, tensor in its.items():
        got = value(mine[key])
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(got, tensor), key
    assert ties(model) == ties(plain)
    stored = set(plain.state_dict())
    assert {key for key, t in mine.items() if isinstance(t, LazyTensor)} == stored
    assert model.config.to_dict() == plain.config.to_dict()
    if plain.can_generate():
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def refuse(*_: Any) -> int:
    raise AssertionError("a weight was read while the model was built")


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "bert", "t5"])
def test_without_a_cast_every_weight_stays_in_its_file(name: str, variant_folder: Folder) -> None:
    model = build_model(open_checkpoint(variant_folder(name)))
    kinds = {type(t.expression).__name__ for t in model.parameters() if isinstance(t, LazyTensor)}
    assert kinds == {"Pieces"}


def test_another_class_and_attention(variant_folder: Folder) -> None:
    checkpoint = open_checkpoint(variant_folder("llama"))
    for wanted in (transformers.LlamaModel, "LlamaModel", transformers.AutoModel):
        model = build_model(checkpoint, model_class=wanted)
        assert type(model) is transformers.LlamaModel
    model = build_model(checkpoint, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    for wrong in ("NoSuchModel", 3, dict):
        with pytest.raises(ValueError, match="model_class"):
            build_model(checkpoint, model_class=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="attn_implementation must be a name such as 'sdpa', got 3"):
        build_model(checkpoint, attn_implementation=3)  # type: ignore[arg-type]


def test_the_global_random_state_and_default_dtype_are_left_alone(variant_folder: Folder) -> None:
    checkpoint = open_checkpoint(variant_folder("t5"))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model(checkpoint, dtype=torch.float16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.rand(4), expected)


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131}
TINY |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 5}
CHANGED_BY_LOADING: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "Youtu": lambda: transformers.YoutuForCausalLM(
        transformers.YoutuConfig(
            **TINY | {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "Chinese CLIP": lambda: transformers.ChineseCLIPModel(
        transformers.ChineseCLIPConfig(
            text_config=TINY,
            vision_config=TINY | {"image_size": 16, "patch_size": 8},
            projection_dim=16,
        )
    ),
}


@pytest.mark.parametrize("dtype", ["auto", torch.float16], ids=str)
@pytest.mark.parametrize("name", CHANGED_BY_LOADING)
def test_a_stored_row_of_padding_that_loading_zeroes(
    name: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file holds other numbers in that row; nothing is read for it."""
    model = CHANGED_BY_LOADING[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    its = places(type(model).from_pretrained(tmp_path, dtype=dtype))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        mine = places(build_model(open_checkpoint(tmp_path), dtype=dtype, model_class=type(model)))
    changed = {key for key, t in mine.items() if kind(t) == "Changed"}
    assert len(changed) == 1 + (name == "Youtu")  # its head is tied
    for key, tensor in its.items():
        assert torch.equal(value(mine[key]), tensor), key
        assert key not in changed or not tensor[5].any()


def kind(tensor: torch.Tensor) -> str:
    return type(tensor.expression).__name__ if isinstance(tensor, LazyTensor) else "real"
