"""Which families the fused engine knows: from a config and a layer's parameter names to a spec.

A family is one function that describes a layer, and an entry of FAMILIES that says what stands
around the layers. What a config asks for and a spec has no field for raises CannotExpress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from offload.kernels.qkv import QkvLayout
from offload.models.specs.spec import Angles, CannotExpress, LayerSpec, LinearSpec, NormSpec

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Names:
    """The parameter names of one layer, asked for by module."""

    def __init__(self, layer: str, names: Iterable[str]) -> None:
        self.layer = layer
        self._names = frozenset(names)

    def linear(self, *modules: str, transposed: bool = False) -> LinearSpec:
        """The product of these modules' weights, with their biases where they have them."""
        weights = tuple(f"{module}.weight" for module in modules)
        missing = [name for name in weights if name not in self._names]
        if missing:
            raise CannotExpress(f"{self.layer} has no parameter {missing[0]}")
        biases = tuple(f"{m}.bias" for m in modules if f"{m}.bias" in self._names)
        if len(biases) not in (0, len(modules)):
            raise CannotExpress(f"{self.layer}: only some of {', '.join(modules)} have a bias")
        return LinearSpec(weights, biases, transposed)

    def norm(self, module: str, kind: Literal["layer", "rms"], eps: float) -> NormSpec:
        """The normalisation that `module` is; without parameters where it has none."""
        weight, bias = f"{module}.weight", f"{module}.bias"
        return NormSpec(
            kind,
            eps,
            weight if weight in self._names else None,
            bias if bias in self._names else None,
        )


def gpt2(config: Any, names: Names, index: int) -> LayerSpec:
    if config.add_cross_attention:
        raise CannotExpress("cross-attention")
    head_dim = config.n_embd // config.n_head
    scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= index + 1
    return LayerSpec(
        qkv=names.linear("attn.c_attn", transposed=True),
        layout=QkvLayout.apart(config.n_head, config.n_head, head_dim),
        attention_out=names.linear("attn.c_proj", transposed=True),
        mlp_in=names.linear("mlp.c_fc", transposed=True),
        mlp_out=names.linear("mlp.c_proj", transposed=True),
        activation=_activation(config.activation_function),
        attention_norm=names.norm("ln_1", "layer", config.layer_norm_epsilon),
        mlp_norm=names.norm("ln_2", "layer", config.layer_norm_epsilon),
        scale=scale,
    )


def gptj(config: Any, names: Names, index: int) -> LayerSpec:
    head_dim = config.n_embd // config.n_head
    norm = names.norm("ln_1", "layer", config.layer_norm_epsilon)
    return LayerSpec(
        qkv=names.linear("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        layout=QkvLayout.apart(config.n_head, config.n_head, head_dim),
        attention_out=names.linear("attn.out_proj"),
        mlp_in=names.linear("mlp.fc_in"),
        mlp_out=names.linear("mlp.fc_out"),
        activation=_activation(config.activation_function),
        attention_norm=norm,
        mlp_norm=norm,
        parallel=True,
        rotary="all",
        interleaved=True,
        scale=head_dim**-0.5,
    )


def gpt_neox(config: Any, names: Names, index: int) -> LayerSpec:
    heads = config.num_attention_heads
    head_dim = config.hidden_size // heads
    return LayerSpec(
        qkv=names.linear("attention.query_key_value"),
        layout=QkvLayout.grouped(heads, heads, head_dim),
        attention_out=names.linear("attention.dense"),
        mlp_in=names.linear("mlp.dense_h_to_4h"),
        mlp_out=names.linear("mlp.dense_4h_to_h"),
        activation=_activation(config.hidden_act),
        attention_norm=names.norm("input_layernorm", "layer", config.layer_norm_eps),
        mlp_norm=names.norm("post_attention_layernorm", "layer", config.layer_norm_eps),
        parallel=config.use_parallel_residual,
        rotary="all",
        scale=head_dim**-0.5,
    )


def opt(config: Any, names: Names, index: int) -> LayerSpec:
    heads = config.num_attention_heads
    head_dim = config.hidden_size // heads
    attention_norm = names.norm("self_attn_layer_norm", "layer", 1e-5)
    mlp_norm = names.norm("final_layer_norm", "layer", 1e-5)
    first = config.do_layer_norm_before  # the 350m model normalises the sums instead
    return LayerSpec(
        qkv=names.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        layout=QkvLayout.apart(heads, heads, head_dim),
        attention_out=names.linear("self_attn.out_proj"),
        mlp_in=names.linear("fc1"),
        mlp_out=names.linear("fc2"),
        activation=_activation(config.activation_function),
        attention_norm=attention_norm if first else None,
        mlp_norm=mlp_norm if first else None,
        attention_sum_norm=None if first else attention_norm,
        mlp_sum_norm=None if first else mlp_norm,
        scale=head_dim**-0.5,
    )


def bloom(config: Any, names: Names, index: int) -> LayerSpec:
    if config.apply_residual_connection_post_layernorm:
        raise CannotExpress("apply_residual_connection_post_layernorm")
    head_dim = config.hidden_size // config.n_head
    return LayerSpec(
        qkv=names.linear("self_attention.query_key_value"),
        layout=QkvLayout.grouped(config.n_head, config.n_head, head_dim),
        attention_out=names.linear("self_attention.dense"),
        mlp_in=names.linear("mlp.dense_h_to_4h"),
        mlp_out=names.linear("mlp.dense_4h_to_h"),
        activation="gelu_tanh",
        attention_norm=names.norm("input_layernorm", "layer", config.layer_norm_epsilon),
        mlp_norm=names.norm("post_attention_layernorm", "layer", config.layer_norm_epsilon),
        slopes=tuple(alibi_slopes(config.n_head).tolist()),
        scale=head_dim**-0.5,
    )


def falcon(config: Any, names: Names, index: int) -> LayerSpec:
    heads = config.num_attention_heads
    head_dim = config.hidden_size // heads
    grouped, parallel = config.new_decoder_architecture, config.parallel_attn
    if grouped and not parallel:
        raise CannotExpress("new_decoder_architecture without parallel_attn")
    kv_heads = config.num_kv_heads if grouped else 1 if config.multi_query else heads
    two = grouped and config.num_ln_in_parallel_attn in (None, 2)
    first = "ln_attn" if two else "input_layernorm"
    second = "ln_mlp" if two else "input_layernorm" if parallel else "post_attention_layernorm"
    slopes = None
    if config.alibi:  # rounded to bfloat16, then divided as the scores are
        slopes = alibi_slopes(heads).bfloat16().double() * head_dim**-0.5
    return LayerSpec(
        qkv=names.linear("self_attention.query_key_value"),
        layout=QkvLayout.grouped(heads, kv_heads, head_dim),
        attention_out=names.linear("self_attention.dense"),
        mlp_in=names.linear("mlp.dense_h_to_4h"),
        mlp_out=names.linear("mlp.dense_4h_to_h"),
        activation=_activation(config.activation),
        attention_norm=names.norm(first, "layer", config.layer_norm_epsilon),
        mlp_norm=names.norm(second, "layer", config.layer_norm_epsilon),
        parallel=parallel,
        rotary=None if slopes is not None else "all",
        slopes=None if slopes is None else tuple(slopes.tolist()),
        scale=head_dim**-0.5,
    )


def llama(config: Any, names: Names, index: int) -> LayerSpec:
    head_dim = _head_dim(config)
    return LayerSpec(
        qkv=names.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        layout=QkvLayout.apart(config.num_attention_heads, config.num_key_value_heads, head_dim),
        attention_out=names.linear("self_attn.o_proj"),
        mlp_in=names.linear("mlp.gate_proj", "mlp.up_proj"),
        mlp_out=names.linear("mlp.down_proj"),
        activation=_activation(config.hidden_act),
        gated=True,
        attention_norm=names.norm("input_layernorm", "rms", config.rms_norm_eps),
        mlp_norm=names.norm("post_attention_layernorm", "rms", config.rms_norm_eps),
        rotary="all",
        scale=head_dim**-0.5,
    )


def mistral(config: Any, names: Names, index: int) -> LayerSpec:
    return replace(llama(config, names, index), window=config.sliding_window or 0)


def qwen2(config: Any, names: Names, index: int) -> LayerSpec:
    return replace(llama(config, names, index), window=_window(config, index))


def qwen3(config: Any, names: Names, index: int) -> LayerSpec:
    return replace(
        qwen2(config, names, index),
        q_norm=names.norm("self_attn.q_norm", "rms", config.rms_norm_eps),
        k_norm=names.norm("self_attn.k_norm", "rms", config.rms_norm_eps),
    )


def phi3(config: Any, names: Names, index: int) -> LayerSpec:
    head_dim = _head_dim(config)
    return LayerSpec(
        qkv=names.linear("self_attn.qkv_proj"),
        layout=QkvLayout.apart(config.num_attention_heads, config.num_key_value_heads, head_dim),
        attention_out=names.linear("self_attn.o_proj"),
        mlp_in=names.linear("mlp.gate_up_proj"),
        mlp_out=names.linear("mlp.down_proj"),
        activation=_activation(config.hidden_act),
        gated=True,
        attention_norm=names.norm("input_layernorm", "rms", config.rms_norm_eps),
        mlp_norm=names.norm("post_attention_layernorm", "rms", config.rms_norm_eps),
        rotary="all",
        window=config.sliding_window or 0,
        scale=head_dim**-0.5,
    )


def gemma2(config: Any, names: Names, index: int) -> LayerSpec:
    if getattr(config, "use_bidirectional_attention", None):
        raise CannotExpress("bidirectional attention")

    def norm(module: str) -> NormSpec:
        return replace(names.norm(module, "rms", config.rms_norm_eps), weight_offset=1.0)

    return LayerSpec(
        qkv=names.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        layout=QkvLayout.apart(
            config.num_attention_heads, config.num_key_value_heads, _head_dim(config)
        ),
        attention_out=names.linear("self_attn.o_proj"),
        mlp_in=names.linear("mlp.gate_proj", "mlp.up_proj"),
        mlp_out=names.linear("mlp.down_proj"),
        activation=_activation(config.hidden_activation),
        gated=True,
        attention_norm=norm("input_layernorm"),
        attention_norm_out=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp_norm_out=norm("post_feedforward_layernorm"),
        rotary="all",
        scale=config.query_pre_attn_scalar**-0.5,
        softcap=_softcap(config),
        window=_window(config, index),
    )


def gemma3(config: Any, names: Names, index: int) -> LayerSpec:
    if config.attn_logit_softcapping:
        raise CannotExpress("attn_logit_softcapping, which transformers' Gemma-3 does not apply")
    layer = gemma2(config, names, index)
    q, k = (names.norm(f"self_attn.{n}_norm", "rms", config.rms_norm_eps) for n in ("q", "k"))
    return replace(
        layer,
        q_norm=replace(q, weight_offset=1.0),
        k_norm=replace(k, weight_offset=1.0),
        rotary=config.layer_types[index],
    )


@dataclass(frozen=True)
class Family:
    """A family's layer, and what stands around its layers, by attribute of their holder."""

    layer: Callable[[Any, Names, int], LayerSpec]
    holder: str  # the class of the module that holds the layers
    around: dict[str, Any] = field(default_factory=dict)  # fields of ModelSpec
    cache_copies: Callable[[Any], int] = lambda config: 1


def _angles(module: Any, positions: torch.Tensor, table: str) -> Angles:
    """The model's own table, asked for in float32; each angle is in it twice."""
    like = positions.new_empty(0, dtype=torch.float32)
    return _half(*module.rotary_emb(like, positions))


def _angles_by_type(module: Any, positions: torch.Tensor, table: str) -> Angles:
    like = positions.new_empty(0, dtype=torch.float32)
    return _half(*module.rotary_emb(like, positions, table))


def _half(cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


def _gptj_angles(module: Any, positions: torch.Tensor, table: str) -> Angles:
    # Older releases keep the table, [positions, sines then cosines], in every layer.
    owner = module.rotary_emb if hasattr(module, "rotary_emb") else module.h[0].attn
    sin, cos = owner.embed_positions[positions].chunk(2, -1)
    return cos.float(), sin.float()


def _gpt2_embed(module: Any, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return embeddings + module.wpe(positions)


def _opt_embed(module: Any, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if module.project_in is not None:
        embeddings = module.project_in(embeddings)
    return embeddings + module.embed_positions(None, 0, position_ids=positions)


def _bloom_embed(module: Any, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return module.word_embeddings_layernorm(embeddings)


def _llama_like(layer: Callable[[Any, Names, int], LayerSpec], holder: str) -> Family:
    around = {"tokens": "embed_tokens", "final_norm": "norm", "angles": _angles}
    return Family(layer, holder, around)


_CROSS = {"output": "BaseModelOutputWithPastAndCrossAttentions"}
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        gpt2,
        "GPT2Model",
        {"tokens": "wte", "final_norm": "ln_f", "embed": _gpt2_embed, **_CROSS},
    ),
    "gptj": Family(
        gptj, "GPTJModel", {"tokens": "wte", "final_norm": "ln_f", "angles": _gptj_angles}
    ),
    "gpt_neox": Family(
        gpt_neox,
        "GPTNeoXModel",
        {"tokens": "embed_in", "final_norm": "final_layer_norm", "angles": _angles},
    ),
    "opt": Family(
        opt,
        "OPTDecoder",
        {
            "tokens": "embed_tokens",
            "final_norm": "final_layer_norm",
            "project_out": "project_out",
            "embed": _opt_embed,
            "positions_from_mask": True,
        },
    ),
    "bloom": Family(
        bloom,
        "BloomModel",
        {"tokens": "word_embeddings", "final_norm": "ln_f", "embed": _bloom_embed, **_CROSS},
    ),
    "falcon": Family(
        falcon,
        "FalconModel",
        {"tokens": "word_embeddings", "final_norm": "ln_f", "angles": _angles, **_CROSS},
        # transformers keeps a key and a value for every head of the new architecture.
        lambda c: c.num_attention_heads // c.num_kv_heads if c.new_decoder_architecture else 1,
    ),
    "llama": _llama_like(llama, "LlamaModel"),
    "mistral": _llama_like(mistral, "MistralModel"),
    "qwen2": _llama_like(qwen2, "Qwen2Model"),
    "qwen3": _llama_like(qwen3, "Qwen3Model"),
    "gemma2": _llama_like(gemma2, "Gemma2Model"),
    "gemma3_text": Family(
        gemma3,
        "Gemma3TextModel",
        {"tokens": "embed_tokens", "final_norm": "norm", "angles": _angles_by_type},
    ),
    "phi3": _llama_like(phi3, "Phi3Model"),
}


def alibi_slopes(heads: int) -> torch.Tensor:
    """The slope of each head's linear bias, float32 [heads]. (ALiBi, arXiv:2108.12409)"""
    closest = 2 ** math.floor(math.log2(heads))
    base = torch.tensor(2 ** (-(2 ** -(math.log2(closest) - 3))), dtype=torch.float32)
    slopes = torch.pow(base, torch.arange(1, 1 + closest, dtype=torch.int32))
    if closest != heads:
        base = torch.tensor(2 ** (-(2 ** -(math.log2(2 * closest) - 3))), dtype=torch.float32)
        rest = min(closest, heads - closest)
        between = torch.pow(base, torch.arange(1, 1 + 2 * rest, 2, dtype=torch.int32))
        slopes = torch.cat([slopes, between])
    return slopes


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise CannotExpress(f"the activation {name!r}")
    return ACTIVATIONS[name]


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _softcap(config: Any) -> float:
    """The soft cap of the scores. Releases that allow sdpa here leave it out there; so do we."""
    if getattr(config, "_attn_implementation", None) == "sdpa":
        return 0.0
    return config.attn_logit_softcapping or 0.0


def _window(config: Any, index: int) -> int:
    """The layer's sliding window by its type; 0 where it sees everything before."""
    kind = config.layer_types[index]
    if kind == "full_attention":
        return 0
    if kind != "sliding_attention" or not config.sliding_window:
        raise CannotExpress(f"the layer type {kind!r} with sliding_window={config.sliding_window}")
    return config.sliding_window
