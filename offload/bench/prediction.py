"""Plans beside what they become: predicted and achieved times, and whether another was better."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from offload.bench.memory import gpu_limit, gpu_peaks, reset_peaks
from offload.bench.subject import Subject
from offload.bench.table import format_table
from offload.bench.workload import Workload, measure
from offload.config import OffloadConfig
from offload.models.quantized.wanted import Wishes
from offload.scheduler.estimate import Estimate
from offload.scheduler.setting import Goal

GIB = 1 << 30
GENERATIONS = 3  # at least; the first allocates
MOST_GENERATIONS, SECONDS = 40, 2.0  # short jobs are run often: a moment's disturbance is long then


@dataclass(frozen=True, slots=True)
class Case:
    """One plan to make and run; `batch` None lets it choose. Cases of one `group` are the same job
    on the same machine, of which the one that chose should be no slower than the others.
    """

    shape: str
    layers: int  # of the shape: fewer take less time to make
    weights: str | None  # quantised to; None: 16 bits (32 on a CPU)
    gpu_memory: int | None
    cpu_memory: int
    batch: int | None

    @property
    def group(self) -> str:
        """What cases have in common."""
        cap = f"{self.gpu_memory / GIB:g} GiB" if self.gpu_memory else "no cap"
        return f"{self.shape} x {self.layers} {self.weights or 'plain'}, {cap}"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.group}, batch {self.batch or 'chosen'}"


def _group(
    shape: str,
    layers: int,
    weights: str | None,
    gpu: float | None,
    cpu: float,
    batches: Sequence[int | None],
) -> list[Case]:
    cap = None if gpu is None else int(gpu * GIB)
    return [Case(shape, layers, weights, cap, int(cpu * GIB), batch) for batch in batches]


# Layers wholly in GPU memory, streamed, half of each; few sequences and as many as give most. Those
# whose cores attend come last: behind it, the cores' clock is low for many seconds.
GPU_CASES = (
    *_group("opt-6.7b", 16, None, None, 16, (64, 1)),
    *_group("llama-2-13b", 20, "int4", None, 12, (32, 1)),
    *_group("opt-13b", 10, None, 6, 16, (None, 120, 64, 24, 1)),
    *_group("llama-2-13b", 20, "int4", 4, 12, (None, 40, 1)),
)
CPU_CASES = (
    *_group("tiny", 4, None, None, 1, (4, 1)),
    *_group("tiny-deep", 8, None, 0.006, 0.01, (None, 4, 1)),  # four prompts beside one layer
)


@dataclass(slots=True)
class Row:
    """One case. Seconds, bytes; None where the plan did not run, for `problem`."""

    case: Case
    problem: str = ""
    layers: tuple[int, int, int] = (0, 0, 0)  # on the GPU, in CPU memory, in files
    batch: int = 0
    on_cpu: int = 0  # sequences with keys and values in CPU memory
    limit: str = ""
    prefill: tuple[float, float] | None = None  # predicted, achieved
    step: tuple[float, float] | None = None
    rate: tuple[float, float] | None = None  # tokens a second of the whole
    gpu: tuple[int, int] | None = None  # bytes that the plan counts, and PyTorch's peak
    seconds: float = 0.0  # that the case took
    pictures: list[str] = field(default_factory=list)  # of both passes, where they were asked for

    @property
    def errors(self) -> list[float]:
        """Of prefill and step, relative to what was achieved."""
        return [a / b - 1 for a, b in filter(None, (self.prefill, self.step))]

    def cells(self) -> tuple[str, ...]:
        """The columns of `_HEAD`."""
        if self.problem:
            return (self.case.name, self.problem, *("" for _ in _HEAD[2:]))
        return (
            self.case.name,
            " / ".join(map(str, self.layers)),
            f"{self.batch} ({self.on_cpu})",
            *_pair(self.prefill, 1.0),
            *_pair(self.step, 1e3),
            *_pair(self.rate, 1.0)[:2],
            "-" if self.gpu is None else f"{self.gpu[0] / GIB:.2f}",
            "-" if self.gpu is None else f"{self.gpu[1] / GIB:.2f}",
            self.limit,
            f"{self.seconds:.1f}",
        )


_HEAD = (
    "setting",
    "GPU/CPU/NVMe",
    "batch (KV on CPU)",
    "prefill s",
    "achieved",
    "error",
    "step ms",
    "achieved",
    "error",
    "tok/s",
    "achieved",
    "GPU GiB",
    "peak",
    "limit",
    "took s",
)


@dataclass
class Predictions:
    """All rows of one run."""

    prompt: int
    gen: int
    device: str
    rates: str  # where they are from
    rows: list[Row] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """Of every prefill and step that ran."""
        return [error for row in self.rows for error in row.errors]

    def choices(self) -> dict[str, tuple[float, float]]:
        """By group: tokens a second of the batch that the plan chose, and of the best tried."""
        found: dict[str, tuple[float, float]] = {}
        for row in self.rows:
            if row.case.batch is None and row.rate is not None:
                rates = [r.rate[1] for r in self.rows if r.case.group == row.case.group and r.rate]
                found[row.case.group] = (row.rate[1], max(rates))
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        errors = [abs(error) for error in self.errors]
        return {
            **asdict(self),
            "mean_error": statistics.fmean(errors) if errors else None,
            "worst_error": max(errors, default=None),
            "choices": {group: list(rates) for group, rates in self.choices().items()},
        }

    def __str__(self) -> str:
        lines = [
            f"plans of {self.prompt} + {self.gen} tokens on {self.device}; rates: {self.rates}",
            "",
            *format_table([_HEAD, *(row.cells() for row in self.rows)]),
            "",
        ]
        errors = [abs(error) for error in self.errors]
        if errors:
            lines.append(
                f"error of {len(errors)} times: mean {statistics.fmean(errors):.1%}, worst "
                f"{max(errors):.1%}"
            )
        lines += [
            f"{group}: the batch that was chosen gives {chosen / best:.1%} of the best tried"
            for group, (chosen, best) in self.choices().items()
        ]
        return "\n".join(lines)


def measure_predictions(
    cases: Sequence[Case],
    device: torch.device,
    prompt: int,
    gen: int,
    rates: str,
    say: Callable[[str], None] = lambda line: None,
    pictures: bool = False,
) -> Predictions:
    """Plan and run every case, one after the other; with `pictures` each reads its prompts and
    makes some tokens more under a trace.
    """
    result = Predictions(prompt, gen, _name(device), rates)
    for case in cases:
        start = time.perf_counter()
        row = Row(case)
        try:
            _run(row, device, prompt, gen, pictures)
        except Exception as error:  # the other cases are worth having, whatever it was
            row.problem = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        row.seconds = time.perf_counter() - start
        result.rows.append(row)
        say("\n    ".join(["  ".join(cell for cell in row.cells() if cell), *row.pictures]))
    return result


def _run(row: Row, device: torch.device, prompt: int, gen: int, pictures: bool) -> None:
    case = row.case
    wishes = None if case.weights is None else Wishes.of(case.weights)
    subject = Subject(case.shape, None, None, device, wishes, case.layers)
    limits: dict[int | str, int] = {"cpu": case.cpu_memory}
    if case.gpu_memory is not None:
        limits[device.index or 0] = case.gpu_memory
    goal = Goal.THROUGHPUT if case.batch is None else Goal.LATENCY
    config = OffloadConfig(
        max_memory=limits,
        device=device,
        batch_size=case.batch or 1,
        goal=goal.value,
        prompt_len=prompt,
        gen_len=gen,
        choose_batch=case.batch is None,
    )
    reset_peaks(device)
    with gpu_limit(device, case.gpu_memory):
        model: Any = subject.offloaded(config)
        with model:
            model.offload.wait_loaded()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # of what made random weights
            found = model.offload.planned.choice
            how = found.setting
            work = Workload(how.batch, prompt, gen, _generations(found.seconds))
            parts = how.micro_batch if how.micro_batch < how.batch else None
            timing = measure(model, work, device, parts)
            peak = gpu_peaks(device)[0]
            if pictures:
                row.pictures = _pictures(model, work, found, device)
    row.layers = (how.resident, how.cpu, how.nvme)
    row.batch, row.on_cpu, row.limit = how.batch, how.cpu_sequences, found.limit
    # The quickest of those behind the first: whatever else the machine does only adds to it.
    row.prefill = (found.prefill_seconds, min(timing.prefills[1:]))
    if timing.step is not None:
        row.step = (found.decode.seconds, timing.step)
    row.rate = (found.rate, how.batch * gen / min(timing.totals[1:]))
    row.gpu = (found.memory.device, peak) if device.type == "cuda" else None


def _generations(seconds: float) -> int:
    """How often to run a job that is predicted to take so long."""
    return max(GENERATIONS, min(MOST_GENERATIONS, math.ceil(SECONDS / seconds)))


def _pictures(model: Any, work: Workload, found: Estimate, device: torch.device) -> list[str]:
    """A page of the prefill, and one of the median decode step of some."""
    ids = work.prompts(model.config.get_text_config(decoder=True).vocab_size, device)
    lines = []
    # With a prefill and three steps, the median is a step.
    for name, tokens, predicted in (("prefill", 1, found.prefill), ("step", 4, found.decode)):
        with model.offload.trace():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        picture = model.offload.report().picture
        busy = {**predicted.busy, "compute": predicted.compute, "pass": predicted.seconds}
        lines += [f"{name}: {line}" for line in picture.lines(busy)]
    return lines


def _pair(found: tuple[float, float] | None, scale: float) -> tuple[str, str, str]:
    if found is None:
        return "-", "-", "-"
    predicted, achieved = (f"{value * scale:.4g}" for value in found)
    return predicted, achieved, f"{found[0] / found[1] - 1:+.1%}"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
