"""What a model says when it is asked the same questions as another, and whether all answers agree.

No test framework in here: a script on a GPU machine uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import variants

import offload

Answers = dict[str, torch.Tensor]
TIERS = ("cpu", "nvme", "auto", "dict")
DEPTHS = (1, 2, 3, 4)
NEW_TOKENS = 5


def plain_model(folder: Path, device: str = "cpu", **options: Any) -> transformers.PreTrainedModel:
    """What transformers itself makes of a folder, with the class that its config names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(folder, **options).eval().to(device)


def layer_names(model: transformers.PreTrainedModel) -> list[str]:
    """The blocks' names: members of a list, of the kinds that transformers declares indivisible."""
    kinds = set(model._no_split_modules)
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in kinds and name.rpartition(".")[2].isdigit()
    ]


def output(model: torch.nn.Module, name: str = "llama") -> torch.Tensor:
    """The logits [batch, tokens, vocabulary] of the variant's inputs."""
    with torch.no_grad():
        return model(**variants.inputs(name)).logits


def left_padded(name: str) -> dict[str, torch.Tensor]:
    """The variant's inputs with five tokens less in the second row."""
    arguments = variants.inputs(name)
    arguments["input_ids"][1, :5] = 1 if name == "roberta" else 0
    arguments["attention_mask"][1, :5] = 0
    return arguments


def ask(model: transformers.PreTrainedModel, name: str) -> Answers:
    """Logits, padded and not, with a cache and without; and where it generates, greedily and by
    beams.
    """
    device = model.device
    whole, padded = (
        {k: v.to(device) for k, v in arguments.items()}
        for arguments in (variants.inputs(name), left_padded(name))
    )
    answers: Answers = {}
    with torch.no_grad():
        answers["logits"] = model(**whole).logits
        answers["padded logits"] = model(**padded).logits
        if not model.can_generate():
            return answers
        answers["logits without cache"] = model(**whole, use_cache=False).logits
        padded.pop("decoder_input_ids", None)
        for way, options in {
            "greedy": {},
            "beams": {"num_beams": 3},
            "greedy without cache": {"use_cache": False},
        }.items():
            out = model.generate(
                **padded,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                **options,
            )
            answers[f"{way} tokens"] = out.sequences
            answers[f"{way} logits"] = torch.stack(out.logits)
    return answers


def differences(got: Answers, want: Answers) -> list[str]:
    """One line an answer that is not bit-equal, worst difference first named."""
    lines = [f"{key}: asked on one side only" for key in sorted(got.keys() ^ want.keys())]
    for key in want.keys() & got.keys():
        a, b = got[key], want[key]
        if a.shape != b.shape or a.dtype != b.dtype:
            lines.append(f"{key}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(a, b):
            lines.append(f"{key}: differs by up to {spread(a, b):.3g}")
    return sorted(lines)


def spread(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where a NaN stands on one side only."""
    gap = (a.double() - b.double()).abs()
    gap[a.isnan() & b.isnan()] = 0
    gap[torch.isinf(a) & (a == b)] = 0
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0


def placement(
    tier: str, depth: int, folder: Path, names: list[str], device: str = "cpu"
) -> dict[str, Any]:
    """Arguments of `offload.run` that put the model's layers on `tier`.

    "auto" gets a budget that holds the slots and one layer in CPU memory beside them, and where
    that leaves two for the files, one more on the device; "dict" names a place for single layers.
    """
    common: dict[str, Any] = {"prefetch": depth, "device": device, "max_length": 64}
    common["engine"] = "transformers"  # which is bit-equal, on a GPU too
    if tier in ("cpu", "nvme"):
        return common | {"device_map": tier}
    if tier == "dict":
        return common | {"device_map": {"": "nvme", names[0]: 0, names[-1]: "cpu"}}
    shallow = common | {"prefetch": min(depth, len(names) // 2)}
    with offload.run(folder, device_map="nvme", **shallow) as probe:
        plan = probe.offload.plan
    slot = plan.slot_bytes
    on_device = plan.device_bytes + plan.reserve_bytes
    on_device += slot if len(names) > plan.slots + 2 else 0
    in_memory = plan.ring_bytes + slot + (on_device if device == "cpu" else 0)
    return common | {"device_map": "auto", "max_memory": {0: on_device, "cpu": in_memory}}


def run_variant(
    name: str, tier: str, depth: int, folder: Path, names: list[str], device: str = "cpu"
) -> tuple[Answers, Mapping[str, int]]:
    """The answers of the offloaded variant, and how many layers each tier held."""
    arguments = placement(tier, depth, folder, names, device)
    with offload.run(folder, **arguments) as model:
        plan = model.offload.plan
        answers = ask(model, name)
        counts = {t.value: plan.count(t) for t in type(plan.tiers[0])}
    return answers, counts
