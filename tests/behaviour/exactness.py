"""How far a model's logits are from those in float64, and whether it says the same tokens.

No test framework in here: a script on a GPU machine uses it too.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import comparison
import torch
import variants

from offload.models.kv.cache import cache_name

FUSED = (
    *("gpt2", "gptj", "gpt_neox", "opt", "opt-350m-like", "bloom"),
    *("falcon", "falcon-40b-like", "falcon-rw-alibi"),
    *("llama", "llama-tied", "llama3-rope", "llama-dynamic-rope", "mistral"),
    *("qwen2", "qwen2-swa", "qwen3", "gemma2", "gemma3_text", "phi3", "phi3-longrope"),
)
# Their softmax is in float32 whatever the model, where a padded row in float64 becomes NaN; what
# they say of a padded row is asked of the row alone.
NAN_IN_PADDING = ("bloom", "gemma2")
NEW_TOKENS = 6
PADDING = 5  # columns of the second row


def right_padded(name: str) -> dict[str, torch.Tensor]:
    """The variant's inputs with the last tokens of the second row taken away."""
    arguments = variants.inputs(name)
    arguments["input_ids"][1, -PADDING:] = 0
    arguments["attention_mask"][1, -PADDING:] = 0
    return arguments


def logits(model: Any, name: str, alone: bool = False) -> dict[str, torch.Tensor]:
    """What forwards say of real tokens, [tokens, vocabulary] each.

    `alone`: padded rows are asked one by one, without their padding.
    """

    def ask(arguments: dict[str, torch.Tensor], **options: Any) -> Any:
        return model(**{k: v.to(model.device) for k, v in arguments.items()}, **options)

    def padded(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
        real = arguments["attention_mask"].bool()
        if not alone:
            return ask(arguments).logits[real.to(model.device)]
        rows = [ids[mask] for ids, mask in zip(arguments["input_ids"], real, strict=True)]
        return torch.cat([ask({"input_ids": row[None]}).logits[0] for row in rows])

    whole = variants.inputs(name)
    with torch.no_grad():
        found = {
            "whole": ask(whole).logits.flatten(0, 1),
            "no cache": ask(whole, use_cache=False).logits.flatten(0, 1),
            "no mask": ask({"input_ids": whole["input_ids"]}).logits.flatten(0, 1),
            "left padding": padded(comparison.left_padded(name)),
            "right padding": padded(right_padded(name)),
        }
        cache_name = name_of_cache(model)
        cache, turns = None, []
        for first, last in ((0, 7), (7, 12), (12, 13), (13, 14), (14, 17), (17, 18)):
            out = ask({"input_ids": whole["input_ids"][:, first:last]}, **{cache_name: cache})
            cache = out[cache_name]
            turns.append(out.logits.flatten(0, 1))
        found["turns"] = torch.cat(turns)
    return {key: value.double().cpu() for key, value in found.items()}


def name_of_cache(model: Any) -> str:
    """What transformers calls the cache argument in the release at hand."""
    return cache_name(inspect.signature(model.forward).parameters)


def tokens(model: Any, name: str) -> dict[str, torch.Tensor]:
    """What it generates, in several ways, from prompts with padding on the left."""
    prompt = {k: v.to(model.device) for k, v in comparison.left_padded(name).items()}
    found = {}
    for way, options in {
        "greedy": {"do_sample": False},
        "beams": {"do_sample": False, "num_beams": 3},
        "sampled": {"do_sample": True, "top_k": 20},
        "no cache": {"do_sample": False, "use_cache": False},
    }.items():
        torch.manual_seed(5)
        found[way] = model.generate(**prompt, max_new_tokens=NEW_TOKENS, **options).cpu()
    return found


def exact_logits(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """`logits` of the plain model in float64, on the CPU."""
    model = comparison.plain_model(folder, dtype=torch.float64)
    return logits(model, name, alone=name in NAN_IN_PADDING)


def worse(
    got: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> list[str]:
    """Where `got` is further from `exact` than twice as far as `plain`, in words."""
    lines = []
    for key, want in exact.items():
        error, own = (comparison.spread(x[key], want) for x in (got, plain))
        slack = 4 * torch.finfo(dtype).eps * float(want.abs().max())
        if not error <= 2 * own + slack:
            lines.append(f"{key}: {error:.2e} from float64, the plain model {own:.2e}")
    return lines
