"""31 tiny random models of 21 families, made so that what round numbers would hide shows.

Every weight is random (norms and biases are ones and zeros at birth), the vocabulary is odd,
windows and rotary limits are shorter than the inputs, and a layer is spread over several shards.

    model = variants.build("mixtral")
    folder = variants.save("mixtral", tmp_path)
    logits = model(**variants.inputs("mixtral")).logits
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 131
LENGTH = 19  # of inputs: longer than every window (8) and every rotary limit (16) below


@dataclass(frozen=True)
class Variant:
    """A model class, its configuration class and what the configuration is given."""

    family: str  # the classes' common prefix, such as "Llama"
    arguments: dict[str, Any] = field(default_factory=dict)
    head: str = "ForCausalLM"
    config: str = "Config"

    def configuration(self) -> transformers.PretrainedConfig:
        return getattr(transformers, self.family + self.config)(**self.arguments)

    def model(self) -> transformers.PreTrainedModel:
        return getattr(transformers, self.family + self.head)(self.configuration())


IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Three ways in which families name the same sizes.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GPT_SIZES = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}

GROUPED = IDS | SIZES | {"num_key_value_heads": 2}
HEAD_8 = GROUPED | {"head_dim": 8}
GEMMA = HEAD_8 | {"sliding_window": 8, "query_pre_attn_scalar": 8}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FALCON = IDS | {k: v for k, v in SIZES.items() if k != "intermediate_size"}
OPT = IDS | {k: v for k, v in SIZES.items() if k != "intermediate_size"} | {"ffn_dim": 48}
EXPERTS = {"num_experts_per_tok": 2}
QWEN_EXPERTS = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}
ENCODER = SIZES | {"vocab_size": VOCABULARY}
T5 = T5_SIZES | {
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """The configuration entry for a rotary embedding of this kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


VARIANTS: dict[str, Variant] = {
    "gpt2": Variant("GPT2", IDS | GPT_SIZES, head="LMHeadModel"),
    "gptj": Variant("GPTJ", IDS | GPT_SIZES | {"rotary_dim": 4}),
    "gpt_neo": Variant(
        "GPTNeo",
        IDS
        | {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "intermediate_size": 48}
        | {"max_position_embeddings": 64, "window_size": 8}
        | {"attention_types": [[["global", "local"], 2]]},
    ),
    "gpt_neox": Variant("GPTNeoX", IDS | SIZES),
    "opt": Variant("OPT", OPT | {"word_embed_proj_dim": 32}),
    "opt-350m-like": Variant(
        "OPT", OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    ),
    "bloom": Variant("Bloom", IDS | {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": Variant(
        "Falcon",
        FALCON | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    ),
    "falcon-40b-like": Variant(
        "Falcon", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}
    ),
    "falcon-rw-alibi": Variant(
        "Falcon",
        FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "llama": Variant("Llama", GROUPED),
    "llama-tied": Variant("Llama", GROUPED | {"tie_word_embeddings": True}),
    "llama3-rope": Variant(
        "Llama",
        GROUPED
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-dynamic-rope": Variant(
        "Llama", GROUPED | {"max_position_embeddings": 16} | rope("dynamic", factor=2.0)
    ),
    "mistral": Variant("Mistral", HEAD_8 | {"sliding_window": 8}),
    "qwen2": Variant("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen2-swa": Variant(
        "Qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen3": Variant("Qwen3", HEAD_8 | {"tie_word_embeddings": True}),
    "gemma2": Variant("Gemma2", GEMMA),
    "gemma3_text": Variant("Gemma3", GEMMA | ALTERNATING, config="TextConfig"),
    "phi3": Variant("Phi3", GROUPED | {"sliding_window": 8}),
    "phi3-longrope": Variant(
        "Phi3",
        GROUPED
        | {"original_max_position_embeddings": 16}
        | rope(
            "longrope",
            short_factor=[1.0] * 4,
            long_factor=[2.0] * 4,
            original_max_position_embeddings=16,
            partial_rotary_factor=1.0,
        ),
    ),
    "mixtral": Variant(
        "Mixtral", HEAD_8 | EXPERTS | {"num_local_experts": 4, "sliding_window": None}
    ),
    "qwen3_moe": Variant("Qwen3Moe", HEAD_8 | QWEN_EXPERTS | {"decoder_sparse_step": 1}),
    "qwen3_moe-mixed": Variant("Qwen3Moe", HEAD_8 | QWEN_EXPERTS | {"mlp_only_layers": [0]}),
    "deepseek_v3": Variant(
        "DeepseekV3",
        GROUPED
        | EXPERTS
        | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        | {"q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "gpt_oss": Variant(
        "GptOss", HEAD_8 | EXPERTS | ALTERNATING | {"num_local_experts": 4, "sliding_window": 8}
    ),
    "bert": Variant("Bert", ENCODER, head="ForMaskedLM"),
    "roberta": Variant(
        "Roberta",
        # Positions start behind the padding index.
        ENCODER | {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
        head="ForMaskedLM",
    ),
    "t5": Variant("T5", T5, head="ForConditionalGeneration"),
    # Fewer decoder than encoder layers: with more, transformers' own `generate` fails.
    "t5-v1.1-untied": Variant(
        "T5",
        T5
        | {
            "num_decoder_layers": 2,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        head="ForConditionalGeneration",
    ),
}
NAMES = tuple(VARIANTS)


def build(name: str, seed: int = 1, std: float = 0.3) -> transformers.PreTrainedModel:
    """The variant in eval mode, every weight and persistent buffer drawn from normal(0, std).

    At 0.3 attention and rotary embedding weigh as much in the logits as the rest does.
    """
    model = VARIANTS[name].model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    if model.can_generate():
        # Without an end token: random models would stop at once, or not, as chance has it.
        start = getattr(model.config, "decoder_start_token_id", None)
        model.generation_config = transformers.GenerationConfig(
            bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=start
        )
    return model.eval()


def save(name: str, folder: str | Path, shard: str = "12KB", **build_arguments: Any) -> Path:
    """Write the variant into a folder of its name in `folder`, in many small shards."""
    path = Path(folder) / name
    build(name, **build_arguments).save_pretrained(path, max_shard_size=shard)
    return path


def inputs(
    name: str, rows: int = 2, length: int = LENGTH, seed: int = 2
) -> dict[str, torch.Tensor]:
    """Arguments for one forward: random tokens without padding."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(columns: int) -> torch.Tensor:  # [rows, columns]; 0 to 2 are special
        return torch.randint(3, VOCABULARY, (rows, columns), generator=generator)

    ids = tokens(length)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if VARIANTS[name].family == "T5":
        arguments["decoder_input_ids"] = tokens(length - 4)
    return arguments
