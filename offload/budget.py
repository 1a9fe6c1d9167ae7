"""The memory that a run may use: what the user says, else what is found free."""

from __future__ import annotations

import sys
import warnings

import torch

from offload.config import OffloadConfig
from offload.memory_limits import host_memory_available
from offload.scheduler.plan import Budget
from offload.sizes import format_size

HOST_SHARE = 0.9  # of the free CPU memory, where the user names no limit
DEVICE_SHARE = 0.95  # of the free GPU memory, likewise: the allocator needs air


def memory_budget(config: OffloadConfig) -> Budget:
    """Bytes by place. Raises ValueError for a place that does not compute."""
    cpu_found = int(host_memory_available() * HOST_SHARE)
    cpu = config.memory.get("cpu", cpu_found)
    if "cpu" in config.memory and cpu > cpu_found:
        _warn_overridden("cpu", cpu, cpu_found)
    if config.compute.type == "cpu":
        gpus = [k for k in config.memory if k != "cpu" and k != 0]
        if gpus:
            raise ValueError(
                f"max_memory names GPU {gpus[0]}, but the CPU computes (device={config.compute})"
            )
        return Budget(device=config.memory.get(0, cpu), cpu=cpu, shared=True)
    index = config.compute.index
    others = [k for k in config.memory if k not in ("cpu", index)]
    if others:
        raise ValueError(
            f"max_memory names GPU {others[0]}, but the compute device is {config.compute}; one "
            f"GPU computes"
        )
    found = int(torch.cuda.mem_get_info(config.compute)[0] * DEVICE_SHARE)
    limit = config.memory.get(index, found)
    if limit > found:
        _warn_overridden(index, limit, found)
    return Budget(device=limit, cpu=cpu)


def _warn_overridden(key: int | str, asked: int, found: int) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("offload."):
        level, frame = level + 1, frame.f_back  # to the line that is not ours
    warnings.warn(
        f"max_memory[{key!r}] = {format_size(asked)} is more than the {format_size(found)} found "
        f"free; taking your word for it",
        stacklevel=level,
    )
