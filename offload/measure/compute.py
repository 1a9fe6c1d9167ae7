"""What a compute device's matrix units and memory give, and what a launch on it costs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

TIMED_SECONDS = 0.08  # of products between two events, so that the events do not count
ROUNDS = 9
LAUNCHES = 2000


def product_rate(
    shapes: Sequence[tuple[int, int]],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = 5.0,
) -> float:
    """FLOP per second of `rows` times each weight [outputs, inputs] of `shapes`, back to back.

    All of it for `seconds`, and the median of the second half: boost clocks do not last.
    """
    weights = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    inputs = {n: torch.randn(rows, n, device=device, dtype=dtype) for _, n in shapes}
    outputs = {n: torch.empty(rows, n, device=device, dtype=dtype) for n, _ in shapes}

    def layers(count: int) -> None:
        for weight in weights * count:
            torch.mm(inputs[weight.shape[1]], weight.T, out=outputs[weight.shape[0]])

    once = run_seconds(lambda: layers(1), device, 3)[-1]
    batch = max(1, round(TIMED_SECONDS / once))
    repeats = max(3, int(seconds / once / batch))
    times = run_seconds(lambda: layers(batch), device, repeats)
    flop = 2 * rows * sum(n * k for n, k in shapes)
    return flop * batch / statistics.median(times[len(times) // 2 :])


def hbm_rates(device: torch.device, nbytes: int) -> tuple[float, float]:
    """Bytes per second read by a sum over `nbytes`, and read + written by the best copy of half."""
    data = torch.empty(nbytes // 4, dtype=torch.float32, device=device).normal_()
    source, target = data.chunk(2)
    read, *copied = (
        statistics.median(run_seconds(way, device, ROUNDS))
        for way in (
            lambda: data.sum(),
            lambda: target.copy_(source),
            lambda: torch.mul(source, 1.0, out=target),
        )
    )
    return nbytes / read, nbytes / min(copied)


def launch_seconds(device: torch.device) -> float:
    """That the host spends on the launch of one small kernel."""
    small = torch.zeros(1, device=device)
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            small.add_(1.0)
        times.append((time.perf_counter() - start) / LAUNCHES)
    torch.cuda.synchronize(device)
    return min(times)


def run_seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Of each of `repeats` runs, after one that is not counted."""
    run()
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            run()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
