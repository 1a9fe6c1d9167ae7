"""Norms, rotary appends and activations on the rows of real models: prompts, and decode steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.bench.kernels.case import Case
from offload.bench.kernels.elementwise.activations import ACTIVATIONS
from offload.bench.kernels.elementwise.norms import NORMS
from offload.bench.kernels.elementwise.rotary import ROTARIES

OPS = ("residual_norm", "rotary_append", "activation")
PROMPT = (64, 512)  # sequences, tokens: everything is larger than 256 MB
QUICK_PROMPT = (32, 512)
TINY_PROMPT = (2, 3)  # for a CPU


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every op on every model's rows."""
    prompt = (QUICK_PROMPT if quick else PROMPT) if device.type == "cuda" else TINY_PROMPT
    for norm in NORMS[:3] if quick else NORMS:
        yield norm.case(device, prompt[0] * prompt[1])
    for activation in ACTIVATIONS[:3] if quick else ACTIVATIONS:
        yield activation.case(device, prompt[0] * prompt[1])
    for rotary in ROTARIES[:3] if quick else ROTARIES:
        yield rotary.case(device, *prompt)
    for batch in (1, 16):
        for norm in NORMS[:2]:
            yield norm.case(device, batch)
        for activation in ACTIVATIONS[:2]:
            yield activation.case(device, batch)
        for rotary in ROTARIES[:2]:
            yield rotary.case(device, batch, 1)
