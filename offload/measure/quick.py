"""The rates that a plan cannot do without, in seconds: for a machine that was not measured yet."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload.aio import AioError
from offload.aio.bench.testfile import made
from offload.device import compute_device
from offload.errors import OffloadError
from offload.kernels.call import on_device
from offload.kernels.choices import dtype_name
from offload.kernels.host_library import why_not_host
from offload.measure.beside import beside
from offload.measure.compute import hbm_rates, launch_seconds, product_rate
from offload.measure.exchange import exchange_seconds
from offload.measure.fused import RATES, own_rates, prompt_layer_seconds
from offload.measure.host import HostMemory, attention_rates, read_rate
from offload.measure.link import link_rates
from offload.measure.machine import this_machine
from offload.measure.stream import measure_disk, measure_link
from offload.memory_limits import host_memory_available
from offload.scheduler.hardware import Hardware

DISK_BYTES = 128 << 20
HBM_BYTES = 1 << 30
LINK_BYTES = 32 << 20  # of one copy in CPU memory, where the CPU computes
ROWS = {"cuda": (1, 16, 128, 1024, 8192), "cpu": (1, 16, 128)}
WIDTH = {"cuda": 8192, "cpu": 512}
HOST_BYTES, HOST_SECONDS, BESIDE_SECONDS = 1 << 30, 0.3, 0.6
GROUPS = (1, 8)  # queries a KV head
FEW_ROWS = (1, 16, 64)
SECONDS, LONGER = 0.1, 1.0  # of products of one number of rows


@functools.lru_cache(maxsize=8)
def quick_hardware(
    device: torch.device, dtype: torch.dtype, files: Sequence[str], folder: Path
) -> Hardware:
    """Link, memory, products of `dtype`, launches and disk, and beside a GPU attention on the CPU.
    Measured once a process.

    Reads are of `files`, or of a test file in `folder` where there are none.
    """
    with on_device(device):
        return _measured(device, dtype, files, folder)


def _measured(
    device: torch.device, dtype: torch.dtype, files: Sequence[str], folder: Path
) -> Hardware:
    kind = device.type
    rates: dict[str, Any] = {}
    absent = {"cpu_attention": "no GPU: the CPU computes anyhow"}
    if kind == "cuda":
        absent = {}
        # Ahead of what keeps all cores busy: their clock is low for many seconds behind it.
        rates["launch"] = launch_seconds(device)
        try:
            rates["prompt_layer"] = prompt_layer_seconds(device)
        except (OffloadError, RuntimeError) as error:
            absent["prompt_layer"] = str(error)
    width = WIDTH[kind]
    # Most rows first, and longer: boost clocks do not last.
    seconds = [LONGER, *(SECONDS for _ in ROWS[kind][1:])]
    curve = [
        (rows, product_rate([(width, width)], rows, dtype, device, time))
        for rows, time in zip(reversed(ROWS[kind]), seconds, strict=True)
    ]
    rates["matrix"] = {dtype_name(dtype): tuple(sorted(curve))}
    if kind == "cuda":
        found = link_rates(device)
        rates["link_up"], rates["link_down"] = found.up, found.down
        rates["link_up_both"], rates["link_down_both"] = found.up_both, found.down_both
        free = torch.cuda.mem_get_info(device)[0]
        rates["hbm"], rates["hbm_copy"] = hbm_rates(device, min(HBM_BYTES, free // 4))
        try:
            for name, value in own_rates(device, FEW_ROWS):
                rates[name] = value
        except (OffloadError, RuntimeError) as error:
            absent |= {name: str(error) for name in RATES if name not in rates}
        reason = why_not_host()
        try:
            rates |= _host(device, dtype, found.up) if reason is None else {}
        except (OffloadError, RuntimeError, MemoryError) as error:
            reason = str(error)
        if reason is not None:
            absent["cpu_attention"] = reason
        torch.cuda.empty_cache()  # a plan counts on all of the memory
    else:
        rates["link_up"] = rates["hbm"] = measure_link(compute_device(device), LINK_BYTES)
    try:
        rates["disk"] = quick_disk(files, folder)
    except (OffloadError, AioError, OSError, ValueError) as error:  # no room for a test file, too
        absent["disk"] = " ".join(str(error).split())[:300]
    return Hardware(machine=this_machine(folder, device), absent=absent, **rates)


def _host(device: torch.device, dtype: torch.dtype, link: float) -> dict[str, Any]:
    """CPU memory, alone and beside the link, with keys and values of `dtype`."""
    memory = HostMemory(min(HOST_BYTES, host_memory_available() // 8))
    alone = read_rate(memory.reader(), HOST_SECONDS)
    launch, way = exchange_seconds(device)
    return {
        **beside(memory, device, link, (dtype,), GROUPS, BESIDE_SECONDS),
        "host_read": alone,
        "cpu_attention": attention_rates(memory, (dtype, torch.int8), GROUPS, HOST_SECONDS),
        "launch_after_cores": launch,
        "exchange": way,
    }


def quick_disk(files: Sequence[str], folder: Path) -> float:
    """Bytes per second of reads of `files`, or of a test file in `folder` where there are none."""
    if files:
        return measure_disk(files, DISK_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    with made(os.fspath(folder), DISK_BYTES) as (path, nbytes):
        return measure_disk([path], nbytes)
