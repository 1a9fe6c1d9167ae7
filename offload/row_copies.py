"""Rows on their way between the compute device and CPU memory, beside the stream of weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from offload.aio.cudart import cuda_state
from offload.device import ComputeDevice
from offload.errors import UnsupportedError
from offload.trace import KEYS_AND_VALUES, Track


class RowCopies(Protocol):
    """Copies between 2-dimensional tensors of equal shape, whose rows are contiguous and lie at any
    stride.

    Copies down have a queue of their own. Small tensors that are wanted at once take no copy engine
    on their way up: it would serve them after the layer of weights that it is busy with, tens of
    milliseconds later. A kernel reads them from pinned memory (`mapped`) and gets its share of the
    link at once. Large ones are asked for ahead of their use (`prefetch`).
    """

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """CPU memory that a GPU reads and writes; its content is undefined."""

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        """The same bytes of a `buffer`, as a tensor of the compute device."""

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy to CPU memory in the background, after all that was issued so far. Returns the point
        at which the copy is done; until then `source` must not change.
        """

    def up(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from CPU memory, before what is issued next. This uses the weights' copy engine: for
        what is needed once a prompt, not once a token. The host must not write to `source` before
        it has waited for the device.
        """

    def prefetch(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Iterable[Any]
    ) -> Any:
        """Copy each (target, source) from CPU memory in the background, not before the points
        `after`. Returns the point at which all copies are done.

        The queue is not that of the weights, and the copy engine serves what is ready first: a
        layer of weights when its slot is free, these when their targets are. Both are asked for
        ahead of their use, so neither needs priority, and neither waits for the other's memory.
        """

    def mark(self) -> Any:
        """The point after all that was issued to the compute device so far."""

    def wait(self, point: Any) -> None:
        """What is computed from now on runs after `point`."""

    def synchronize(self, point: Any) -> None:
        """Return when `point` has been reached."""

    def drain(self) -> None:
        """Return when nothing is on its way."""


class HostCopies:
    """The CPU computes: a copy is done when the call returns."""

    def __init__(self, compute: ComputeDevice | None = None) -> None:
        """`compute`: the device whose trace is told of what comes up."""
        self._compute = compute

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.copy_(source)

    def up(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def prefetch(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Iterable[Any]
    ) -> Any:
        trace = None if self._compute is None else self._compute.trace
        start = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        if trace is not None:
            trace.host(Track.LINK_UP, KEYS_AND_VALUES, start, _nbytes(pairs))

    def mark(self) -> Any:
        pass

    def wait(self, point: Any) -> None:
        pass

    def synchronize(self, point: Any) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaCopies:
    """A GPU: points are CUDA events. Calls are made with that GPU as the current one."""

    def __init__(self, compute: ComputeDevice) -> None:
        """Raises UnsupportedError where torch has no CUDA runtime that can be called, or the GPU
        cannot read CPU memory.
        """
        runtime, _, reason = cuda_state()
        if runtime is None:
            raise UnsupportedError(f"keys and values in CPU memory need the CUDA runtime: {reason}")
        self._runtime = runtime
        self._compute = compute
        self._device = compute.torch_device
        self._stream = torch.cuda.Stream(self._device)
        self._up: torch.cuda.Stream | None = None  # of `prefetch`
        with torch.cuda.device(self._device):
            self.mapped(self.buffer((1,), torch.uint8))  # refused now rather than at a token

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        found = torch.as_tensor(_Bytes(memory), device=self._device)
        if found.data_ptr() != memory.data_ptr():  # torch made a copy
            raise UnsupportedError(
                f"{self._device} does not see pinned CPU memory at its own address"
            )
        return found.view(memory.dtype).view(memory.shape)

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        trace = self._compute.trace
        start = None if trace is None else _point(self._stream, timed=True)
        self._copy(target, source, self._stream)
        stop = _point(self._stream, timed=trace is not None)
        if trace is not None:
            trace.device(Track.LINK_DOWN, "rows", start, stop, source.nbytes)
        return stop

    def up(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source, torch.cuda.current_stream(self._device))

    def prefetch(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Iterable[Any]
    ) -> Any:
        if self._up is None:
            self._up = torch.cuda.Stream(self._device)
        for point in after:
            if point is not None:
                self._up.wait_event(point)
        trace = self._compute.trace
        start = None if trace is None else _point(self._up, timed=True)
        for target, source in pairs:
            self._copy(target, source, self._up)
        stop = _point(self._up, timed=trace is not None)
        if trace is not None:
            trace.device(Track.LINK_UP, KEYS_AND_VALUES, start, stop, _nbytes(pairs))
        return stop

    def mark(self) -> Any:
        return _point(torch.cuda.current_stream(self._device), timed=False)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        # torch has no copy of pitched rows: it would gather them on the host first, waiting.
        rows, width = source.shape[0], source.shape[1] * source.element_size()
        if not rows or not width:
            return
        self._runtime.copy_rows(
            (target.data_ptr(), _pitch(target)),
            (source.data_ptr(), _pitch(source)),
            width,
            rows,
            stream.cuda_stream,
        )

    def wait(self, point: Any) -> None:
        if point is not None:
            torch.cuda.current_stream(self._device).wait_event(point)

    def synchronize(self, point: Any) -> None:
        if point is not None:
            point.synchronize()

    def drain(self) -> None:
        self._stream.synchronize()
        if self._up is not None:
            self._up.synchronize()


def row_copies(compute: ComputeDevice) -> RowCopies:
    """The copies for this compute device."""
    return CudaCopies(compute) if compute.torch_device.type == "cuda" else HostCopies(compute)


def columns(buffer: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Columns of a contiguous [rows, heads, columns, ...] as [rows * heads, elements]."""
    rows, heads, capacity = buffer.shape[:3]
    width = buffer.shape[3:].numel()
    return buffer.view(rows * heads, capacity * width)[:, first * width : last * width]


def _point(stream: torch.cuda.Stream, timed: bool) -> torch.cuda.Event:
    return stream.record_event(torch.cuda.Event(enable_timing=timed))


def _nbytes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(source.nbytes for _, source in pairs)


def _pitch(rows: torch.Tensor) -> int:
    """Bytes from a row to the next one."""
    stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
    return stride * rows.element_size()


class _Bytes:
    """Pinned memory in the form in which torch takes over memory of a GPU."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory  # torch keeps this object as long as its tensor
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 2,
        }
