"""Throughput of one workload: under offload and under its peers, in one process, on the same
weights.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.bench.bounds import copy_rates, read_rate
from offload.bench.files import weight_files
from offload.bench.memory import gpu_limit, gpu_peaks, host_peak, reset_peaks
from offload.bench.peers import PEERS, Peer
from offload.bench.result import Peaks, Result, Row, machine
from offload.bench.subject import Sizes, Subject
from offload.bench.workload import FIRST_STEPS, Timing, Workload, activation_bytes, measure
from offload.config import OffloadConfig
from offload.measure.compute import hbm_rates, product_rate
from offload.models.fused.host_rows import CpuWork
from offload.models.kv.streamed_kv import StreamedWork
from offload.scheduler.cost import Rates, predict_pass
from offload.scheduler.plan import Plan, Tier
from offload.scheduler.planner import Planned
from offload.sizes import format_size


@dataclass(frozen=True)
class Setup:
    """Where weights rest and what may be used; the names are those of `offload.run`."""

    device_map: str | dict[str, Any] = "cpu"  # or "resident": every layer on the compute device
    gpu_memory: int | None = None
    cpu_memory: int | None = None
    prefetch: int | None = None
    folder: str | None = None  # for a random checkpoint
    keep: bool = False
    peers: tuple[str, ...] = ()
    engine: str = "auto"
    kv_on_cpu: int = 0  # sequences of the batch
    kv_dtype: str = "auto"  # of their keys and values
    kv_attention: str = "auto"  # who attends to them
    trace: str | None = None  # a file, for what offload does
    micro_batch: int | None = None  # sequences of each, measured beside one batch of all
    goal: str | None = None  # what is planned for, with the device map "auto"
    choose_batch: bool = False  # the plan says how many sequences run at once

    def __post_init__(self) -> None:
        unknown = [peer for peer in self.peers if peer not in PEERS]
        if unknown:
            raise ValueError(f"peer {unknown[0]!r} is not known; choose of {', '.join(PEERS)}")

    @property
    def micro_batches(self) -> dict[str, int]:
        """The size that was asked for, by the name of its row."""
        if self.micro_batch is None:
            return {}
        return {f"offload-micro-{self.micro_batch}": self.micro_batch}

    @property
    def reads_files(self) -> bool:
        """Whether every layer is read from a checkpoint in every pass."""
        return self.device_map in ("nvme", "disk")

    def config(self, subject: Subject, work: Workload) -> OffloadConfig:
        """What `offload.run` would be asked for."""
        limits: dict[int | str, int] = {}
        if self.gpu_memory is not None and subject.device.type == "cuda":
            limits[subject.device.index or 0] = self.gpu_memory
        if self.cpu_memory is not None:
            limits["cpu"] = self.cpu_memory
        lengths: dict[str, Any] = {"max_length": work.prompt + work.gen}
        if self.goal is not None:
            lengths = {"goal": self.goal, "prompt_len": work.prompt, "gen_len": work.gen}
            lengths["choose_batch"] = self.choose_batch
        return OffloadConfig(
            device_map={"": 0} if self.device_map == "resident" else self.device_map,
            max_memory=limits or None,
            offload_folder=self.folder,
            dtype=subject.dtype or "auto",
            engine=self.engine,
            device=subject.device,
            prefetch=self.prefetch,
            batch_size=work.batch,
            kv_on_cpu=self.kv_on_cpu,
            kv_dtype=self.kv_dtype,
            kv_attention=self.kv_attention,
            **lengths,
        )


def run_throughput(subject: Subject, work: Workload, setup: Setup) -> Result:
    """Measure offload, then every peer that was asked for."""
    with _stored(subject, setup) as stored:
        result, timings = _measure_offload(stored, work, setup)
        result.model = subject.name
        for name in setup.peers:
            try:
                row, timings[name] = _measure_peer(PEERS[name], stored, result, setup)
                result.rows.append(row)
            except (torch.OutOfMemoryError, MemoryError) as error:
                result.notes.append(f"{name}: does not fit ({str(error).splitlines()[0]})")
        if subject.device.type == "cuda":
            result.notes += _device_bounds(result, subject.device)
    resident = timings.get("resident")
    for row in result.rows:
        if resident is not None and row.peer != "resident":
            row.equal = _compare(timings[row.peer], resident)
            share = resident.prefill / row.prefill_seconds
            result.notes.append(f"{row.peer}: prefill at {share:.1%} of the resident model's speed")
    return result


def _device_bounds(result: Result, device: torch.device) -> list[str]:
    """What each prefill is of the layers' own products, and each resident step of HBM's rate."""
    work, sizes = result.work, result.sizes
    notes = []
    if sizes.products and sizes.active_parameters == sizes.layer_parameters:
        dtype = getattr(torch, result.dtype)
        rate = product_rate(sizes.products, work.batch * work.prompt, dtype, device)
        notes.append(
            f"the products of a layer alone, {work.batch * work.prompt} rows, over 5 s: "
            f"{rate / 1e12:.0f} TFLOP/s; prefills reach "
            + ", ".join(f"{row.prefill_flops / rate:.3f} ({row.peer})" for row in result.rows)
        )
    still = [row for row in result.rows if not row.streamed_bytes and row.step_seconds]
    if still:
        hbm, _ = hbm_rates(device, 2 << 30)
        notes.append(
            f"HBM reads {hbm / 1e12:.2f} TB/s; the weights that a step reads (layers, norms, head; "
            f"of embeddings a row: {sizes.step_bytes / 1e9:.3f} GB) over a step's time: "
            + ", ".join(
                f"{sizes.step_bytes / (row.step_seconds or 1) / hbm:.3f} ({row.peer})"
                for row in still
            )
        )
        notes.append(
            f"steps are medians without the first {FIRST_STEPS} of a generation, in which calls "
            "are made and graphs captured; means with them: "
            + ", ".join(
                f"{(row.mean_step_seconds or 0) * 1e3:.3f} ms ({row.peer})" for row in still
            )
        )
    return notes


@contextlib.contextmanager
def _stored(subject: Subject, setup: Setup) -> Iterator[Subject]:
    """The subject as a folder where files are what is measured."""
    if not setup.reads_files:
        yield subject
        return
    with subject.on_disk(setup.folder, setup.keep) as stored:
        yield stored


def _measure_offload(
    subject: Subject, work: Workload, setup: Setup
) -> tuple[Result, dict[str, Timing]]:
    """The result with a row of one batch and, where asked for, one of micro-batches; and the
    timings of each.
    """
    device = subject.device
    sizes = Sizes.of(subject.build())
    files: Sequence[Path] = weight_files(Path(subject.folder or "")) if setup.reads_files else ()
    links = copy_rates(device)
    disks = [read_rate(files)] if files else []
    reset_peaks(device)
    sizes_of_batches = {"offload": None, **setup.micro_batches}
    with gpu_limit(device, setup.gpu_memory):
        start = time.perf_counter()
        model: Any = subject.offloaded(setup.config(subject, work))
        load = time.perf_counter() - start
        with model:
            planned = model.offload.planned
            if setup.choose_batch:
                work = replace(work, batch=planned.choice.setting.batch)
            if planned is not None and planned.choice.setting.decode_micro_batches > 1:
                sizes_of_batches["offload"] = planned.choice.setting.micro_batch
            found = _time_batches(model, work, setup, device, sizes_of_batches)
            report, plan = model.offload.report(), model.offload.plan
            cpu_work, streamed_kv = model.offload.cpu_work, model.offload.streamed_kv
            disks += [read_rate(files)] if files else []
            links += copy_rates(device)
    rates = Rates(
        link=statistics.median(links), disk=statistics.median(disks) if disks else report.rates.disk
    )
    result = Result(
        model=subject.name,
        sizes=sizes,
        work=work,
        dtype=str(model.dtype).removeprefix("torch."),
        gpu_memory=setup.gpu_memory,
        link_rates=links,
        disk_rates=disks,
        link_rate=statistics.median(links),
        disk_rate=rates.disk,
        placement=str(report),
        machine=machine(device),
    )
    where, bound = _where(setup), predict_pass(plan, rates)
    for name, (timing, peaks, activations) in found.items():
        row = Row.of(name, where, timing, sizes, work, peaks, load, plan.streamed_bytes, bound)
        row.activation_bytes = activations
        result.rows.append(row)
    result.notes += _plan_notes(result.rows[0], planned)
    result.notes += _cpu_notes(result.rows[0], cpu_work)
    result.notes += _streamed_notes(result.rows[0], streamed_kv, rates)
    result.notes += _kept_notes(plan, setup)
    timings = {name: timing for name, (timing, _, _) in found.items()}
    for name in setup.micro_batches:
        result.notes += _beside_one_batch(result, timings, name)
    return result, timings


def _time_batches(
    model: Any,
    work: Workload,
    setup: Setup,
    device: torch.device,
    sizes: Mapping[str, int | None],
) -> dict[str, tuple[Timing, Peaks, int | None]]:
    """By the name of its row, each way to run the batch: how long it took, what memory it took, and
    bytes of activations where asked for. `sizes`: sequences of a micro-batch; None: one batch.
    """
    found: dict[str, tuple[Timing, Peaks, int | None]] = {}
    for name, size in sizes.items():
        if found:
            reset_peaks(device)
        traced = setup.trace if not found else None
        with model.offload.trace(traced) if traced else contextlib.nullcontext():
            timing = measure(model, work, device, size)
        peaks = Peaks(*gpu_peaks(device), host_peak())
        activations = None
        if setup.micro_batch is not None:
            activations = activation_bytes(model, work, device, size)
        found[name] = timing, peaks, activations
    return found


def _beside_one_batch(result: Result, timings: dict[str, Timing], name: str) -> list[str]:
    """What micro-batches cost and save."""
    whole, parts = (next(r for r in result.rows if r.peer == n) for n in ("offload", name))
    one = f"one batch of {result.work.batch}"
    shares = [f"prefill in {parts.prefill_seconds / whole.prefill_seconds:.3f} of the time"]
    if parts.decode_tokens and whole.decode_tokens:
        shares.append(f"decode at {parts.decode_tokens / whole.decode_tokens:.3f} of the rate")
    shares.append(f"all tokens at {parts.total_tokens / whole.total_tokens:.3f} of the rate")
    a, b = parts.activation_bytes or 0, whole.activation_bytes or 1
    return [
        f"{name} beside {one}: {', '.join(shares)}",
        f"{name} beside {one}: {_compare(timings[name], timings['offload'], 'it')}",
        f"activations of a prefill at most: {format_size(a)}, {a / b:.3f} of the "
        f"{format_size(b)} of {one}",
    ]


def _plan_notes(row: Row, planned: Planned | None) -> list[str]:
    """What was predicted, beside what was achieved."""
    if planned is None:
        return []
    found = planned.choice
    pairs = [("prefill", found.prefill_seconds, row.prefill_seconds)]
    if row.step_seconds:
        pairs.append(("a decode step", found.decode.seconds, row.step_seconds))
    return [
        "predicted: "
        + ", ".join(
            f"{name} {predicted:.4g} s ({predicted / achieved - 1:+.1%} of what it took)"
            for name, predicted, achieved in pairs
        )
        + f"; limit: {found.limit}"
    ]


def _cpu_notes(row: Row, work: CpuWork | None) -> list[str]:
    """What of a step CPU cores did, where they did anything."""
    step = None if work is None else work.typical
    if step is None or not row.step_seconds:
        return []
    own = row.step_seconds - step.attention - step.waiting
    return [
        str(work),
        f"of a decode step of {row.step_seconds * 1e3:.1f} ms, cores attended for "
        f"{step.attention / row.step_seconds:.1%}, waited for queries for "
        f"{step.waiting / row.step_seconds:.1%}, and the host was elsewhere for "
        f"{own / row.step_seconds:.1%}",
    ]


def _streamed_notes(row: Row, work: StreamedWork | None, rates: Rates) -> list[str]:
    """What of keys and values came up in a step, and what the link takes for all that does."""
    nbytes = None if work is None else work.typical_bytes
    if nbytes is None or not row.step_seconds or not rates.link:
        return []
    link = (nbytes + row.streamed_bytes) / rates.link
    return [
        str(work),
        f"with the weights that move {format_size(nbytes + row.streamed_bytes)} come up in a step, "
        f"{link * 1e3:.1f} ms at the link's {rates.link / 1e9:.1f} GB/s: "
        f"{link / row.step_seconds:.1%} of a decode step of {row.step_seconds * 1e3:.1f} ms",
    ]


def _kept_notes(plan: Plan, setup: Setup) -> list[str]:
    """What is in CPU memory, and how."""
    notes = []
    if plan.kv_cpu_bytes:  # where the CPU computes, only weights are planned for
        notes.append(
            f"CPU memory: {format_size(plan.weight_bytes(Tier.CPU))} of weights, "
            f"{format_size(plan.kv_cpu_bytes)} kept for keys and values"
        )
    if setup.kv_dtype != "auto":
        kept = setup.kv_dtype
        notes.append(f"keys and values in CPU memory: {kept}, with a scale a token and head")
    return notes


def _measure_peer(peer: Peer, subject: Subject, result: Result, setup: Setup) -> tuple[Row, Timing]:
    device, work, sizes = subject.device, result.work, result.sizes
    reset_peaks(device)
    limit = setup.gpu_memory if peer.capped else None
    start = time.perf_counter()
    with gpu_limit(device, limit), peer.load(subject, setup.reads_files, setup.folder) as model:
        load = time.perf_counter() - start
        timing = measure(model, work, device)
        peaks = Peaks(*gpu_peaks(device), host_peak())
    streamed, bound = 0, None
    if peer.streams:
        streamed = sizes.layer_bytes
        rate = result.disk_rate if setup.reads_files else result.link_rate
        bound = streamed / rate if rate else None
    where = _where(setup) if peer.streams else "resident"
    return Row.of(peer.name, where, timing, sizes, work, peaks, load, streamed, bound), timing


def _where(setup: Setup) -> str:
    if setup.goal is not None:
        return "planned"
    return setup.device_map if isinstance(setup.device_map, str) else "as given"


def _compare(found: Timing, wanted: Timing, to: str = "resident") -> str:
    """Whether two runs computed the same, in words."""
    assert found.tokens is not None and wanted.tokens is not None
    same = int((found.tokens == wanted.tokens).sum())
    tokens = f"{same} of {wanted.tokens.numel()} tokens equal to {to}"
    pairs = list(zip(found.logits, wanted.logits, strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return f"{tokens}, logits equal"
    difference = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
    return f"{tokens}, logits differ by {difference:.3g} at most"
