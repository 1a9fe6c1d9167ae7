"""`offload bench link`: rates of copies from host memory to a GPU, by size and kind of memory."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..buffer import alloc
from .sizes import show

_SIZES = tuple(4096 << (2 * i) for i in range(10))  # 4 KiB to 1 GiB
_LEAST_SECONDS = 0.02  # of one sample: copies are repeated to fill it


def measure(args: argparse.Namespace) -> int:
    """Measure and print the table, or JSON."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("no CUDA device is visible to torch, so there is no link to measure")
    device = torch.device("cuda", args.device)
    sizes = [size for size in args.size or _SIZES if size <= args.max_size]
    rows = rates(device, sizes, args.rounds)
    if args.json:
        print(json.dumps({"device": torch.cuda.get_device_name(device), "rows": rows}, indent=1))
        return 0
    print(f"host to {torch.cuda.get_device_name(device)}, GB/s, median of {args.rounds} rounds")
    kinds = list(rows[0]["gbps"])
    print("  ".join(["size".rjust(9), *(kind.rjust(16) for kind in kinds)]))
    for row in rows:
        cells = [f"{row['gbps'][kind]:.2f}".rjust(16) for kind in kinds]
        print("  ".join([show(row["size"]).rjust(9), *cells]))
    return 0


def rates(device: Any, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """For each size: median GB/s from registered memory of ours, torch's pinned, and pageable."""
    import torch

    largest = max(sizes)
    target = torch.empty(largest, dtype=torch.uint8, device=device)
    with torch.cuda.device(device), alloc(largest) as buffer:
        kinds: dict[str, Any] = {
            "aio.alloc" if buffer.registered else "aio.alloc, unpinned": buffer.tensor(),
            "torch pinned": torch.empty(largest, dtype=torch.uint8, pin_memory=True),
            "pageable": torch.zeros(largest, dtype=torch.uint8),
        }
        rows = []
        for size in sizes:
            samples: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, source in kinds.items():
                    samples[kind].append(_rate(target[:size], source[:size]))
            medians = {kind: statistics.median(found) for kind, found in samples.items()}
            rows.append({"size": size, "gbps": medians})
        kinds.clear()
    return rows


def _rate(target: Any, source: Any) -> float:
    import torch

    def copy(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    count = _enough(copy)
    return count * source.numel() / copy(count) / 1e9


def _enough(copy: Callable[[int], float]) -> int:
    once = max(copy(1), 1e-6)
    return max(1, min(2000, int(_LEAST_SECONDS / once)))
