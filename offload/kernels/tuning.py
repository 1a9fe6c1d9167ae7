"""Finds out which way to compute a product is quickest on this machine, by timing all of them."""

from __future__ import annotations

import functools
import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from offload.kernels.call import current_stream
from offload.kernels.choices import OWN, Choice, Key, table
from offload.kernels.workspace import Workspace

Launch = Callable[[int], Any]  # on the stream of that number
T = TypeVar("T")
# Weights beyond what L2 holds, so that a measured product reads from HBM as a real one does.
ROTATION_OF_L2 = 3
REPEATS = 5
TURNS = 5
TURNS_SECONDS = 0.5

log = logging.getLogger("offload")


def rotation(nbytes: int, device: torch.device) -> int:
    """How many copies of a weight a measurement takes in turns, so that none of them is in L2."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(64, max(2, -(-ROTATION_OF_L2 * l2 // max(1, nbytes))))


_measuring = threading.Lock()  # else what another thread issues would be captured, too


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all measurements: for every stream that cuBLAS was used on, torch keeps a
    workspace (32 MiB on Hopper) until the process ends.
    """
    return torch.cuda.Stream(device)


def time_products(products: Sequence[Sequence[Launch]], device: torch.device) -> float:
    """Median microseconds of one of `products`, each a sequence of launches; they run one after
    another in a CUDA graph.
    """

    def issue(launches: Sequence[Launch]) -> None:
        current = current_stream(device)
        for launch in launches:
            launch(current)

    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with _measuring, torch.cuda.device(device), torch.cuda.stream(stream):
        issue(products[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for launches in products:
                issue(launches)
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(products))
    return statistics.median(times[1:])


def time_turns(
    calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float = TURNS_SECONDS
) -> list[float]:
    """Median microseconds of each of `calls` on the current stream, for calls of milliseconds.

    The calls take turns, so that a falling clock affects all alike. Only as many are tried as fit
    into `seconds` if each takes as long as the first; the first is always tried.
    """
    stream = torch.cuda.current_stream(device)

    def timed(call: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        call()
        end.record(stream)
        return start, end

    calls[0]()  # what runs for the first time is loaded first
    start, end = timed(calls[0])
    end.synchronize()
    one = max(1e-6, start.elapsed_time(end) / 1e3)
    tried = calls[: max(1, int(seconds / (2 * one)))]
    for call in tried[1:]:
        call()
    rounds = min(TURNS, max(1, int(seconds / (len(tried) * one)) - 1))
    events = [[timed(call) for call in tried] for _ in range(rounds)]
    stream.synchronize()
    return [
        statistics.median(start.elapsed_time(end) * 1e3 for start, end in taken)
        for taken in zip(*events, strict=True)
    ]


def captured(device: torch.device) -> bool:
    """Whether what is issued now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def pick(
    key: Key,
    device: torch.device,
    candidates: Callable[[], tuple[Choice, ...]],
    measure: Callable[[Choice], float],
    refine: Callable[[Choice], tuple[Choice, ...]] = lambda choice: (),
    *,
    otherwise: Choice,
) -> Choice:
    """The quickest way for `key`: from the table, else measured now and kept.

    `candidates` are measured, then what `refine` makes of the best three of them, by `measure`,
    which returns microseconds. A candidate that fails is left out. Where nothing is kept and
    nothing can be measured now, while a graph is captured or for lack of memory, the answer is
    `otherwise`, which is not kept. Raises RuntimeError where all candidates fail.
    """
    found = table(device.index or 0).get(key)
    if found is not None:
        return found
    if captured(device):
        return otherwise
    try:
        return _measured(key, device, candidates, measure, refine)
    except torch.OutOfMemoryError:
        return otherwise


def _measured(
    key: Key,
    device: torch.device,
    candidates: Callable[[], tuple[Choice, ...]],
    measure: Callable[[Choice], float],
    refine: Callable[[Choice], tuple[Choice, ...]],
) -> Choice:
    """The quickest way for `key`, measured now and kept."""
    timed: list[tuple[float, Choice]] = []
    failed: list[str] = []

    def run(choices: Sequence[Choice]) -> None:
        for choice in choices:
            try:
                timed.append((measure(choice), choice))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                failed.append(f"{choice}: {error}")

    run(candidates())
    timed.sort(key=lambda entry: entry[0])
    seen = {choice for _, choice in timed}
    for _, choice in timed[:3]:
        run([finer for finer in refine(choice) if finer not in seen])
    if not timed:
        raise RuntimeError(f"no way to compute {key} works: {'; '.join(failed)}")
    us, best = min(timed, key=lambda entry: entry[0])
    cublas = min((us for us, c in timed if c.way in ("cublas", "whole")), default=None)
    chosen = Choice(best.way, best.variant, best.splits, round(us, 2), cublas and round(cublas, 2))
    kept = table(device.index or 0)
    kept.keep(key, chosen)
    log.debug("%s: %s; %s", key, chosen, kept)
    return chosen


def choose(
    key: Key,
    device: torch.device,
    *,
    weight_bytes: int,
    copies: Callable[[int], Sequence[T]],
    candidates: Callable[[T], tuple[Choice, ...]],
    launches: Callable[[T, Choice, Workspace], Sequence[Launch]],
    refine: Callable[[Choice], tuple[Choice, ...]] = lambda choice: (),
) -> Choice:
    """As `pick`: times the `launches` of `copies`, which makes so many copies of a product with
    `weight_bytes` of weights that none finds its own in L2 when its turn comes. `candidates` are
    the ways for one of the copies.

    Where nothing is kept and nothing can be measured now, the choice is the own kernel, in the way
    that the library picks.
    """
    made: list[T] = []

    def first() -> tuple[Choice, ...]:
        made.extend(copies(rotation(weight_bytes, device)))
        return candidates(made[0])

    def measure(choice: Choice) -> float:
        workspace = Workspace(device)
        return time_products([launches(copy, choice, workspace) for copy in made], device)

    return pick(key, device, first, measure, refine, otherwise=OWN)
