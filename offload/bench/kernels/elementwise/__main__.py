"""Every norm's and every rotary append's share of its bound in each variant of the library's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offload.bench.kernels.case import Case, Rates, seconds
from offload.bench.kernels.elementwise import NORMS, PROMPT, ROTARIES
from offload.bench.kernels.elementwise.calls import PATTERN

# What the C header's packs_per_thread and variant may be: packs or heads of a thread.
NORM_VARIANTS = (0, 2, 4)
NARROW = 1024  # columns that a warp takes
NARROW_VARIANTS = (0, 3, 4)
ROTARY_VARIANTS = (0, 8, 4)


def sweep(device: torch.device) -> None:
    """Print the shares, a line a case."""
    rates = Rates.measure(device, 0.3)
    print(f"shares of copy, {rates.copy / 1e12:.3f} TB/s")
    many = PROMPT[0] * PROMPT[1]
    wide = [(norm, many) for norm in NORMS if norm.width > NARROW]
    wide += [(NORMS[0], rows) for rows in (4096, 2048, 1024, 512)]
    narrow = [(norm, 4 * many) for norm in NORMS if norm.width <= NARROW]
    for variants, norms in ((NORM_VARIANTS, wide), (NARROW_VARIANTS, narrow)):
        _sweep(device, rates, variants, (norm.case(device, n, variants) for norm, n in norms))
    rotaries = [(rotary, PROMPT) for rotary in ROTARIES]
    rotaries += [(ROTARIES[0], (batch, 1)) for batch in (2048, 1024, 512)]
    _sweep(
        device,
        rates,
        ROTARY_VARIANTS,
        (rotary.case(device, *shape, ROTARY_VARIANTS) for rotary, shape in rotaries),
    )


def _sweep(
    device: torch.device, rates: Rates, variants: Sequence[int], cases: Iterable[Case]
) -> None:
    print("  copy" + "".join(f"{each:>6}" for each in variants), "  copy: no math; 0: our choice")
    for case in cases:
        ways = dict(case.peers)
        try:
            if PATTERN in ways:
                ways[PATTERN](0)
        except Exception as error:  # Triton needs a compiler: ours have none to wait for
            print(f"no copy of the pattern: {type(error).__name__}: {error}")
            del ways[PATTERN]
        missing = "" if PATTERN in ways else "     -"
        took = seconds(list(ways.values()), device, case.copies, rounds=5)
        shares = missing + "".join(f"{rates.bound(case) / each:6.3f}" for each in took)
        print(f"{shares}  {case.op} {case.shape}", flush=True)


if __name__ == "__main__":
    sweep(torch.device("cuda"))
