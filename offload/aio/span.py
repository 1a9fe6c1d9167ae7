"""The memory behind what a caller passes: address, length, and a hold that keeps it there."""

from __future__ import annotations

import ctypes
from typing import Any

from .buffer import AlignedBuffer


class Span:
    """A contiguous range of host memory; it stays valid as long as this object does."""

    __slots__ = ("address", "hold", "nbytes")

    def __init__(self, address: int, nbytes: int, hold: Any) -> None:
        self.address = address
        self.nbytes = nbytes
        self.hold = hold


def span_of(buffer: Any, writable: bool) -> Span:
    """The span of an AlignedBuffer, torch CPU tensor, NumPy array or bytes-like object."""
    if isinstance(buffer, AlignedBuffer):
        return Span(buffer.address, buffer.nbytes, buffer._live())
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):
        return _of_tensor(buffer)
    try:
        export = _Export(buffer, writable)
    except (TypeError, BufferError, ValueError) as error:
        kind = "a contiguous, writable" if writable else "a contiguous"
        raise TypeError(
            f"buffer must be an AlignedBuffer, a CPU tensor or {kind} bytes-like object, "
            f"not this {type(buffer).__name__} ({error})"
        ) from None
    return Span(export.address, export.nbytes, export)


def _of_tensor(tensor: Any) -> Span:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise TypeError(f"buffer must be in host memory, not a tensor on {tensor.device}")
    if not tensor.is_contiguous():
        raise TypeError("buffer must be contiguous: pass tensor.contiguous(), or a view that is")
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_PyBUF_SIMPLE, _PyBUF_WRITABLE = 0, 1
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None


class _Export:
    """A buffer export held open: its owner can neither move nor resize the memory meanwhile."""

    def __init__(self, owner: Any, writable: bool) -> None:
        self._view = _PyBuffer()
        self._held = False
        _get_buffer(owner, ctypes.byref(self._view), _PyBUF_WRITABLE if writable else _PyBUF_SIMPLE)
        self._held = True
        self.address: int = self._view.buf or 0
        self.nbytes: int = self._view.len

    def __del__(self) -> None:
        if self._held:
            self._held = False
            _release_buffer(ctypes.byref(self._view))
