"""Names with and without prefixes, old buffers, every file layout, fused and single experts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import comparison
import process
import pytest
import torch
import transformers
import variants

import offload

Folder = Callable[[str], Path]


def output(model: torch.nn.Module, name: str = "llama") -> torch.Tensor:
    with torch.no_grad():
        return model(**variants.inputs(name))[0]


def check_equal(folder: Path, want: torch.Tensor, name: str = "llama", **arguments: Any) -> None:
    for tier in ("cpu", "nvme"):
        with offload.run(folder, device_map=tier, **arguments) as model:
            assert torch.equal(output(model, name), want), tier


@pytest.mark.compat
def test_gpt2_without_prefix_and_with_old_buffers(variant_folder: Folder, tmp_path: Path) -> None:
    def as_on_the_hub(tensors: checkpoints.Tensors) -> checkpoints.Tensors:
        old = {k.removeprefix("transformer."): v for k, v in tensors.items()}
        for i in range(3):
            old[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64).tril().bool()
            old[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return old

    folder = checkpoints.edited(variant_folder("gpt2"), tmp_path / "gpt2", as_on_the_hub)
    want = output(comparison.plain_model(variant_folder("gpt2")), "gpt2")
    check_equal(folder, want, "gpt2")


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_lm_checkpoint_into_the_base_model(variant_folder: Folder, name: str) -> None:
    folder = variant_folder(name)
    want = output(transformers.AutoModel.from_pretrained(folder).eval(), name)
    check_equal(folder, want, name, model_class="AutoModel")


def test_pooler_that_the_files_lack_is_not_invented(variant_folder: Folder) -> None:
    with pytest.raises(offload.MissingWeightError, match=r"pooler\.dense\.weight"):
        offload.run(variant_folder("bert"), device_map="nvme", model_class="AutoModel")


def test_base_checkpoint_into_the_lm(variant_folder: Folder, tmp_path: Path) -> None:
    """A tied LM needs nothing more than its base model's file."""
    source = variant_folder("qwen2")
    base = transformers.AutoModel.from_pretrained(source)
    base.save_pretrained(tmp_path / "base")
    want = output(comparison.plain_model(source), "qwen2")
    check_equal(tmp_path / "base", want, "qwen2", model_class="AutoModelForCausalLM")


@pytest.mark.compat
def test_junk_prefix_raises_and_allocates_nothing(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    header, at = {}, 0
    for name, p in model.state_dict().items():
        header[f"junk.{name}"] = {
            "dtype": "F32",
            "shape": list(p.shape),
            "data_offsets": [at, at + p.nbytes],
        }
        at += p.nbytes
    text = json.dumps(header).encode()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # a hole, not a gigabyte
    assert at > 500 << 20
    with process.PeakMemory() as memory, pytest.raises(offload.MissingWeightError) as caught:
        offload.run(tmp_path, device_map="nvme")
    assert memory.growth < 32 << 20
    assert len(str(caught.value)) < 1500 and "model.layers" in str(caught.value)


@pytest.mark.compat
def test_buffers_in_old_files_are_not_used(variant_folder: Folder, tmp_path: Path) -> None:
    def add(tensors: checkpoints.Tensors) -> None:
        for i in range(3):
            name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
            tensors[name] = torch.full((4,), 99.0, dtype=torch.float16)
        tensors["rope.freqs"] = torch.full((4,), 99.0)

    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "old", add)
    check_equal(folder, output(comparison.plain_model(variant_folder("llama"))))


def test_stored_position_ids_are_not_used(variant_folder: Folder, tmp_path: Path) -> None:
    def add(tensors: checkpoints.Tensors) -> None:
        tensors["bert.embeddings.position_ids"] = torch.zeros(1, 64, dtype=torch.int64)

    folder = checkpoints.edited(variant_folder("bert"), tmp_path / "bert", add)
    check_equal(folder, output(comparison.plain_model(variant_folder("bert")), "bert"), "bert")


def test_missing_shards_are_named_before_anything_is_read(
    variant_folder: Folder, tmp_path: Path
) -> None:
    folder = variants.save("llama", tmp_path)
    shards = sorted(folder.glob("*.safetensors"))
    for lost in (shards[3], shards[5]):
        lost.unlink()
    with pytest.raises(offload.CheckpointError, match="incomplete download") as caught:
        offload.run(folder, device_map="nvme")
    assert shards[3].name in str(caught.value) and shards[5].name in str(caught.value)


@pytest.mark.compat
@pytest.mark.parametrize("layout", ["single", "sharded", "bin", "sharded-bin", "old-bin"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_file_layout(variant_folder: Folder, tmp_path: Path, layout: str, name: str) -> None:
    source = variant_folder(name)
    target = tmp_path / layout
    folder = {
        "single": lambda: checkpoints.edited(source, target),
        "sharded": lambda: source,
        "bin": lambda: checkpoints.as_bin(source, target),
        "sharded-bin": lambda: checkpoints.as_bin(source, target, shards=2, old_format=True),
        "old-bin": lambda: checkpoints.as_bin(source, target, old_format=True),
    }[layout]()
    check_equal(folder, output(comparison.plain_model(source), name), name)


def test_safetensors_win_over_bin(variant_folder: Folder, tmp_path: Path) -> None:
    source = variant_folder("llama")
    folder = checkpoints.edited(source, tmp_path / "two")
    torch.save({"model.norm.weight": torch.zeros(32)}, folder / "pytorch_model.bin")
    check_equal(folder, output(comparison.plain_model(source)))


@pytest.mark.compat
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_stored_fused(variant_folder: Folder, tmp_path: Path, name: str) -> None:
    """The other layout: tensors named and shaped as the modules hold them."""
    source = variant_folder(name)
    plain = comparison.plain_model(source)
    folder = checkpoints.edited(source, tmp_path / name, lambda _: dict(plain.state_dict()))
    assert any(re.search(r"experts\.gate_up_proj$", k) for k in checkpoints.read_tensors(folder))
    check_equal(folder, output(plain, name), name)


@pytest.mark.compat
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "t5"])
def test_save_pretrained(variant_folder: Folder, tmp_path: Path, name: str, tier: str) -> None:
    """The whole model is written, or it is refused; never a part of it."""
    source = variant_folder(name)
    want = output(comparison.plain_model(source), name)
    with offload.run(source, device_map=tier) as model:
        model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        assert torch.equal(output(model, name), want)
    assert torch.equal(output(comparison.plain_model(tmp_path / "saved"), name), want)
    assert (
        checkpoints.read_tensors(source).keys()
        == checkpoints.read_tensors(tmp_path / "saved").keys()
    )
