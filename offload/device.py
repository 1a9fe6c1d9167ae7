"""The compute device as the weight store sees it: memory, copies in the background, and points in
time.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

import torch

from offload.trace import Trace, Track


class ComputeDevice(Protocol):
    """Where layers run. Copies go one after the other, beside what is computed."""

    torch_device: torch.device
    late: bool  # whether what is issued may run later
    trace: Trace | None  # that is told of copies

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes, uint8 [nbytes], at least 256-byte aligned."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> None:
        """Copy bytes in the background, not before the point `after`."""

    def fill(self, target: torch.Tensor, value: int, after: Any = None) -> None:
        """Set bytes in the background, not before the point `after`."""

    def copied(self) -> Any:
        """The point after all copies issued so far."""

    def mark(self) -> Any:
        """The point after everything the caller has computed so far."""

    def wait(self, point: Any) -> None:
        """What the caller computes from now on runs after `point`."""

    def synchronize(self, point: Any) -> None:
        """Return when `point` has been reached."""

    def elapsed(self, start: Any, stop: Any) -> float | None:
        """Seconds from one timed mark to another; None while the second has not been reached."""

    def timed_mark(self) -> Any:
        """A `mark` for `elapsed`."""


class HostDevice:
    """The CPU computes: a copy is done when `copy` returns, and so is everything computed before
    it.
    """

    torch_device = torch.device("cpu")
    late = False
    trace: Trace | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        # Over-allocate: torch aligns to 64 bytes on a CPU.
        raw = torch.empty(nbytes + 256, dtype=torch.uint8)
        skip = -raw.data_ptr() % 256
        return raw[skip : skip + nbytes]

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> None:
        trace, start = self.trace, time.perf_counter()
        _copy_on_host(target, source)
        if trace is not None:
            trace.host(Track.LINK_UP, "copy", start, source.nbytes)

    def fill(self, target: torch.Tensor, value: int, after: Any = None) -> None:
        target.fill_(value)

    def copied(self) -> None:
        return None

    def mark(self) -> None:
        return None

    def wait(self, point: Any) -> None:
        pass

    def synchronize(self, point: Any) -> None:
        pass

    def elapsed(self, start: float, stop: float) -> float | None:
        return stop - start

    def timed_mark(self) -> float:
        return time.perf_counter()


class CudaDevice:
    """A GPU: copies run on a stream of their own, and points are CUDA events."""

    late = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.trace: Trace | None = None
        self._copies = torch.cuda.Stream(torch_device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        # For good, so not a part of a block that is merely kept: the rest of that could neither be
        # given back nor take anything larger. (Blocks in use keep their gaps, which this may fill.)
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        # The allocator may hand out what queued kernels still read; copies must not overtake them.
        self._copies.wait_stream(torch.cuda.current_stream(self.torch_device))
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> None:
        if not target.is_cuda:  # a layer on its way to the CPU tier
            _copy_on_host(target, source)
            return
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            trace = self.trace
            start = self._timed(self._copies) if trace is not None else None
            target.copy_(source, non_blocking=True)
            if trace is not None:
                stop = self._timed(self._copies)
                trace.device(Track.LINK_UP, "copy", start, stop, source.nbytes)

    def fill(self, target: torch.Tensor, value: int, after: Any = None) -> None:
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            target.fill_(value)

    def copied(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._copies)
        return event

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, point: torch.cuda.Event | None) -> None:
        if point is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(point)

    def synchronize(self, point: torch.cuda.Event | None) -> None:
        if point is not None:
            point.synchronize()

    def elapsed(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float | None:
        return start.elapsed_time(stop) / 1e3 if stop.query() else None

    def timed_mark(self) -> torch.cuda.Event:
        return self._timed(torch.cuda.current_stream(self.torch_device))

    def _timed(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def compute_device(device: torch.device) -> ComputeDevice:
    """The device of this kind; others than CPU and CUDA have no copies beside compute here."""
    if device.type == "cuda":
        return CudaDevice(device)
    return HostDevice()


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a CPU tensor; shapes and dtypes that differ are torch's to refuse or convert.

    One memmove, without the interpreter's lock: filling the CPU tier took a quarter less processor
    time with it than with `copy_`, and on few cores that much more of the disk's rate.
    """
    alike = source.shape == target.shape and source.dtype == target.dtype
    if alike and source.is_contiguous() and target.is_contiguous() and not source.is_cuda:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
