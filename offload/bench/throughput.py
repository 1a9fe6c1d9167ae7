"""Throughput of one workload: under offload and under its peers, in one process, on the same
weights.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offload.bench.bounds import copy_rates, read_rate
from offload.bench.files import weight_files
from offload.bench.memory import gpu_limit, gpu_peaks, host_peak, reset_peaks
from offload.bench.notes import (
    beside_one_batch,
    cpu_notes,
    device_bounds,
    kept_notes,
    plan_notes,
    streamed_notes,
)
from offload.bench.peers import PEERS, Peer
from offload.bench.result import Peaks, Result, Row, machine
from offload.bench.setup import Setup
from offload.bench.subject import Subject
from offload.bench.workload import Timing, Workload, activation_bytes, measure
from offload.kernels.choices import dtype_name
from offload.scheduler.cost import Rates, predict_pass


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
            result.notes += device_bounds(result, subject.device)
    resident = timings.get("resident")
    for row in result.rows:
        if resident is not None and row.peer != "resident":
            row.equal = timings[row.peer].compared_with(resident)
            share = resident.prefill / row.prefill_seconds
            result.notes.append(f"{row.peer}: prefill at {share:.1%} of the resident model's speed")
    return result


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
    sizes = subject.sizes_for(work)
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
            if planned is not None:
                how = planned.choice.setting
                sizes_of_batches["offload"] = (
                    how.micro_batch if how.micro_batch < how.batch else None
                )
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
        dtype=dtype_name(model.dtype),
        gpu_memory=setup.gpu_memory,
        link_rates=links,
        disk_rates=disks,
        link_rate=statistics.median(links),
        disk_rate=rates.disk,
        placement=str(report),
        machine=machine(device),
    )
    where, bound = setup.where, predict_pass(plan, rates)
    for name, (timing, peaks, activations) in found.items():
        row = Row.of(name, where, timing, sizes, work, peaks, load, plan.streamed_bytes, bound)
        row.activation_bytes = activations
        result.rows.append(row)
    result.notes += plan_notes(result.rows[0], planned)
    result.notes += cpu_notes(result.rows[0], cpu_work)
    result.notes += streamed_notes(result.rows[0], streamed_kv, rates)
    result.notes += kept_notes(plan, setup)
    timings = {name: timing for name, (timing, _, _) in found.items()}
    for name in setup.micro_batches:
        result.notes += beside_one_batch(result, timings, name)
    return result, timings


def _time_batches(
    model: Any,
    work: Workload,
    setup: Setup,
    device: torch.device,
    sizes: Mapping[str, int | None],
) -> dict[str, tuple[Timing, Peaks, int | None]]:
    """By the name of its row, each way to run the batch: how long it took, what memory it took, and
    bytes of activations where asked for. `sizes`: sequences of a micro-batch; None: one batch. The
    last way is what the others are measured for, and the one that is traced.
    """
    found: dict[str, tuple[Timing, Peaks, int | None]] = {}
    for name, size in sizes.items():
        if found:
            reset_peaks(device)
        traced = setup.trace if len(found) == len(sizes) - 1 else None
        with model.offload.trace(traced) if traced else contextlib.nullcontext():
            timing = measure(model, work, device, size)
        peaks = Peaks(*gpu_peaks(device), host_peak())
        activations = None
        if setup.micro_batch is not None:
            activations = activation_bytes(model, work, device, size)
        found[name] = timing, peaks, activations
    return found


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
    where = setup.where if peer.streams else "resident"
    return Row.of(peer.name, where, timing, sizes, work, peaks, load, streamed, bound), timing
