"""What streaming costs in Python for each layer, shown by layers that cost nothing else."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from offload.bench.bounds import copy_rates
from offload.bench.result import machine
from offload.bench.setup import Setup
from offload.bench.subject import Sizes, Subject
from offload.bench.workload import Clock, Workload
from offload.sizes import format_size

FORWARDS, ROUNDS, WARM_UP = 10, 9, 5


@dataclass(frozen=True)
class Overhead:
    """Seconds of one forward of one token, and what follows from them for a layer."""

    model: str
    layers: int
    layer_bytes: int  # of one layer
    streamed_seconds: float
    resident_seconds: float
    link_rate: float
    machine: dict[str, Any]

    @property
    def layer_seconds(self) -> float:
        """What streaming adds to each layer."""
        return (self.streamed_seconds - self.resident_seconds) / self.layers

    @property
    def link_bound_bytes(self) -> float:
        """The layer from which the link is the limit: its copy takes as long as its Python."""
        return self.link_rate * self.streamed_seconds / self.layers

    def as_dict(self) -> dict[str, Any]:
        """All figures, the derived ones too."""
        derived = {"layer_seconds": self.layer_seconds, "link_bound_bytes": self.link_bound_bytes}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.layers} layers of {format_size(self.layer_bytes)}, one token: "
            f"{self.streamed_seconds / self.layers * 1e6:.1f} us a layer streamed, "
            f"{self.resident_seconds / self.layers * 1e6:.1f} us wholly resident, so streaming "
            f"adds {self.layer_seconds * 1e6:.1f} us a layer\n"
            f"at {self.link_rate / 1e9:.2f} GB/s the link is the limit from layers of "
            f"{format_size(int(self.link_bound_bytes))} on"
        )


def measure_overhead(subject: Subject, setup: Setup) -> Overhead:
    """Forwards of one token: streamed from CPU memory, then plain transformers, resident."""
    device = subject.device
    sizes = Sizes.of(subject.build())
    streamed: Any = subject.offloaded(setup.config(subject, Workload(1, 1, 1)))
    with streamed:
        streamed_seconds = _forward_seconds(streamed, device)
    return Overhead(
        model=subject.name,
        layers=sizes.layers,
        layer_bytes=sizes.layer_bytes // sizes.layers,
        streamed_seconds=streamed_seconds,
        resident_seconds=_forward_seconds(subject.plain(device), device),
        link_rate=statistics.median(copy_rates(device)),
        machine=machine(device),
    )


def _forward_seconds(model: Any, device: torch.device) -> float:
    """Median over rounds; the host is timed, since it is what limits."""
    clock = Clock(device)
    ids = torch.ones(1, 1, dtype=torch.long, device=device)
    seconds = []
    with torch.no_grad():
        for _ in range(WARM_UP):
            model(ids, use_cache=False)
        for _ in range(ROUNDS):
            clock.synchronize()
            start = time.perf_counter()
            for _ in range(FORWARDS):
                model(ids, use_cache=False)
            clock.synchronize()
            seconds.append((time.perf_counter() - start) / FORWARDS)
    return statistics.median(seconds)
