"""Embeddings that are the head's, too: quantised as one tensor, or untied where the head is asked
for alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import variants

import offload
from offload.checkpoint import open_checkpoint
from offload.errors import UnsupportedError
from offload.models.build import build_model
from offload.models.quantized.choose import choose
from offload.models.quantized.wanted import Wishes

pytestmark = pytest.mark.compat

Source = Callable[[str], Path]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def stored_for(folder: Path) -> set[str]:
    """The modules, embedding or head, that something is stored for."""
    names = {name.rpartition(".")[0] for name in folders.tensors(folder)}
    return names & {EMBEDDING, HEAD}


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "asked", [{"lm_head|embed": "int8"}, {"embed": "int4-zp"}, {"embed": "fp8", "default": "int4"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_one_tensor(source: Source, tmp_path: Path, asked: Any, engine: str) -> None:
    out = folders.pack(source("llama-tied"), tmp_path / "out", asked)
    assert stored_for(out) == {EMBEDDING}
    assert config(out)["tie_word_embeddings"]
    groups = config(out)["quantization_config"]["config_groups"].values()
    assert sum(EMBEDDING in group["targets"] for group in groups) == 1
    state = folders.whole(out, asked, torch.bfloat16)
    plain = folders.plain_model(source("llama-tied"), state, tmp_path / "whole")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    wanted, before = folders.logits(plain), folders.logits(folders.build("llama-tied"))
    assert not torch.equal(wanted, before)
    with offload.run(out, device="cpu", device_map="nvme", engine=engine) as model:
        found = folders.logits(model)
        if engine == "transformers":
            assert torch.equal(found, wanted)
        assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("asked", "head", "embedding"),
    [
        ({"lm_head": "int8"}, torch.int32, torch.bfloat16),
        ({"lm_head": "fp8", "embed": "int8"}, torch.float8_e4m3fn, torch.int32),
        ({"lm_head": "none", "embed": "int8"}, torch.bfloat16, torch.int32),
    ],
    ids=str,
)
def test_two_tensors(
    source: Source, tmp_path: Path, asked: Any, head: torch.dtype, embedding: torch.dtype
) -> None:
    """Both made of the one there was."""
    out = folders.pack(source("llama-tied"), tmp_path / "out", asked)
    assert config(out)["tie_word_embeddings"] is False
    for module, dtype in ((HEAD, head), (EMBEDDING, embedding)):
        codes = "weight_packed" if dtype == torch.int32 else "weight"
        assert folders.tensors(out)[f"{module}.{codes}"].dtype == dtype
    state = folders.whole(out, asked, torch.bfloat16)
    original = folders.tensors(source("llama-tied"))[f"{EMBEDDING}.weight"]
    for module in (HEAD, EMBEDDING):
        assert torch.allclose(state[f"{module}.weight"], original, atol=0.02)
    apart = tmp_path / "apart"
    apart.mkdir()
    untied = {**config(source("llama-tied")), "tie_word_embeddings": False}
    (apart / "config.json").write_text(json.dumps(untied))
    plain = folders.plain_model(apart, state, tmp_path / "whole")
    with offload.run(
        source("llama-tied"), device="cpu", device_map="cpu", quantization=asked
    ) as model:
        assert torch.equal(folders.logits(model), folders.logits(plain))
        assert model.config.tie_word_embeddings is False


@pytest.mark.parametrize("asked", ["int4", {"default": "int4", "lm_head": "none"}], ids=str)
def test_left_as_it_is(source: Source, tmp_path: Path, asked: Any) -> None:
    out = folders.pack(source("llama-tied"), tmp_path / "out", asked)
    assert stored_for(out) == {EMBEDDING}
    assert config(out)["tie_word_embeddings"]
    # Other engines take the class Linear for all of them.
    assert HEAD in config(out)["quantization_config"]["ignore"]


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_setting_that_parts_more_than_the_head(tmp_path: Path, name: str) -> None:
    """Of BERT the head's bias, which no tensor is there for; and T5 scales what a tied head gets,
    as far as its config.json does not say another thing.
    """
    folder = variants.save(name, tmp_path)
    said = config(folder)
    for key in ("tie_word_embeddings", "scale_decoder_outputs"):
        said.pop(key, None)
    (folder / "config.json").write_text(json.dumps(said))
    asked = {"lm_head|predictions.decoder": "int8-channel"}
    with pytest.raises(UnsupportedError, match="has no setting that parts them"):
        offload.pack(folder, tmp_path / "out", asked)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_model_that_cannot_be_untied(source: Source) -> None:
    checkpoint = open_checkpoint(source("llama-tied"))
    model = build_model(checkpoint)
    model.config.tie_word_embeddings = False  # such models tie by code of their own
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight is the embeddings' tensor"):
        choose(model, checkpoint, Wishes.of({"lm_head": "int8"}))
