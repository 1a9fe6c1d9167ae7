"""The sizes of a model that memory and time depend on, read from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from offload.scheduler.engine import FUSED, TRANSFORMERS
from offload.scheduler.footprint import leaving_bytes, working_bytes

# Rows of the fused MLP at once: its wide activations are the largest of a pass, and more rows than
# these make no product faster.
MLP_ROWS = 8192
DEFAULT_LENGTH = 2048  # tokens, where the user names none and the model allows more


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of one decoder (or encoder); all counts, no bytes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_width: int  # elements of keys plus values that one token leaves in one layer
    vocabulary: int
    max_length: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelShape:
        """From a config of any family; names differ, and what is absent is derived."""
        text = config.get_text_config(decoder=True)
        hidden = _first(text, ("hidden_size", "d_model", "n_embd"), 0)
        heads = _first(text, ("num_attention_heads", "num_heads", "n_head"), 1)
        kv_heads = _first(text, ("num_key_value_heads", "num_kv_heads"), heads)
        if getattr(text, "new_decoder_architecture", False):
            kv_heads = heads  # Falcon repeats its few keys for every head before it keeps them
        elif getattr(text, "multi_query", False):
            kv_heads = 1
        head_dim = _first(text, ("head_dim", "d_kv"), hidden // max(1, heads))
        rank = _first(text, ("kv_lora_rank",), 0)
        # Multi-head latent attention: full keys and values, which some releases keep.
        key_dim = _first(text, ("qk_nope_head_dim",), 0) + _first(text, ("qk_rope_head_dim",), 0)
        kv_width = (
            heads * (key_dim + _first(text, ("v_head_dim",), 0))
            if rank
            else 2 * kv_heads * head_dim
        )
        layer_names: tuple[str, ...] = ("num_hidden_layers", "num_layers", "n_layer")
        if config.is_encoder_decoder:  # its decoder also keeps the encoder's keys and values
            layer_names = ("num_decoder_layers", "decoder_layers", *layer_names)
            kv_width *= 2
        return cls(
            layers=_first(text, layer_names, 1),
            hidden=hidden,
            intermediate=_first(
                text, ("intermediate_size", "ffn_dim", "d_ff", "n_inner"), 4 * hidden
            ),
            heads=heads,
            kv_width=kv_width,
            vocabulary=_first(text, ("vocab_size",), 0),
            max_length=_first(
                text, ("max_position_embeddings", "n_positions", "seq_length"), DEFAULT_LENGTH
            ),
        )

    def reserve_bytes(
        self,
        batch: int,
        length: int,
        itemsize: int,
        fused: bool = False,
        kv_on_cpu: int = 0,
        prefill_rows: int | None = None,
    ) -> int:
        """Bytes to keep free for `batch` sequences of `length` tokens: KV cache, activations of one
        layer, logits.

        A prompt of the whole length is assumed. With `prefill_rows` the `fused` engine has so many
        tokens at once in a layer, or one sequence. Keys and values of `kv_on_cpu` sequences are not
        there, but for those of two such parts on their way.
        """
        tokens = batch * length
        few = fused and prefill_rows is not None
        rows = min(tokens, max(prefill_rows or 0, length)) if few else tokens
        engine = FUSED if fused else TRANSFORMERS
        kv = self.kv_width * itemsize
        return (
            self.layers * kv * (batch - kv_on_cpu) * length
            + sum(
                working_bytes(
                    engine, self, tokens=tokens, rows=rows, batch=batch, itemsize=itemsize
                )
            )
            + leaving_bytes(min(rows, kv_on_cpu * length), kv)
        )


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default
