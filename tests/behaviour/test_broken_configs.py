"""Configs that transformers trips over: one error that names the file and the value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import transformers

import offload

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_act": "nosuch"}, "nosuch"),
        ({"rope_parameters": {"rope_type": "nosuch"}}, "nosuch"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"dtype": "float99"}, "float99"),
        ({"architectures": ["BertModel"]}, "type_vocab_size"),
        ({"architectures": 3}, "'int' object is not iterable"),
        ({"vocab_size": -5}, r"negative dimension -5: \[-5, 32\]\)$"),
        ({"vocab_size": 1 << 61}, r"calculation overflowed with sizes=\[\d+, 32\]\)$"),
        ({"attention_bias": "x"}, "field 'attention_bias'"),
    ],
)
def test_config(
    variant_folder: Folder, tmp_path: Path, entries: dict[str, Any], words: str
) -> None:
    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "bad", **entries)
    with pytest.raises(offload.CheckpointError, match=words) as caught:
        offload.run(folder, device_map="nvme")
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [["NoSuchModel"], ["os"], ["LlamaConfig"], []])
def test_architectures_that_are_no_models(
    variant_folder: Folder, tmp_path: Path, names: list[Any]
) -> None:
    """The model type decides then, as in the Auto classes."""
    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "odd", architectures=names)
    with offload.run(folder, device_map="nvme") as model:
        assert isinstance(model, transformers.LlamaForCausalLM)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_generation_config(variant_folder: Folder, tmp_path: Path, content: str) -> None:
    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "bad")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(offload.CheckpointError, match=r"bad/generation_config\.json"):
        offload.run(folder, device_map="nvme")


def test_an_argument_is_not_blamed_on_the_file(variant_folder: Folder) -> None:
    with pytest.raises(ValueError, match="attn_implementation") as caught:
        offload.run(variant_folder("llama"), device_map="nvme", attn_implementation="nosuch")
    assert "config.json" not in str(caught.value)
