"""Runs the kernels' measurements and says what came out."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

import torch

from offload.bench import kernels
from offload.bench.kernels.case import Case, Measured, Rates, measure
from offload.bench.result import machine
from offload.bench.table import format_table, number
from offload.kernels import choices, why_not
from offload.kernels.call import on_device

_HEAD = ("op", "shape", "us", "GB/s", "TFLOP/s", "of bound", "beside")


@dataclass(frozen=True)
class Wanted:
    """What to measure: op names (none: all), parts of a shape's name that must all be in it."""

    device: torch.device
    ops: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    quick: bool = False
    compiled: bool = False

    def shape(self, name: str) -> bool:
        return all(part in name for part in self.shapes)


def modules() -> dict[str, ModuleType]:
    """The modules with `cases`, by name."""
    found = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        if hasattr(module, "cases"):
            found[info.name] = module
    return found


def ops_of(module: Any) -> tuple[str, ...]:
    """The ops of a module's cases: its OPS, or its OP where that is the only one."""
    return getattr(module, "OPS", None) or (module.OP,)


@dataclass
class KernelsResult:
    """What was measured, and the rates of the same run."""

    rates: Rates
    machine: dict[str, Any]
    rows: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a kernel of ours did not run."""
        return any(row.error for row in self.rows if row.way == "ours")

    def as_dict(self) -> dict[str, Any]:
        """All of it, in plain types."""
        return {
            "machine": self.machine,
            "rates": asdict(self.rates),
            "rows": [row.as_dict() for row in self.rows],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [heading(self.rates, self.machine), ""]
        lines += format_table([_HEAD, *_cells(self.rows)]) if self.rows else ["nothing to measure"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def heading(rates: Rates, facts: dict[str, Any]) -> str:
    """What the figures belong to, and what bounds them."""
    where = facts["gpu"] or f"{facts['cpu_count']} CPU cores"
    return (
        f"{where}, torch {facts['torch']}; bounds: HBM read {rates.read / 1e12:.3g} TB/s, copy "
        f"{rates.copy / 1e12:.3g} TB/s (read + written), matrix {rates.matrix / 1e12:.3g} TFLOP/s"
    )


def _cells(rows: list[Measured]) -> Iterator[tuple[str, ...]]:
    """A line a case: ours, and the peers' times with how much longer they take."""
    grouped: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        grouped.setdefault((row.op, row.shape), []).append(row)
    for (op, shape), ways in grouped.items():
        ours, peers = ways[0], ways[1:]
        beside = []
        for peer in peers:
            if peer.seconds is None:
                beside.append(f"{peer.way} failed: {peer.error[:60]}")
                continue
            ratio = f" ({peer.seconds / ours.seconds:.2f}x)" if ours.seconds else ""
            beside.append(f"{peer.way} {peer.seconds * 1e6:.4g}{ratio}")
        if ours.seconds is None:
            yield op, shape, "failed", "-", "-", "-", ours.error[:100]
            continue
        yield (
            op,
            shape,
            f"{ours.seconds * 1e6:.4g}",
            number(ours.bytes / ours.seconds, 1e9),
            number(ours.flop / ours.seconds, 1e12),
            f"{ours.bound / ours.seconds:.3f}",
            ", ".join(beside),
        )


def run_kernels(wanted: Wanted, say: Callable[[str], None] = lambda line: None) -> KernelsResult:
    """Measure what is wanted; `say` hears of every case as it is done.

    Raises ValueError where an op is unknown, the kernels cannot run there, or no case is wanted.
    """
    found = _modules(wanted)
    check_device(wanted.device)
    with on_device(wanted.device):
        rates = Rates.measure(wanted.device, 1.0 if wanted.quick else 5.0)
        result = KernelsResult(rates, machine(wanted.device))
        say(heading(rates, result.machine))
        for name, module in found.items():
            try:
                for case in module.cases(wanted.device, wanted.quick):
                    _one(case, name, wanted, result, say)
            except Exception as error:  # the other ops' figures still count
                text = " ".join(f"{type(error).__name__}: {error}".split())
                result.rows.append(Measured(name, "all others", "ours", None, 0.0, 0, 0.0, text))
                say(f"{name}: {text}")
    if wanted.shapes and not result.rows:
        asked = " and ".join(map(repr, wanted.shapes))
        raise ValueError(f"no case has {asked} in the name of its shape")
    if wanted.device.type == "cuda":
        result.notes.append(str(choices.table(wanted.device.index or 0)))
    else:
        result.notes.append("on a CPU every kernel is its reference: no figure is a kernel's")
    return result


def _one(
    case: Case, module: str, wanted: Wanted, result: KernelsResult, say: Callable[[str], None]
) -> None:
    if wanted.ops and not {case.op, module} & set(wanted.ops):
        return
    if not wanted.shape(case.shape):
        return
    rows = measure(case, result.rates, wanted.device, compiled=wanted.compiled)
    result.rows += rows
    say("  ".join(next(_cells(rows))))


def _modules(wanted: Wanted) -> dict[str, ModuleType]:
    """Those that are wanted, or have cases of a wanted op."""
    found = modules()
    names = {name: {name, *ops_of(module)} for name, module in found.items()}
    known = set().union(*names.values())
    strangers = [op for op in wanted.ops if op not in known]
    if strangers:
        there = ", ".join(sorted(known))
        raise ValueError(f"no kernel is called {strangers[0]!r}; there are {there}")
    return {
        name: module
        for name, module in found.items()
        if not wanted.ops or names[name] & set(wanted.ops)
    }


def check_device(device: torch.device) -> None:
    """Refuse a GPU that cannot run the kernels, saying why; a CPU runs their references."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ValueError(f"kernels run on CUDA devices, or as references on a CPU, not {device}")
    problem = why_not(device.index)
    if problem:
        raise ValueError(
            f"the kernels cannot run on {device}: {problem}. Their references run with --device cpu"
        )
