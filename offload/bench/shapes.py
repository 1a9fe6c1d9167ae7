"""The shapes of well-known models, as transformers configs: everything but the weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig


def _opt(layers: int, hidden: int, heads: int, vocabulary: int = 50272) -> tuple[str, dict]:
    return "OPT", {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int = 32000,
    family: str = "Llama",
    **more: Any,
) -> tuple[str, dict]:
    return family, {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        **more,
    }


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> tuple:
    return _llama(layers, hidden, heads, kv_heads, intermediate, 152064, "Qwen2")


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": _llama(4, 64, 4, 2, 128, 257),
    "tiny-opt": _opt(4, 64, 4, 257),
    "tiny-deep": _llama(64, 64, 4, 2, 128, 257),  # nearly all of its time is Python
    "tiny-moe": _llama(
        4, 64, 4, 2, 128, 257, "Mixtral", num_local_experts=4, num_experts_per_tok=2
    ),
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672),
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen(48, 5120, 40, 8, 13824),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14336, family="Mixtral", num_local_experts=8, num_experts_per_tok=2
    ),
}


def shape_config(name: str, dtype: torch.dtype, layers: int | None = None) -> PreTrainedConfig:
    """The config of a shape, with so many of its layers. Raises ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is not known; choose one of {', '.join(SHAPES)}")
    family, sizes = SHAPES[name]
    if layers is not None:
        sizes = {**sizes, "num_hidden_layers": layers}
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.architectures = [f"{family}ForCausalLM"]
    config.dtype = dtype
    return config


def model_class(config: PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    """The class that `config.architectures` names."""
    return getattr(transformers, (config.architectures or [""])[0])
