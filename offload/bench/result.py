"""What a benchmark found, as data."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

from offload.bench.subject import Sizes
from offload.bench.table import format_table, number
from offload.bench.workload import Timing, Workload
from offload.memory_limits import host_memory_total
from offload.sizes import format_size
from offload.version import __version__

_HEAD = (
    "peer",
    "weights",
    "prefill s",
    "TFLOP/s",
    "step s",
    "decode tok/s",
    "total tok/s",
    "GB a pass",
    "GB/s",
    "of bound",
    "GPU GiB",
    "reserved",
    "host GiB",
    "load s",
)


@dataclass(slots=True)
class Peaks:
    """Bytes at most: of PyTorch's allocator on the GPU, and of the process in host memory."""

    gpu_allocated: int
    gpu_reserved: int
    host: int


@dataclass
class Row:
    """What one way to run the model reached. Seconds, bytes, and rates per second."""

    peer: str
    where: str  # the weights of the layers rest
    prefill_seconds: float
    prefill_flops: float
    step_seconds: float | None
    decode_tokens: float | None
    total_tokens: float
    streamed_bytes: int  # a pass
    bound_seconds: float | None  # of a pass: streamed bytes over the rate measured in the same run
    gpu_allocated: int
    gpu_reserved: int
    host_peak: int
    load_seconds: float
    equal: str = ""  # to the resident peer
    activation_bytes: int | None = None  # at most, of a prefill; where micro-batches are compared
    prefills: list[float] = field(default_factory=list)
    mean_step_seconds: float | None = None  # with the first steps, which `step_seconds` leaves out

    @classmethod
    def of(
        cls,
        peer: str,
        where: str,
        timing: Timing,
        sizes: Sizes,
        work: Workload,
        peaks: Peaks,
        load_seconds: float,
        streamed_bytes: int = 0,
        bound_seconds: float | None = None,
    ) -> Row:
        """The row of one measurement."""
        step = timing.step
        return cls(
            peer=peer,
            where=where,
            prefill_seconds=timing.prefill,
            prefill_flops=2 * sizes.active_parameters * work.batch * work.prompt / timing.prefill,
            step_seconds=step,
            decode_tokens=work.batch / step if step else None,
            total_tokens=work.batch * work.gen / timing.total,
            streamed_bytes=streamed_bytes,
            bound_seconds=bound_seconds,
            gpu_allocated=peaks.gpu_allocated,
            gpu_reserved=peaks.gpu_reserved,
            host_peak=peaks.host,
            load_seconds=load_seconds,
            prefills=timing.prefills,
            mean_step_seconds=timing.mean_step,
        )

    @property
    def streamed_rate(self) -> float | None:
        """Bytes per second that a decode step moves."""
        if not self.step_seconds or not self.streamed_bytes:
            return None
        return self.streamed_bytes / self.step_seconds

    @property
    def share_of_bound(self) -> float | None:
        """Of a decode step."""
        if not self.step_seconds or not self.bound_seconds:
            return None
        return self.bound_seconds / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """All figures, the derived ones too."""
        derived = {"streamed_rate": self.streamed_rate, "share_of_bound": self.share_of_bound}
        return {**asdict(self), **derived}

    def cells(self) -> tuple[str, ...]:
        """The columns of `_HEAD`."""
        share = self.share_of_bound
        return (
            self.peer,
            self.where,
            number(self.prefill_seconds),
            number(self.prefill_flops, 1e12),
            number(self.step_seconds),
            number(self.decode_tokens),
            number(self.total_tokens),
            number(self.streamed_bytes, 1e9),
            number(self.streamed_rate, 1e9),
            "-" if share is None else f"{share:.1%}",
            number(self.gpu_allocated, 1 << 30),
            number(self.gpu_reserved, 1 << 30),
            number(self.host_peak, 1 << 30),
            number(self.load_seconds),
        )


@dataclass
class Result:
    """The rows of one run and what they depend on."""

    model: str
    sizes: Sizes
    work: Workload
    dtype: str
    gpu_memory: int | None  # the cap that all but the resident peer were under
    link_rates: list[float]  # pinned copies, before and after
    disk_rates: list[float]  # plain direct reads, before and after
    link_rate: float  # the medians of these
    disk_rate: float | None
    placement: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it, in plain types."""
        return {**asdict(self), "rows": [row.as_dict() for row in self.rows]}

    def __str__(self) -> str:
        """The rows, under what they were measured with and the bound of the same run."""
        work, sizes, m = self.work, self.sizes, self.machine
        where = m["gpu"] or f"{m['cpu_count']} CPU cores"
        cap = f", GPU memory capped at {format_size(self.gpu_memory)}" if self.gpu_memory else ""
        copies = "pinned copies" if m["gpu"] else "copies"
        disk = f", direct reads {self.disk_rate / 1e9:.2f} GB/s" if self.disk_rate else ""
        stored = f", weights {' and '.join(sizes.formats)}" if sizes.formats else ""
        lines = [
            f"{self.model}, {self.dtype}{stored}, batch {work.batch}, prompt {work.prompt}, "
            f"{work.gen} new tokens{cap}; {where}, torch {m['torch']}, transformers "
            f"{m['transformers']}",
            f"{sizes.layers} layers of {format_size(sizes.layer_bytes)} in all, the whole model "
            f"{format_size(sizes.total_bytes)}",
            f"bound: {copies} {self.link_rate / 1e9:.2f} GB/s{disk}",
            "",
            *format_table([_HEAD, *(row.cells() for row in self.rows)]),
        ]
        lines += [f"{row.peer}: {row.equal}" for row in self.rows if row.equal]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware and the versions that figures belong to."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "gpu": gpu,
        "cpu_count": len(os.sched_getaffinity(0)),
        "host_memory": host_memory_total(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "offload": __version__,
    }
