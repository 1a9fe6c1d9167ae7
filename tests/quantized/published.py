"""Checkpoints as other programs write them, and the weights that they stand for.

    folder, state = published.save("gptq-order", source, tmp_path / "out")

`state` is worked out from the numbers that were drawn, without any code of the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folders
import numpy as np
import stored_weights
import torch
from safetensors.torch import save_file
from stored_weights import Numbers

from offload.kernels.weight_format import WeightFormat

Tensors = dict[str, torch.Tensor]
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Published:
    """`config` is what config.json says; `store` makes of a weight's shape and a seed the stored
    tensors, by the ends of their names, and the weight.
    """

    config: dict[str, Any]
    store: Callable[[tuple[int, int], int], tuple[Tensors, torch.Tensor]]


def _gptq(bits: int, layout: str, order: bool, group: int = 32) -> Published:
    form = WeightFormat(f"int{bits}", layout, (1, group), True, order)  # type: ignore[arg-type]

    def store(shape: tuple[int, int], seed: int) -> tuple[Tensors, torch.Tensor]:
        numbers = _draw(shape, group, bits, seed, order)
        stored = stored_weights.gptq(numbers, bits, form)
        if not order:  # it is there in any case, as a rule
            stored["g_idx"] = torch.from_numpy(numbers.index.astype(np.int32))
        return stored, numbers.weight(DTYPE)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": order,
        "sym": False,
        "checkpoint_format": layout,
        "dynamic": {"-:.*lm_head": {}},
    }
    return Published(config, store)


def _draw(shape: tuple[int, int], group: int, bits: int, seed: int, order: bool) -> Numbers:
    numbers = Numbers.draw(*shape, group, bits, seed, order)
    numbers.scale /= 1 << bits
    return numbers


def _awq(shape: tuple[int, int], seed: int) -> tuple[Tensors, torch.Tensor]:
    numbers = _draw(shape, 32, 4, seed, False)
    return stored_weights.awq(numbers), numbers.weight(DTYPE)


def _fp8(shape: tuple[int, int], seed: int) -> tuple[Tensors, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(shape, generator=generator).mul(100).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 32), -(-shape[1] // 48), generator=generator) / 500
    wide = scale.repeat_interleave(32, 0).repeat_interleave(48, 1)[: shape[0], : shape[1]]
    return {"weight": codes, "weight_scale_inv": scale}, (codes.float() * wide).to(DTYPE)


def _int8(zero_points: bool) -> Callable[[tuple[int, int], int], tuple[Tensors, torch.Tensor]]:
    def store(shape: tuple[int, int], seed: int) -> tuple[Tensors, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        scale = torch.rand(shape[0], 1, generator=generator).div(500).to(DTYPE)
        zero = torch.randint(-9, 9, (shape[0], 1), generator=generator, dtype=torch.int8)
        stored = {"weight": codes, "weight_scale": scale}
        if zero_points:
            stored["weight_zero_point"] = zero
        value = codes.float() - (zero.float() if zero_points else 0)
        return stored, (value * scale.float()).to(DTYPE)

    return store


def _compressed(form: str, weights: dict[str, Any], dynamic: bool) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if dynamic else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _int_config(symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return _compressed("int-quantized", weights, True)


METHODS = {
    "gptq": _gptq(4, "gptq", False),
    "gptq-order": _gptq(4, "gptq", True),
    "gptq-8-bits": _gptq(8, "gptq", True),
    "gptq-v2": _gptq(4, "gptq_v2", True),
    "gptq-channel": _gptq(4, "gptq", False, 0),
    "awq": Published(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _awq,
    ),
    "fp8": Published(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [32, 48],
        },
        _fp8,
    ),
    "int8": Published(_int_config(True), _int8(False)),
    "int8-zeros": Published(_int_config(False), _int8(True)),
}


def save(method: str, source: Path, out: Path) -> tuple[Path, Tensors]:
    """`source` with the Linears of its layers, experts too, stored by `method`."""
    if method == "mxfp4":
        return _save_gpt_oss(source, out)
    published = METHODS[method]
    stored: Tensors = {}
    state: Tensors = {}
    for i, (name, tensor) in enumerate(sorted(folders.tensors(source).items())):
        state[name] = stored[name] = tensor
        if tensor.ndim == 2 and ".layers." in name and not name.endswith(".gate.weight"):
            parts, state[name] = published.store((tensor.shape[0], tensor.shape[1]), i)
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{end}": p for end, p in parts.items()}
    return write(source, out, stored, published.config), state


def _save_gpt_oss(source: Path, out: Path) -> tuple[Path, Tensors]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored: Tensors = {}
    state: Tensors = {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in folders.tensors(source).items():
        state[name] = stored[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            e, k, n = tensor.shape
            blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=generator)
            scales = torch.randint(118, 124, (e, n, k // 32), generator=generator)
            del stored[name]
            stored[f"{name}_blocks"] = blocks.to(torch.uint8)
            stored[f"{name}_scales"] = scales.to(torch.uint8)
            state[name] = convert_moe_packed_tensors(
                stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=DTYPE
            )
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return write(source, out, stored, config), state


def write(source: Path, out: Path, stored: Tensors, quantization: dict[str, Any]) -> Path:
    """A checkpoint folder with these tensors, in two files."""
    out.mkdir()
    names = sorted(stored)
    half = len(names) // 2
    index: dict[str, str] = {}
    for i, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: stored[n].contiguous() for n in part}, out / file)
        index |= dict.fromkeys(part, file)
    content = {"metadata": {}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(content))
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return out
