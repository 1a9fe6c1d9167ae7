"""Compares all variants on a GPU with the plain models there; a script, so that nothing but torch
and transformers is needed.

    python tests/gpu/check_variants.py [--all] [--device cuda] [NAME ...]

One line a variant: "equal", or "within its own spread" where the plain model differs from itself
when it is run twice, or FAILED. The exit code is 1 if any failed. `--all` takes every variant over
every tier and prefetch depth, instead of one of each in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OFFLOAD_POISON", "1")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "behaviour")]

import comparison  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import variants  # noqa: E402


def cases(index: int, everything: bool) -> Iterator[tuple[str, int]]:
    """Tier and depth: all of them, or four in which each tier and each depth appears once."""
    if everything:
        yield from ((tier, depth) for tier in comparison.TIERS for depth in comparison.DEPTHS)
        return
    for i, tier in enumerate(comparison.TIERS):
        yield tier, comparison.DEPTHS[(index + i) % 4]


def check(name: str, index: int, folder: Path, device: str, everything: bool) -> str:
    """What to print of a variant; it begins with FAILED where an answer is wrong."""
    plain = comparison.plain_model(folder, device)
    names = comparison.layer_names(plain)
    want = comparison.ask(plain, name)
    # A second model, since some change a buffer while they run; its own difference is the measure.
    again = comparison.ask(comparison.plain_model(folder, device), name)
    own = {key: comparison.spread(want[key], again[key]) for key in want}
    wrong: list[str] = []
    for tier, depth in cases(index, everything):
        got, counts = comparison.run_variant(name, tier, depth, folder, names, device)
        for key in want:
            gap = comparison.spread(got[key], want[key])
            if gap > own[key]:
                wrong.append(f"{tier}/{depth} {key} {gap:.3g} (own spread {own[key]:.3g})")
        if counts["cpu"] + counts["nvme"] == 0:
            wrong.append(f"{tier}/{depth}: nothing was offloaded")
    if wrong:
        return f"FAILED {'; '.join(wrong)}"
    largest = max(own.values())
    return f"within its own spread of {largest:.3g}" if largest else "equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=variants.NAMES, metavar="NAME")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for index, name in enumerate(arguments.names):
            start = time.perf_counter()
            folder = variants.save(name, temporary)
            try:
                result = check(name, index, folder, arguments.device, arguments.all)
            except Exception:
                traceback.print_exc()
                result = "FAILED with an exception"
            failed += [name] if result.startswith("FAILED") else []
            print(f"{name:<20} {time.perf_counter() - start:5.1f} s  {result}", flush=True)
    where = "CPU" if arguments.device == "cpu" else torch.cuda.get_device_name()
    right = len(arguments.names) - len(failed)
    print(
        f"{right} of {len(arguments.names)} variants right on {where}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
