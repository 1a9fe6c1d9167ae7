"""Buffers are computed for real and stay; every tensor has the dtype that transformers gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import comparison
import pytest
import torch
import transformers
import variants
from comparison import output

import offload

Folder = Callable[[str], Path]
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.compat
@pytest.mark.parametrize("name", variants.NAMES)
def test_buffers(variant_folder: Folder, name: str) -> None:
    folder = variant_folder(name)
    plain = dict(comparison.plain_model(folder).named_buffers())
    with offload.run(folder, device_map="nvme") as model:
        buffers = dict(model.named_buffers())
        assert buffers.keys() == plain.keys()
        for key, buffer in buffers.items():
            assert not buffer.is_meta and type(buffer) is torch.Tensor, key
            assert buffer.dtype == plain[key].dtype and torch.equal(buffer, plain[key]), key


@pytest.mark.compat
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["llama", "t5", "gpt_oss", "deepseek_v3", "gemma3_text", "bloom"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_cast(variant_folder: Folder, name: str, dtype: torch.dtype, tier: str) -> None:
    """Norms, routers and the like that stay fp32 do; a cast pack holds each in its own dtype."""
    folder = variant_folder(name)
    plain = comparison.plain_model(folder, dtype=dtype)
    with offload.run(folder, device_map=tier, dtype=dtype) as model:
        want = {n: p.dtype for n, p in plain.named_parameters()}
        assert {n: p.dtype for n, p in model.named_parameters()} == want
        kept = {n for n, d in want.items() if d == torch.float32}
        # What makes the case worth its name: some tensors are not of the model's dtype.
        if (name, dtype) in {("t5", torch.float16), ("gpt_oss", torch.float16)}:
            assert kept
        assert {n: b.dtype for n, b in model.named_buffers()} == {
            n: b.dtype for n, b in plain.named_buffers()
        }
        assert model.dtype == plain.dtype
        assert torch.equal(output(model, name), output(plain, name))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("text", ["float16", "torch.bfloat16", "auto"])
def test_dtype_by_name(variant_folder: Folder, text: str, tier: str) -> None:
    folder = variant_folder("llama")
    dtype = text if text == "auto" else getattr(torch, text.removeprefix("torch."))
    plain = comparison.plain_model(folder, dtype=dtype)
    with offload.run(folder, device_map=tier, dtype=text) as model:
        assert model.dtype == plain.dtype
        assert torch.equal(output(model, "llama"), output(plain, "llama"))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16])
def test_norms_of_another_dtype_in_the_file(
    variant_folder: Folder, tmp_path: Path, dtype: Any, tier: str
) -> None:
    def halve(tensors: checkpoints.Tensors) -> checkpoints.Tensors:
        return {k: v if "norm" in k else v.bfloat16() for k, v in tensors.items()}

    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "m", halve, dtype="bfloat16")
    plain = comparison.plain_model(folder, dtype=dtype)
    with offload.run(folder, device_map=tier, dtype=dtype) as model:
        assert {p.dtype for p in model.parameters()} == {p.dtype for p in plain.parameters()}
        assert torch.equal(output(model, "llama"), output(plain, "llama"))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_config_without_a_dtype(variant_folder: Folder, tmp_path: Path, tier: str) -> None:
    """The files' own dtype counts then, as in from_pretrained."""
    folder = checkpoints.edited(
        variant_folder("llama"),
        tmp_path / "m",
        lambda tensors: {k: v.bfloat16() for k, v in tensors.items()},
        dtype=None,
        torch_dtype=None,
    )
    plain = comparison.plain_model(folder, dtype="auto")
    with offload.run(folder, device_map=tier) as model:
        assert model.dtype == plain.dtype
        assert torch.equal(output(model, "llama"), output(plain, "llama"))


def test_cast_is_packed_once(variant_folder: Folder, tmp_path: Path) -> None:
    """A second run takes the pack; another dtype, or another checkpoint, gets one of its own."""
    packs = tmp_path / "packs"
    arguments: dict[str, Any] = {"device_map": "nvme", "offload_folder": packs}

    def run(name: str, dtype: torch.dtype) -> dict[str, int]:
        folder = variant_folder(name)
        want = output(comparison.plain_model(folder, dtype=dtype), name)
        with offload.run(folder, dtype=dtype, **arguments) as model:
            assert torch.equal(output(model, name), want)
        return {str(f): f.stat().st_mtime_ns for f in packs.rglob("*.safetensors")}

    first = run("llama", torch.float16)
    assert len(first) == 3 and run("llama", torch.float16) == first
    second = run("llama", torch.bfloat16)
    assert first.items() < second.items()
    assert second.items() < run("llama3-rope", torch.bfloat16).items()


@pytest.mark.parametrize("wrong", ["float17", "int8", "float8_e4m3fn", torch.int64, 16])
def test_bad_dtype(variant_folder: Folder, wrong: Any) -> None:
    with pytest.raises(ValueError, match="dtype") as caught:
        offload.run(variant_folder("llama"), device_map="cpu", dtype=wrong)
    assert str(wrong).removeprefix("torch.") in str(caught.value)


def test_model_of_another_default_dtype(variant_folder: Folder) -> None:
    """A buffer that is computed must not pick up the dtype of the weights."""
    folder = variant_folder("llama")
    with offload.run(folder, device_map="cpu", dtype="bfloat16") as model:
        rotary = model.model.rotary_emb
        assert rotary.inv_freq.dtype == torch.float32
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
        assert torch.equal(rotary.inv_freq, reference.inv_freq)
