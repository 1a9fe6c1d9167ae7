"""Which machine this is, as far as rates depend on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from offload.home import expanded
from offload.memory_limits import host_memory_total
from offload.scheduler.hardware import Machine


def this_machine(folder: str | os.PathLike[str], device: torch.device) -> Machine:
    """The facts that rates depend on; `folder` lies on the disk that is meant, and `device` is
    where layers run.
    """
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return Machine(
        gpu=properties.name if properties is not None else None,
        gpu_memory=properties.total_memory if properties is not None else 0,
        gpus=torch.cuda.device_count() if on_gpu else 0,
        driver=_driver() if on_gpu else None,
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        host_memory=host_memory_total(),
        disk=disk_of(Path(folder)),
    )


def _driver() -> str:
    """The driver, and the CUDA that torch was built for."""
    words = _read("/proc/driver/nvidia/version").partition("\n")[0].split()
    versions = [word for word in words if word[:1].isdigit() and "." in word]
    return f"{versions[0] if versions else 'unknown'}, CUDA {torch.version.cuda}"


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def disk_of(folder: Path) -> str:
    """The file system that holds `folder`, or will: its device and kind."""
    folder = expanded(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    number = folder.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) > 4 and len(kind) > 1 and fields[2] == wanted:
            return f"{kind[0]} on {kind[1]}"
    return wanted


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
