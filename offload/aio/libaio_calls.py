"""Linux native AIO by ctypes: its structs, and its calls, of libaio where it is installed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import platform
from collections.abc import Callable
from typing import Any


class Iocb(ctypes.Structure):
    """struct iocb of linux/aio_abi.h (little-endian layout)."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("reqprio", ctypes.c_int16),
        ("fildes", ctypes.c_uint32),
        ("buf", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    ]


class IoEvent(ctypes.Structure):
    """struct io_event: how a request ended."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("obj", ctypes.c_uint64),
        ("res", ctypes.c_int64),
        ("res2", ctypes.c_int64),
    ]


class Timespec(ctypes.Structure):
    """struct timespec, for a time to wait."""

    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


if ctypes.sizeof(Iocb) != 64 or ctypes.sizeof(IoEvent) != 32:
    raise ImportError("struct iocb has another layout on this machine")

_context, _long, _int = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_iocbs = ctypes.POINTER(ctypes.POINTER(Iocb))
_events = ctypes.POINTER(IoEvent)
_CALLS: dict[str, list[Any]] = {
    "io_setup": [_int, ctypes.POINTER(_context)],
    "io_destroy": [_context],
    "io_submit": [_context, _long, _iocbs],
    "io_getevents": [_context, _long, _long, _events, ctypes.POINTER(Timespec)],
}
_NUMBERS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209},
    "generic": {"io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_getevents": 4},
}
SONAMES = ("libaio.so.1", "libaio.so.1t64")  # the second where time_t was widened


class Calls:
    """The four calls, each returning a count or -errno, whichever way they are reached."""

    def __init__(self, sonames: tuple[str, ...] = SONAMES) -> None:
        self.source = "system calls"
        self._functions: dict[str, Callable[..., int]] = {}
        for soname in sonames:
            with contextlib.suppress(OSError):
                # CDLL lets go of the GIL in every call; use_errno is for the raw ones.
                library = ctypes.CDLL(soname)
                self._functions = {name: _declared(library, name) for name in _CALLS}
                self.source = soname
                return
        self._functions = {name: _raw(name) for name in _CALLS}

    def __call__(self, name: str, *arguments: Any) -> int:
        return self._functions[name](*arguments)


def _declared(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    function = library[name]  # its own object: another user's declaration is not touched
    function.argtypes = _CALLS[name]
    function.restype = ctypes.c_int
    return function


def _raw(name: str) -> Callable[..., int]:
    machine = platform.machine()
    generic = machine in ("aarch64", "riscv64", "loongarch64")
    numbers = _NUMBERS.get("generic" if generic else machine)
    if numbers is None:
        raise OSError(errno.ENOSYS, f"the system call numbers of {machine} are not known")
    syscall = ctypes.CDLL(None, use_errno=True)["syscall"]
    syscall.argtypes = [_long, *_CALLS[name]]
    syscall.restype = _long
    number = numbers[name]

    def call(*arguments: Any) -> int:
        result: int = syscall(number, *arguments)
        return -ctypes.get_errno() if result < 0 else result

    return call
