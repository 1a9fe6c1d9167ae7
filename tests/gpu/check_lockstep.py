"""Calls in lock step say what each says alone, bit for bit, whatever is resident: captured decode
steps are replayed between the switches.

No test framework in here: python check_lockstep.py FOLDER [DEVICE] runs it, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import variants

import offload

PLACES: dict[str, Any] = {
    "streamed": "cpu",
    "mixed": {"": "cpu", "model.layers.1": 0},
    "first resident": {"": "cpu", "model.layers.0": 0},
    "resident": {"": 0},
}
ENGINES = ("transformers", "fused")
TOKENS = (12, 5, 9, 3, 12)


def requests(device: str) -> list[dict[str, Any]]:
    """Five of different lengths, some with padding."""
    found = []
    for i, new in enumerate(TOKENS):
        request: dict[str, Any] = variants.inputs("llama", rows=1 + i % 3, length=6 + 5 * i, seed=i)
        if i % 2:
            request["attention_mask"][0, :3] = 0
        request = {name: value.to(device) for name, value in request.items()}
        request |= {"max_new_tokens": new, "do_sample": False}
        found.append(request | {"return_dict_in_generate": True, "output_logits": True})
    return found


def wrong(folder: Path, place: str, engine: str, device: str) -> list[str]:
    """What differs from each alone, as lines."""
    found = []
    work = requests(device)
    with offload.run(
        folder, device_map=PLACES[place], prefetch=1, engine=engine, device=device, max_length=64
    ) as model:
        alone = [model.generate(**request) for request in work]
        for live in (None, 2):
            outputs = model.offload.generate(work, live=live)
            for i, (got, want) in enumerate(zip(outputs, alone, strict=True)):
                logits = zip(got.logits, want.logits, strict=True)
                if not torch.equal(got.sequences, want.sequences):
                    found.append(f"{place}, {engine}, live={live}: tokens of request {i}")
                elif not all(torch.equal(a, b) for a, b in logits):
                    found.append(f"{place}, {engine}, live={live}: logits of request {i}")
        if engine == "fused":
            found += [f"{place}: {reason}" for reason in model.offload.report().unserved]
    return found


if __name__ == "__main__":
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    folder = variants.save("llama", sys.argv[1])
    lines = [x for p in PLACES for e in ENGINES for x in wrong(folder, p, e, device)]
    print("\n".join(lines) or f"{len(PLACES) * len(ENGINES)} cases, all as alone")
    sys.exit(bool(lines))
