"""Real faults, made without a kernel module: full and failing disks, and calls that are refused."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from offload.aio.native import NativeEngine

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

CALLS = {
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    "io_setup": {"x86_64": 206, "aarch64": 0},
}


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


def refuse(calls: list[str], errno: int) -> None:
    """Have the kernel refuse system calls of this process with an errno, as containers do."""
    numbers = [CALLS[name][platform.machine()] for name in calls]
    steps = [(_LOAD, 0, 0, 0)]
    for number in numbers:
        steps += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    array = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), array)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.addressof(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


@contextlib.contextmanager
def loop_device(backing: Path, size: int) -> Iterator[str]:
    """A block device over a file; cut the file and the device fails with EIO."""
    with backing.open("wb") as file:
        file.truncate(size)
    device = _call("losetup", "--find", "--show", str(backing))
    try:
        yield device
    finally:
        _call("losetup", "--detach", device)


@contextlib.contextmanager
def small_disk(folder: Path, size: int = 8 << 20) -> Iterator[Path]:
    """A mounted ext4 of a few MiB."""
    with loop_device(folder / "disk.img", size) as device:
        _call("mkfs.ext4", "-q", device)
        mount = folder / "disk"
        mount.mkdir()
        _call("mount", device, str(mount))
        try:
            yield mount
        finally:
            _call("umount", str(mount))


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def scripted(**script):
    """A stand-in for `backends.select` whose engine follows a script of faults."""

    def select(requested, shape, on_done):
        return NativeEngine("scripted", shape, on_done, **script), []

    return select


if __name__ == "__main__":
    refuse(sys.argv[1].split(","), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
