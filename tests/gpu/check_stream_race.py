"""Late kernels, late copies, poisoned slots: does a layer ever read what is not its own?

    python tests/gpu/check_stream_race.py [--passes 200]

Kernels that sleep hold back the compute stream, the copy stream, or both by turns, without the host
ever waiting, so that every order of the two that the events allow comes up. Each pass is compared
bit for bit with the plain model on the GPU; one line a case, exit code 1 if any differed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OFFLOAD_POISON", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import offload
from offload.device import CudaDevice

LAYERS = 24
LONGEST = 200_000  # clock cycles of one sleep: about 0.1 ms
CASES = [
    (tier, depth, late)
    for tier in ("cpu", "nvme", "mixed")
    for depth, late in ((1, "kernels"), (2, "copies"), (3, "both"), (4, "both"))
]


class Sleeper:
    """Holds back streams by random times; the same times in every run."""

    def __init__(self, late: str) -> None:
        self._random = random.Random(late)
        self._late = late

    def kernels(self, *_: Any) -> None:
        """A hook before a part of a layer."""
        if self._late != "copies" and self._random.random() < 0.5:
            torch.cuda._sleep(self._random.randrange(LONGEST))

    def hold_copies(self, device: CudaDevice) -> None:
        """Make the device's copies late."""
        if self._late == "kernels":
            return
        copy = device.copy
        randomly = random.Random(self._late + "copies")  # of its own: another thread copies

        def late_copy(*arguments: Any, **options: Any) -> None:
            if randomly.random() < 0.5:
                with torch.cuda.stream(device._copies):
                    torch.cuda._sleep(randomly.randrange(LONGEST))
            copy(*arguments, **options)

        device.copy = late_copy  # type: ignore[method-assign]


def save(folder: str) -> Path:
    """Many tiny layers of one size, all weights random."""
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return Path(folder)


def wrong_passes(folder: Path, tier: str, depth: int, late: str, passes: int) -> int:
    """How many of `passes` differed from the plain model."""
    ids = torch.arange(3, 3 + 2 * 11, device="cuda").reshape(2, 11)
    plain = transformers.LlamaForCausalLM.from_pretrained(folder).eval().cuda()
    with torch.no_grad():
        want = plain(ids, use_cache=False).logits
        again = plain(ids, use_cache=False).logits
    if not torch.equal(want, again) or not want.isfinite().all():
        raise RuntimeError("the plain model differs from itself: this comparison says nothing")
    device_map: Any = tier
    if tier == "mixed":
        kinds = ("cpu", "nvme", 0)
        device_map = {f"model.layers.{i}": kinds[i % 3] for i in range(LAYERS)}
    sleeper = Sleeper(late)
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    options: dict[str, Any] = {"device_map": device_map, "prefetch": depth}
    with offload.run(folder, engine="transformers", **options) as model, torch.no_grad():
        sleeper.hold_copies(model.offload._device)
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(sleeper.kernels)
            layer.self_attn.register_forward_pre_hook(sleeper.kernels)
        for number in range(passes):
            # Every fourth pass runs on a stream of the caller's own.
            stream = side if number % 4 == 3 else torch.cuda.default_stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                wrong += (model(ids, use_cache=False).logits != want).any()
            torch.cuda.default_stream().wait_stream(stream)
        return int(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=200)
    passes = parser.parse_args().passes
    transformers.utils.logging.disable_progress_bar()
    total = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = save(temporary)
        for tier, depth, late in CASES:
            wrong = wrong_passes(folder, tier, depth, late, passes)
            total += wrong
            print(
                f"{tier:<6} prefetch {depth}, late {late:<8} {wrong} of {passes} wrong", flush=True
            )
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
