"""What the planner knows of a model is what the model is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from transformers import LlamaConfig

from offload.bench.shapes import SHAPES, model_class, shape_config
from offload.errors import CheckpointError, UnsupportedError
from offload.models.modules import find_layers
from offload.models.profile import config_profile, folder_profile, model_profile
from offload.models.shape import ModelShape
from offload.scheduler.model_profile import PRECISIONS


@pytest.mark.parametrize("name", variants.NAMES)
def test_sizes_are_those_of_the_weights(name: str) -> None:
    model = variants.build(name)
    found = model_profile(model, name)
    layers = list(find_layers(model).values())
    assert len(found.layers) == len(layers)
    native = PRECISIONS[found.native]
    for profile, layer in zip(found.layers, layers, strict=True):
        parameters = list(layer.parameters())
        assert profile.matrices + profile.others == sum(p.numel() for p in parameters)
        assert found.layer_bytes(profile, native) == sum(p.nbytes for p in parameters)
        assert 0 < profile.active <= profile.matrices + profile.others
        assert profile.largest == max(p.numel() for p in parameters)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = {id(p): p.nbytes for p in model.parameters() if id(p) not in inside}
    assert found.outside_bytes == sum(outside.values())
    shape = ModelShape.of(model.config)
    assert (found.kv_width, found.hidden) == (shape.kv_width, shape.hidden)
    assert found.group >= 1


@pytest.mark.parametrize("name", [n for n in SHAPES if n.startswith("tiny")])
def test_a_config_alone_says_the_same_as_the_model(name: str) -> None:
    config = shape_config(name, torch.bfloat16)
    model = model_class(config)(config).to(torch.bfloat16)
    found = config_profile(config, name)
    assert vars(found) == vars(model_profile(model, name))
    assert found.native == "bf16"


def test_grouped_heads_and_chosen_experts() -> None:
    found = config_profile(shape_config("mixtral-8x7b", torch.float16), "mixtral")
    assert (found.query_width, found.kv_width, found.group) == (4096, 2048, 4)
    layer = found.layers[0]
    experts = 8 * 3 * 4096 * 14336
    assert layer.matrices + layer.others - layer.active == experts * 6 // 8
    wide = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                       num_hidden_layers=2, intermediate_size=64, vocab_size=99)  # fmt: skip
    assert config_profile(wide, "wide").query_width == 128


@pytest.mark.parametrize(
    ("name", "positions"),
    [("gpt2", 64), ("opt", 64), ("llama", None), ("bloom", None), ("t5", None)],
)
def test_positions_that_were_learnt_are_a_limit(name: str, positions: int | None) -> None:
    assert model_profile(variants.build(name), name).positions == positions


def test_a_folder_with_its_config_alone(tmp_path: Path) -> None:
    config = shape_config("tiny", torch.float16)
    config.save_pretrained(tmp_path)
    found = folder_profile(tmp_path)
    assert vars(found) == {**vars(config_profile(config, str(tmp_path)))}
    assert folder_profile(tmp_path, torch.float32).native == "fp32"


def test_a_folder_whose_config_names_no_dtype(tmp_path: Path) -> None:
    config = shape_config("tiny", torch.bfloat16)
    model_class(config)(config).to(torch.bfloat16).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"dtype": "bfloat16",', ""))
    assert folder_profile(tmp_path).native == "bf16"


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint folder: it has no config"):
        folder_profile(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(CheckpointError, match="describes no model"):
        folder_profile(tmp_path)
    config = shape_config("tiny", torch.float16)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="is quantised; a plan needs"):
        folder_profile(tmp_path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"attention_bias": "x"}, "describes no model: .*field 'attention_bias'"),
        ({"architectures": 3}, r"cannot use this \(TypeError: 'int' object is not iterable"),
        ({"vocab_size": -5}, r"cannot use this \(RuntimeError: .* negative dimension -5"),
    ],
)
def test_a_config_of_which_transformers_makes_nothing(
    tmp_path: Path, entries: dict[str, Any], words: str
) -> None:
    shape_config("tiny", torch.float16).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(CheckpointError, match=rf"config\.json.* {words}"):
        folder_profile(tmp_path)
