"""Which way to compute a product is quickest on this machine: measured once, kept in a file."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import statistics
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from offload.kernels.call import current_stream
from offload.kernels.library import FILE
from offload.kernels.workspace import Workspace

Launch = Callable[[int], Any]  # on the stream of that number
T = TypeVar("T")
Way = Literal["own", "apart", "cublas", "whole", "rows", "columns"]
SKINNY = ("own", "apart")  # a kernel of the project, for few rows
PIECES = ("whole", "rows", "columns")  # cuBLAS with many rows
WAYS = get_args(Way)
BUCKETS = (1, 2, 4, 8, 16)
# Weights beyond what L2 holds, so that a measured product reads from HBM as a real one does.
ROTATION_OF_L2 = 3
REPEATS = 5
TURNS = 5
TURNS_SECONDS = 0.5

log = logging.getLogger("offload")


@dataclass(frozen=True)
class Key:
    """What decides between the ways. `rows` is a bucket: of `BUCKETS`, or for many rows a power of
    two. The others say what stands around the product: the kind of norm before it, an activation,
    a residual sum after it; `early` whether it begins before the kernel ahead of it has ended. Of
    many rows only `transposed` and `bias` count, as the rest is not part of the product there."""

    dtype: str
    outputs: int
    depth: int
    rows: int
    gated: bool = False
    norm: str = ""
    activation: bool = False
    residual: bool = False
    early: bool = False
    transposed: bool = False
    bias: bool = False
    form: str = ""

    def __str__(self) -> str:
        flags = ("gated", "norm", "activation", "residual", "early", "transposed", "bias")
        named = [
            f"{self.norm}_norm" if flag == "norm" else flag for flag in flags if getattr(self, flag)
        ]
        return " ".join(
            [
                self.dtype,
                *filter(None, [self.form]),
                f"N{self.outputs}",
                f"K{self.depth}",
                f"rows{self.rows}",
                *named,
            ]
        )


@dataclass(frozen=True)
class Choice:
    """ "own": QuantGemm, or SkinnyGemm with its variant and splits; "apart": the latter with the
    norm in a kernel before it; "cublas": torch's product, the rest in kernels around it. Of torch's
    products with many rows: "whole", or in `splits` pieces of the "rows" or of the outputs,
    "columns".
    """

    way: Way
    variant: int = 0
    splits: int = 0
    us: float | None = None  # as measured
    cublas_us: float | None = None

    @classmethod
    def parse(cls, entry: Any) -> Choice:
        """The choice of a file's entry; raises ValueError for what is none."""
        if not isinstance(entry, dict) or entry.get("way") not in WAYS:
            raise ValueError(f"no choice: {entry!r}")
        variant, splits = entry.get("variant", 0), entry.get("splits", 0)
        for number in (variant, splits):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"no variant or splits: {number!r}")
        us, cublas_us = entry.get("us"), entry.get("cublas_us")
        for time in (us, cublas_us):
            if time is not None and not isinstance(time, (int, float)):
                raise ValueError(f"no time: {time!r}")
        if entry["way"] in ("rows", "columns") and not splits:
            raise ValueError(f"no pieces: {entry!r}")
        return cls(entry["way"], variant, splits, us, cublas_us)


OWN, CUBLAS = Choice("own"), Choice("cublas")


def bucket(rows: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest bucket that holds `rows`, which is at least 1."""
    for most in buckets:
        if rows <= most:
            return most
    raise ValueError(f"rows must be at most {buckets[-1]}, not {rows}")


def cache_path() -> str:
    """The file that holds this user's measurements."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "offload", "kernels.json")


@functools.cache
def build_id(file: Path = FILE) -> str:
    """What tells one build of the kernels library from another; "none" where there is none."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return "none"


class Table:
    """The choices for one GPU, one build of the library and one torch, backed by the user's file.

    Entries of other machines and builds in the file are kept.
    """

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self._choices: dict[str, Choice] = {}
        damaged = 0
        for key, entry in _read().get(machine, {}).items():
            try:
                self._choices[key] = Choice.parse(entry)
            except ValueError:
                damaged += 1
        if damaged:
            warnings.warn(
                f"{damaged} entries of {cache_path()} make no sense; they are measured again",
                stacklevel=2,
            )

    def get(self, key: Key) -> Choice | None:
        """The choice for `key`, if it was measured."""
        return self._choices.get(str(key))

    def keep(self, key: Key, choice: Choice) -> None:
        """Remember a choice, in the file too; a file that cannot be written costs a warning."""
        self._choices[str(key)] = choice
        try:
            _write(self.machine, {str(key): asdict(choice)})
        except OSError as error:
            warnings.warn(
                f"the kernels' measurements are not kept: {error}; they are repeated next time",
                stacklevel=2,
            )

    def won(self) -> tuple[int, int]:
        """How many of the measured products of few rows an own kernel computes, and how many there
        are."""
        few = [
            choice.way in SKINNY for choice in self._choices.values() if choice.way not in PIECES
        ]
        return sum(few), len(few)

    def cut(self) -> tuple[int, int]:
        """How many of the measured products of many rows run in pieces, and how many there are."""
        many = [choice.way != "whole" for choice in self._choices.values() if choice.way in PIECES]
        return sum(many), len(many)

    def __str__(self) -> str:
        own, measured = self.won()
        share = f" ({own / measured:.0%})" if measured else ""
        text = f"{own} of {measured} measured products{share} run on the own kernel, else cuBLAS"
        pieces, many = self.cut()
        return f"{text}; {pieces} of {many} of many rows in pieces" if many else text


@functools.cache
def table(device: int) -> Table:
    """The table of GPU `device`."""
    name = torch.cuda.get_device_name(device)
    return Table(f"{name}, library {build_id()}, torch {torch.__version__}")


def _read() -> dict[str, dict[str, Any]]:
    path = cache_path()
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read ({error}); it is written anew", stacklevel=3)
        return {}
    if not isinstance(found, dict):
        warnings.warn(f"{path} holds no measurements; it is written anew", stacklevel=3)
        return {}
    return {name: entries for name, entries in found.items() if isinstance(entries, dict)}


def _write(machine: str, entries: dict[str, Any]) -> None:
    path = cache_path()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was said when the table was read
        found = _read()
    found.setdefault(machine, {}).update(entries)
    # Written beside and renamed: another process may be reading it.
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def rotation(nbytes: int, device: torch.device) -> int:
    """How many weights of `nbytes` it takes to measure one that is not in L2."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(64, max(2, -(-ROTATION_OF_L2 * l2 // max(1, nbytes))))


_measuring = threading.Lock()  # what another thread issued meanwhile would be captured, too


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all measurements: for every stream that cuBLAS was used on, torch keeps a workspace
    (32 MiB on Hopper) until the process ends.
    """
    return torch.cuda.Stream(device)


def time_products(products: Sequence[Sequence[Launch]], device: torch.device) -> float:
    """Median microseconds of one of `products`, each some launches, which run one after another in
    a CUDA graph.
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

    They take turns, so that clocks which fall meanwhile fall for all. Only as many of them are
    tried as `seconds` allow for, should each take as long as the first, but that one always is.
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
    """As `pick`, timing the `launches` of `copies`, so many of a product with `weight_bytes` of
    weights that none finds its own in L2 when its turn comes; `candidates` are seen from one.

    Where nothing is kept and nothing can be measured now, the own kernel, by the library's guess.
    """
    made: list[T] = []

    def first() -> tuple[Choice, ...]:
        made.extend(copies(rotation(weight_bytes, device)))
        return candidates(made[0])

    def measure(choice: Choice) -> float:
        workspace = Workspace(device)
        return time_products([launches(copy, choice, workspace) for copy in made], device)

    return pick(key, device, first, measure, refine, otherwise=OWN)
