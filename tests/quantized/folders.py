"""Plain checkpoints with sizes that groups divide, and what a quantised one should compute."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import variants
from safetensors.torch import load_file
from torch import nn

from offload.checkpoint import open_checkpoint
from offload.kernels import reference
from offload.kernels.dequantize import dequantise
from offload.models.build import build_model
from offload.models.quantized.wanted import Wishes
from offload.models.quantized.write import write_quantised

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
VARIANTS = {
    name: variants.Variant(family, {**variants.HEAD_8, **SIZES, **more})
    for name, family, more in (
        ("llama", "Llama", {}),
        ("llama-tied", "Llama", {"tie_word_embeddings": True}),
        ("qwen2", "Qwen2", {}),  # with biases
        ("phi3", "Phi3", {}),  # query, key and value in one
        ("mixtral", "Mixtral", variants.EXPERTS | {"num_local_experts": 4, "sliding_window": None}),
        ("qwen3_moe", "Qwen3Moe", variants.QWEN_EXPERTS | {"moe_intermediate_size": 32}),
    )
}
GPT_OSS = variants.EXPERTS | variants.ALTERNATING | {"num_local_experts": 4, "sliding_window": 8}
VARIANTS["gpt_oss"] = variants.Variant("GptOss", {**variants.HEAD_8, **SIZES, **GPT_OSS})
VARIANTS["opt"] = variants.Variant(
    "OPT", variants.OPT | {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}
)


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> transformers.PreTrainedModel:
    """The variant with random weights everywhere."""
    model = VARIANTS[name].model().to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def save(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The variant's checkpoint, in several shards."""
    build(name, dtype).save_pretrained(folder, max_shard_size="100KB")
    return folder


def pack(source: Path, out: Path, quantization: Any, **options: Any) -> Path:
    """`source` quantised into `out`."""
    checkpoint = open_checkpoint(source)
    wishes = Wishes.of(quantization)
    return write_quantised(build_model(checkpoint), checkpoint, wishes, out, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a folder of safetensors holds."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def whole(folder: Path, quantization: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A packed folder's tensors by the names of the plain one: dequantised by the reference."""
    stored, wishes = tensors(folder), Wishes.of(quantization)
    found = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        scale = stored.get(f"{module}.weight_scale")
        if scale is None or end == "bias":
            found[name] = tensor
            continue
        if end not in ("weight", "weight_packed"):
            continue
        wanted, _ = wishes.find([module])
        assert wanted is not None
        parts = {e: stored[f"{module}.{e}"] for e in ends(stored, module)}
        per = {"int4": 8, "int8": 4, "mxfp4": 2, "fp8": 1}[wanted.form.kind]
        per = 1 if wanted.form.layout == "plain" else per
        shape = (tensor.shape[0], tensor.shape[1] * per)
        if "weight_shape" in parts:
            shape = tuple(parts["weight_shape"].tolist())
        found[f"{module}.weight"] = dequantise(wanted.form, parts, shape, dtype)
    return found


def ends(stored: Mapping[str, torch.Tensor], module: str) -> list[str]:
    """The ends of the names of a module's tensors."""
    return [n.rpartition(".")[2] for n in stored if n.rpartition(".")[0] == module]


def plain_model(
    source: Path,
    state: dict[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> transformers.PreTrainedModel:
    """transformers' model of `source`'s configuration with the weights `state`."""
    from safetensors.torch import save_file

    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def round_inputs(model: nn.Module, folder: Path) -> nn.Module:
    """`model`, whose layers' Linears multiply as w8a8 says: what comes in is rounded to int8 with a
    scale a token, and multiplied with the int8 weights of `folder`.
    """
    stored = tensors(folder)

    def forward(name: str, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert weight.dtype == torch.int8
        codes, steps = reference.int8_rows(x.float())
        sums = codes.double() @ weight.double().T
        return reference.scale_sums(sums, steps, scale, bias=bias).to(x.dtype)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight_scale" in stored:
            module.forward = partial(forward, name, module.bias)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    """Of the variants' inputs."""
    ids = variants.inputs("llama")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids).logits
