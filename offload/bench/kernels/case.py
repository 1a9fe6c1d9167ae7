"""One measurement of a kernel: what runs, what bounds it, and how it is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from offload.kernels.call import Launchable
from offload.measure.compute import hbm_rates, product_rate

# More than any L2, so that a copy's bytes have left it when its turn comes again.
ROTATION = 1_250_000_000
MOST_COPIES = 512
# A graph runs over the copies so often that the microseconds of its launch do not count.
PASSES = 4
ROUNDS = 9
SETTLE_SECONDS = 0.02

# Peers of this name are measured only where asked: compiling takes longer than measuring.
COMPILED = "compile"


@dataclass
class Case:
    """One op on one shape. `ours(i)` and each peer run it once on copy i of `copies` inputs.

    `bytes` is what must cross HBM at least (each input read once, each output written once), `flop`
    what must be computed. `hbm` names the rate that bounds the bytes: "read" where nearly all of
    them are read, "copy" where as much is written. Nothing may synchronise or allocate on the host:
    all of it is captured in CUDA graphs.
    """

    op: str
    shape: str
    bytes: int
    flop: float
    ours: Callable[[int], Any]
    peers: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    copies: int = 1
    hbm: Literal["read", "copy"] = "copy"


def copies(nbytes: int, device: torch.device | str = "cuda") -> int:
    """How many copies of inputs of `nbytes` fill more than L2; one on a CPU."""
    if torch.device(device).type != "cuda":
        return 1
    return min(MOST_COPIES, max(3, -(-ROTATION // max(1, nbytes))))


def launches(calls: Sequence[Launchable]) -> Callable[[int], None]:
    """A function for `Case.ours` that launches call i on torch's current stream."""

    def launch(i: int) -> None:
        on_gpu = torch.cuda.is_available()
        calls[i].launch(torch.cuda.current_stream().cuda_stream if on_gpu else 0)

    return launch


@dataclass(frozen=True)
class Rates:
    """What the device itself gives, measured by torch: bytes and FLOP per second."""

    read: float  # HBM, by a sum over 2 GiB
    copy: float  # HBM, read + written, the best of torch's ways to copy 1 GiB
    matrix: float  # 8192 x 8192 x 8192 in bfloat16, over seconds

    def bound(self, case: Case) -> float:
        """Seconds that no kernel for `case` can beat."""
        hbm = self.read if case.hbm == "read" else self.copy
        return max(case.bytes / hbm, case.flop / self.matrix)

    @classmethod
    def measure(cls, device: torch.device, matrix_seconds: float = 5.0) -> Rates:
        """Measure them; `matrix_seconds` of products, since boost clocks do not last."""
        on_gpu = device.type == "cuda"
        read, copied = hbm_rates(device, (2 << 30) if on_gpu else (64 << 20))
        size, long = (8192, matrix_seconds) if on_gpu else (256, 0.0)
        return cls(read, copied, product_rate([(size, size)], size, torch.bfloat16, device, long))


def seconds(
    functions: Sequence[Callable[[int], Any]],
    device: torch.device,
    copies: int = 1,
    rounds: int = ROUNDS,
    passes: int = PASSES,
    settle: float = SETTLE_SECONDS,
) -> list[float]:
    """Median seconds of one call of each function, the functions taking turns.

    On a GPU a function's calls on copies 0 to `copies` - 1, `passes` times over, are one CUDA
    graph, and clocks settle for `settle` seconds first; on a CPU they are plain calls.
    """
    if device.type != "cuda":
        passes, settle = 1, 0.0
    replays = [_replay(function, device, copies, passes) for function in functions]
    for replay in replays:
        elapsed = replay()
        while elapsed < settle:
            elapsed += replay()
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for replay, found in zip(replays, times, strict=True):
            found.append(replay() / (copies * passes))
    return [statistics.median(found) for found in times]


def _replay(
    function: Callable[[int], Any], device: torch.device, copies: int, passes: int
) -> Callable[[], float]:
    """A function that runs all copies `passes` times and returns the seconds it took."""
    if device.type != "cuda":

        def plain() -> float:
            start = time.perf_counter()
            for i in range(copies):
                function(i)
            return time.perf_counter() - start

        return plain

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for i in range(min(2, copies)):  # what a first call allocates or picks is not captured
            function(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(passes):
            for i in range(copies):
                function(i)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return replay


@dataclass
class Measured:
    """What one way to run a case reached."""

    op: str
    shape: str
    way: str  # "ours" or the peer's name
    seconds: float | None
    bound: float  # seconds
    bytes: int
    flop: float
    error: str = ""

    @property
    def share(self) -> float | None:
        """Of the bound: 1 is as fast as the device can."""
        return self.bound / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """All figures, the derived one too."""
        return {**vars(self), "share": self.share}


def measure(
    case: Case,
    rates: Rates,
    device: torch.device | str = "cuda",
    *,
    compiled: bool = False,
    rounds: int = ROUNDS,
) -> list[Measured]:
    """Time `case`, ours first; a way that fails has its error and no seconds."""
    device = torch.device(device)
    ways = {"ours": case.ours, **case.peers}
    if not compiled:
        ways = {name: way for name, way in ways.items() if not name.startswith(COMPILED)}
    errors: dict[str, str] = {}
    for name, way in ways.items():
        try:
            way(0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # one peer that fails must not cost the others' figures
            errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    works = {name: way for name, way in ways.items() if name not in errors}
    found: dict[str, float] = {}
    try:
        times = seconds(list(works.values()), device, case.copies, rounds)
        found = dict(zip(works, times, strict=True))
    except Exception:  # some way cannot be captured: each alone, to learn which
        for name, way in works.items():
            try:
                [found[name]] = seconds([way], device, case.copies, rounds)
            except Exception as error:
                errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    bound = rates.bound(case)
    return [
        Measured(
            case.op,
            case.shape,
            name,
            found.get(name),
            bound,
            case.bytes,
            case.flop,
            errors.get(name, ""),
        )
        for name in ways
    ]
