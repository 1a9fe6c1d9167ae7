"""Measures all that a machine has, in under a minute, and says why the rest is absent."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.aio import AioError
from offload.aio.bench.testfile import made
from offload.device import compute_device
from offload.errors import OffloadError
from offload.home import expanded
from offload.kernels.call import on_device
from offload.kernels.choices import dtype_name
from offload.kernels.host_library import why_not_host
from offload.measure.beside import beside
from offload.measure.compute import hbm_rates, launch_seconds, product_rate
from offload.measure.exchange import exchange_seconds
from offload.measure.fused import RATES, own_rates, prompt_layer_seconds
from offload.measure.host import (
    DTYPES,
    GROUPS,
    HostMemory,
    attention_rates,
    read_rate,
)
from offload.measure.link import link_rates
from offload.measure.machine import this_machine
from offload.measure.stream import measure_disk, measure_link
from offload.scheduler.hardware import Curve, Hardware

DISK_BYTES = 512 << 20
COPY_BYTES = 32 << 20  # of one copy in CPU memory
HBM_BYTES = 2 << 30
BESIDE_SECONDS = 1.0
GROUPS_BESIDE = (1, 8)  # queries a KV head
WIDTH = 8192  # of the square weights that products are timed with
ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
WARM_SECONDS = 3.0  # of products first, since boost clocks do not last
Progress = Callable[[str], None]


def measure_hardware(
    device: torch.device, folder: str | os.PathLike[str], progress: Progress = lambda text: None
) -> Hardware:
    """Every rate of this machine: `device` computes, `folder` lies on the disk that is meant (it is
    made where missing, and holds a test file meanwhile).
    """
    rates: dict[str, Any] = {}
    absent: dict[str, str] = {}
    memory = functools.cache(HostMemory)  # touching it takes seconds on some machines
    steps: list[tuple[str, tuple[str, ...], Callable[[], dict[str, Any]]]] = []
    if device.type == "cuda":
        # Ahead of what keeps all cores busy: their clock is low for many seconds behind it.
        steps += [
            ("launches", ("launch",), lambda: {"launch": launch_seconds(device)}),
            ("a layer's calls", ("prompt_layer",), lambda: _prompt_layer(device)),
        ]
    steps += [
        ("disk", ("disk",), lambda: _disk(Path(folder))),
        ("matrix products", ("matrix",), lambda: {"matrix": _matrix(device)}),
        ("CPU memory", ("host_read", "cpu_attention"), lambda: _host(memory())),
        ("memory of the compute device", ("hbm", "hbm_copy"), lambda: _hbm(device, rates)),
    ]
    if device.type == "cuda":
        steps += [
            (
                "link",
                ("link_up", "link_down", "link_up_both", "link_down_both"),
                lambda: _link(device),
            ),
            ("own kernels", RATES, lambda: dict(own_rates(device))),
            ("the way to CPU cores", _WAY, lambda: _exchange(device)),
            (
                "CPU memory beside the link",
                _BESIDE,
                lambda: _beside(memory(), device, rates),
            ),
        ]
    else:
        steps.append(("copies in CPU memory", ("link_up",), lambda: _copies(device)))
        for name in _OF_A_GPU:
            absent[name] = f"no GPU: layers run on {device}"
    for what, names, measure in steps:
        progress(f"measuring: {what}")
        try:
            with on_device(device):
                rates.update(measure())
        except (OffloadError, AioError, OSError, ValueError, RuntimeError, MemoryError) as error:
            absent.update(dict.fromkeys(names, " ".join(str(error).split())[:300]))
    absent = {name: why for name, why in absent.items() if name not in rates}
    return Hardware(machine=this_machine(folder, device), absent=absent, **rates)


_BESIDE = ("host_read_beside", "link_beside", "cpu_attention_beside", "link_beside_attention")
_WAY = ("launch_after_cores", "exchange")
_OF_A_GPU = (
    *RATES,
    "link_up",
    "link_down",
    "link_up_both",
    "link_down_both",
    *_BESIDE,
    "launch",
    "prompt_layer",
    *_WAY,
)


def _prompt_layer(device: torch.device) -> dict[str, Any]:
    return {"prompt_layer": prompt_layer_seconds(device)}


def _disk(folder: Path) -> dict[str, Any]:
    folder = expanded(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with made(str(folder), DISK_BYTES) as (path, nbytes):
        return {"disk": measure_disk([path], nbytes)}


def _hbm(device: torch.device, rates: dict[str, Any]) -> dict[str, Any]:
    """Where the CPU computes, its memory is the compute device's."""
    if device.type == "cpu":
        if "host_read" not in rates:
            raise RuntimeError("the CPU's memory, which is meant here, could not be measured")
        return {"hbm": rates["host_read"]}
    free = torch.cuda.mem_get_info(device)[0]
    read, copied = hbm_rates(device, min(HBM_BYTES, free // 4))
    return {"hbm": read, "hbm_copy": copied}


def _exchange(device: torch.device) -> dict[str, Any]:
    reason = why_not_host()
    if reason is not None:
        raise RuntimeError(reason)
    launch, way = exchange_seconds(device)
    return {"launch_after_cores": launch, "exchange": way}


def _matrix(device: torch.device) -> dict[str, Curve]:
    if device.type == "cpu":
        return {"float32": _curve(device, torch.float32, 1024, ROWS[:6], 0.1)}
    product_rate([(WIDTH, WIDTH)], WIDTH, torch.bfloat16, device, WARM_SECONDS)
    return {
        dtype_name(dtype): _curve(device, dtype, WIDTH, rows, 0.3)
        for dtype, rows in (
            (torch.bfloat16, ROWS),
            (torch.float16, ROWS),
            (torch.float32, ROWS[1:-1:3]),
        )
    }


def _curve(
    device: torch.device, dtype: torch.dtype, width: int, rows: tuple[int, ...], seconds: float
) -> Curve:
    return tuple((n, product_rate([(width, width)], n, dtype, device, seconds)) for n in rows)


def _link(device: torch.device) -> dict[str, Any]:
    found = link_rates(device)
    return {
        "link_up": found.up,
        "link_down": found.down,
        "link_up_both": found.up_both,
        "link_down_both": found.down_both,
    }


def _host(memory: HostMemory) -> dict[str, Any]:
    reader = memory.reader()
    alone = read_rate(reader)
    reason = why_not_host()
    if reason is not None:
        return {
            "host_read": alone,
            "cpu_attention": {dtype_name(dtype): ((GROUPS[0], alone),) for dtype in DTYPES},
            "cpu_attention_by": f"{reader.how}: no host library ({reason})",
        }
    return {
        "host_read": alone,
        "cpu_attention": attention_rates(memory, (*DTYPES, torch.int8), GROUPS),
        "cpu_attention_by": memory.attention(1, DTYPES[0]).how,
    }


def _copies(device: torch.device) -> dict[str, Any]:
    """Where the CPU computes, layers come from its own memory."""
    return {"link_up": measure_link(compute_device(device), COPY_BYTES)}


def _beside(memory: HostMemory, device: torch.device, rates: dict[str, Any]) -> dict[str, Any]:
    if "link_up" not in rates:
        raise RuntimeError("the link's own rate could not be measured")
    return beside(memory, device, rates["link_up"], DTYPES, GROUPS_BESIDE, BESIDE_SECONDS)
