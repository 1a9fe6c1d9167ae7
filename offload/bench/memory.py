"""Peaks of GPU and host memory, and the cap that makes a large GPU a small one."""

from __future__ import annotations

import contextlib
import gc
import itertools
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def gpu_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    """PyTorch's allocator fails beyond `limit` bytes in this block."""
    if device.type != "cuda" or limit is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def reset_peaks(device: torch.device) -> None:
    """Free what nobody holds, and count peaks from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        empty_pinned = getattr(torch._C, "_host_emptyCache", None)
        if empty_pinned is not None:
            empty_pinned()
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present size


def host_peak() -> int:
    """The largest resident size since `reset_peaks` (of the process, where it cannot be reset)."""
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_peaks(device: torch.device) -> tuple[int, int]:
    """Bytes allocated and bytes reserved at most; zeros where the CPU computes."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors on `device` at most while `call` runs, beyond those that stood before."""
    if device.type == "cuda":
        reset_peaks(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events: Any = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0))
