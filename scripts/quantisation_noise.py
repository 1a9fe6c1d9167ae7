"""Why a small model loses more in 4 bits than a large one: its perplexity with rounded weights, and
with errors of the same size that have nothing to do with rounding.

    python scripts/quantisation_noise.py FOLDER TEXT [--formats int8,int4,int4-zp] [--tokens N]

For each format three lines: weights as the format rounds them; the same errors dealt out anew in
each row; Gaussian noise of the row's error. Where the three are alike, the model cannot bear errors
of that size, wherever the grid lies.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.bench.quality import WINDOW, token_losses
from offload.kernels.dequantize import dequantise
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import WeightFormat


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--formats", default="int8,int4,int4-zp,int4-g32-zp")
    parser.add_argument("--tokens", type=int)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16)
    model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    ids = tokenizer(args.text.read_text(), return_tensors="pt", verbose=False)["input_ids"]
    ids = ids[:, : args.tokens].to(device)
    weights = {n: p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    plain = {name: weight.detach().clone() for name, weight in weights.items()}
    base = torch.tensor(token_losses(model, ids, WINDOW), dtype=torch.float64)
    print(f"plain: perplexity {math.exp(base.mean()):.3f} over {base.numel()} tokens")
    for text in args.formats.split(","):
        form = WeightFormat.parse(text)
        errors = {n: rounded(w, form).float() - w.float() for n, w in plain.items()}
        size = sum(e.square().sum() for e in errors.values())
        whole = sum(w.float().square().sum() for w in plain.values())
        print(f"{text}: errors of {float((size / whole).sqrt()):.4f} of the weights")
        for label, made in disturbances():
            for name, weight in weights.items():
                weight.data.copy_(plain[name].float() + made(errors[name]))
            found = torch.tensor(token_losses(model, ids, WINDOW), dtype=torch.float64)
            difference = found - base
            spread = difference.std() / math.sqrt(difference.numel())
            print(
                f"  {label:26s} {math.expm1(difference.mean()):+8.2%} "
                f"(standard error {float(spread):.2%})",
                flush=True,
            )


def disturbances() -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """What is made of the errors [N, K] of rounding."""

    def shuffled(error: torch.Tensor) -> torch.Tensor:
        return error[:, torch.randperm(error.shape[1], device=error.device)]

    def noise(error: torch.Tensor) -> torch.Tensor:
        return error.square().mean(1, keepdim=True).sqrt() * torch.randn_like(error)

    yield "rounded", lambda error: error
    yield "its errors, shuffled", shuffled
    yield "Gaussian of that size", noise


def rounded(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """The weight [N, K] as `form` stores it."""
    return dequantise(form, quantise(weight, form), tuple(weight.shape), weight.dtype)


if __name__ == "__main__":
    main()
