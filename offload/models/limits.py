"""What a model can read at all: the token ids and the positions that it has numbers for.

Others end in an index error that says nothing, on a GPU in a failed assertion that ends its use.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


def positions(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """How many positions a decoder was made for, None where it does not say so, and whether they
    are learnt, so that there is nothing beyond.
    """
    text: Any = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions")
    limit = next((v for n in names if isinstance(v := getattr(text, n, None), int)), None)
    if limit is None or config.is_encoder_decoder:
        return None, False
    return limit, getattr(text, "rope_parameters", None) is None


def check_length(config: PreTrainedConfig, prompt: int, new: int) -> str:
    """What to say of a prompt with `new` tokens that is longer than the model was made for, or "".
    Raises ValueError where there are no such positions.
    """
    limit, learnt = positions(config)
    if limit is None or prompt + new <= limit:
        return ""
    says = f"{prompt} prompt tokens and {new} new ones are more than the model's {limit} positions"
    if learnt:
        raise ValueError(f"{says}; take fewer new ones or a shorter prompt")
    return says


def check_tokens(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise ValueError where `ids` has one that the model has no embedding of."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and ids.numel() and int(ids.max()) >= rows:
        raise ValueError(
            f"the tokenizer makes the token {int(ids.max())} of the text, and the model has "
            f"{rows} embeddings: this is another model's tokenizer"
        )
