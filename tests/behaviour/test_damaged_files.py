"""Cut, flipped, mislabelled, unaligned and quantised files."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import checkpoints
import comparison
import pytest
import torch
import variants
from comparison import output

import offload

Folder = Callable[[str], Path]


@pytest.fixture
def single(variant_folder: Folder, tmp_path: Path) -> Path:
    return checkpoints.edited(variant_folder("llama"), tmp_path / "single")


def check_refused(folder: Path, *words: str) -> None:
    with pytest.raises(offload.OffloadError) as caught:
        offload.run(folder, device_map="nvme")
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("lost", [1, 100, 20_000])
def test_truncated(single: Path, lost: int) -> None:
    file = single / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - lost)
    check_refused(single, file.name, str(whole), str(whole - lost), "download it again")


def test_truncated_shard(variant_folder: Folder, tmp_path: Path) -> None:
    folder = variants.save("llama", tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[4]
    os.truncate(shard, shard.stat().st_size - 100)
    check_refused(folder, shard.name, "download it again")


def test_bytes_too_many(single: Path) -> None:
    with open(single / "model.safetensors", "ab") as file:
        file.write(b"\0" * 100)
    check_refused(single, "model.safetensors")


def test_empty_file(single: Path) -> None:
    os.truncate(single / "model.safetensors", 0)
    check_refused(single, "model.safetensors", "download it again")


def test_git_lfs_pointer(single: Path) -> None:
    (single / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98765\n"
    )
    check_refused(single, "model.safetensors", "LFS")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "old"])
@pytest.mark.parametrize("lost", [1, 100, 20_000])
def test_truncated_bin(variant_folder: Folder, tmp_path: Path, name: str, lost: int) -> None:
    folder = checkpoints.as_bin(variant_folder("llama"), tmp_path / "b", old_format=name == "old")
    file = folder / "pytorch_model.bin"
    os.truncate(file, file.stat().st_size - lost)
    check_refused(folder, file.name)


def test_pickle_that_runs_code(variant_folder: Folder, tmp_path: Path) -> None:
    folder = checkpoints.as_bin(variant_folder("llama"), tmp_path / "evil")
    trace = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.system, (f"touch {trace}",))

    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    check_refused(folder, "pytorch_model.bin")
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump({"model.norm.weight": Evil()}, file)
    check_refused(folder, "pytorch_model.bin")
    assert not trace.exists()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_flipped_bit_is_streamed_as_it_stands(single: Path, tier: str) -> None:
    """The format has no checksum, so that transformers and this package see the same weights."""
    file = single / "model.safetensors"
    content = bytearray(file.read_bytes())
    before = output(comparison.plain_model(single))
    content[-9] ^= 0x40
    file.write_bytes(content)
    want = output(comparison.plain_model(single))
    assert not torch.equal(want, before)
    with offload.run(single, device_map=tier) as model:
        assert torch.equal(output(model), want)


@pytest.mark.compat
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("odd", [1, 3])
def test_unaligned_offsets(variant_folder: Folder, tmp_path: Path, odd: int, tier: str) -> None:
    """An odd header and odd bytes in front put every weight at an odd offset."""
    folder = checkpoints.copy_without_weights(variant_folder("llama"), tmp_path / "odd")
    tensors = checkpoints.read_tensors(variant_folder("llama"))
    header = {"odd": {"dtype": "U8", "shape": [odd], "data_offsets": [0, odd]}}
    at = odd
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * ((len(text) + 1) % 2)  # odd, and with the length before it too
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"\1" * odd)
        for tensor in tensors.values():
            file.write(tensor.contiguous().numpy().tobytes())
    want = output(comparison.plain_model(variant_folder("llama")))
    with offload.run(folder, device_map=tier) as model:
        assert torch.equal(output(model), want)


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm", "hqq", "fbgemm_fp8", "nvfp4"])
def test_quantised(single: Path, method: str) -> None:
    """Refused by name before a weight file is opened."""
    checkpoints.change_config(single, quantization_config={"quant_method": method, "bits": 4})
    (single / "model.safetensors").write_bytes(b"never looked at")
    with pytest.raises(offload.UnsupportedError, match=method):
        offload.run(single, device_map="nvme")


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_odd_names_and_many_tensors(tmp_path: Path, tier: str) -> None:
    """A 300-character module name and hundreds of parameters make no file name too long."""
    import transformers

    config = transformers.LlamaConfig(**variants.VARIANTS["llama"].arguments)
    config.num_hidden_layers = 40
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    want = output(plain)
    for layer in plain.model.layers:
        child = layer.mlp._modules.pop("up_proj")
        layer.mlp._modules["u" * 300] = child
        layer.mlp.__class__ = type("Named", (type(layer.mlp),), {"up_proj": _LongName()})
    with offload.run(plain, device_map=tier, offload_folder=tmp_path) as model:
        assert len(list(model.parameters())) > 300
        assert torch.equal(output(model), want)


class _LongName:
    """Finds the child under its long name."""

    def __get__(self, module: torch.nn.Module, owner: type) -> torch.nn.Module:
        return module._modules["u" * 300]
