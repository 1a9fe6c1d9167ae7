"""A kernel launch with its arguments checked and filled in once, to be issued many times."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from typing import Any, ClassVar, Protocol

import torch

from offload.kernels import structs
from offload.kernels.library import library


class Launchable(Protocol):
    """A call that can be issued any number of times."""

    def launch(self, stream: int = 0) -> None:
        """Issue it on `stream` (a cudaStream_t as a number; the CPU has none)."""


class Call:
    """One launch of one op on tensors that keep their places.

    A subclass checks its tensors in `__init__`, fills `self.arguments`, and ends with `_ready`.
    `launch(stream)` issues it: on a GPU by the library (about a third of a microsecond of Python),
    elsewhere by the op's reference. What the tensors hold may change between launches; where they
    lie may not, and the call keeps them alive.
    """

    function: ClassVar[str]
    arguments: Structure

    def _ready(self, device: torch.device, *tensors: torch.Tensor | None) -> None:
        self._tensors = tensors
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._library = library()
            self._launch = self._library.launcher(self.function)
            self._pointer = ctypes.pointer(self.arguments)

    def launch(self, stream: int = 0) -> None:
        """Issue the call on `stream` (a cudaStream_t as a number; the CPU has none).

        Raises KernelError where the launch fails.
        """
        if not self._on_gpu:
            self._reference()
            return
        status = self._launch(self._pointer, stream)
        if status:
            self._library.check(status)

    def _reference(self) -> None:
        raise NotImplementedError


class CompositeCall(Call):
    """A call of several launches, torch's own products among them, for which the library has no one
    struct. A subclass checks its tensors and sets `_launches`, functions of the stream.
    """

    _launches: Sequence[Callable[[int], Any]]

    def launch(self, stream: int = 0) -> None:
        """Issue them on `stream` (a cudaStream_t as a number; the CPU has none)."""
        for launch in self._launches:
            launch(stream)


def current_stream(device: torch.device) -> int:
    """The stream on which torch issues work for `device` now; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # As a number, without an object of torch's: this is called in every decode step.
    return torch._C._cuda_getCurrentRawStream(index)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, if it is not: whatever the tensors, torch's events and graphs are
    of that one, and so are launches.
    """
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def on_stream(device: torch.device, stream: int) -> contextlib.AbstractContextManager[Any]:
    """Make torch issue its work on `stream`, if it does not do so already."""
    if device.type != "cuda" or current_stream(device) == stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The tensor's address, for a struct's field."""
    return None if tensor is None else tensor.data_ptr()


def stride_of(tensor: torch.Tensor, dimension: int) -> int:
    """The stride in elements; 0 for a dimension of size 1, whose stride does not matter."""
    return tensor.stride(dimension) if tensor.shape[dimension] > 1 else 0


def dtype_code(op: str, tensor: torch.Tensor) -> int:
    """The library's number for the tensor's dtype."""
    code = structs.DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(
            f"{op}: dtype {tensor.dtype} is not supported; use float32, float16 or bfloat16"
        )
    return code


def check(
    op: str,
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    contiguous: bool = True,
) -> None:
    """Refuse `tensor` unless it has `shape`, the device of `like`, and its dtype (or `dtype`).

    `contiguous=False` asks only that the last dimension is.
    """
    dtype = dtype or like.dtype
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{op}: {name} must be {dtype}, not {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, not on {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous; its shape is {list(tensor.shape)} and its strides "
            f"are {list(tensor.stride())}"
        )
    if not contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: the last dimension of {name} must be contiguous; its strides are "
            f"{list(tensor.stride())}"
        )
    if tensor.data_ptr() % tensor.element_size():
        raise ValueError(f"{op}: {name} lies at an address that is no multiple of its elements")


def check_equal_strides(
    op: str, pair: Mapping[str, torch.Tensor], dimensions: tuple[int, ...]
) -> None:
    """Refuse a pair of tensors, by their names, whose strides in some dimensions differ: the kernel
    takes one number for both.
    """
    (name, one), (other_name, other) = pair.items()
    if any(stride_of(one, d) != stride_of(other, d) for d in dimensions):
        raise ValueError(
            f"{op}: {name} and {other_name} must have equal strides, not {list(one.stride())} and "
            f"{list(other.stride())}"
        )
