"""Sentences that name the knob behind an errno: what to look at, with the numbers found there."""

from __future__ import annotations

import errno
import os
import resource


def transfer_hint(code: int, write: bool, path: str) -> str | None:
    """What to do about a read or write that failed with `code`."""
    if code == errno.EIO:
        return "the device reported an I/O error; see `dmesg` and the drive's SMART log"
    if code == errno.ENOSPC:
        return _space(path)
    if code == errno.EDQUOT:
        return "the disk quota of this user is used up; see `quota -s`"
    if code == errno.EFBIG:
        return _file_limit()
    if code == errno.EINVAL:
        return "O_DIRECT refused the alignment; open the file with direct='auto' or direct=False"
    if code == errno.EBADF and write:
        return "the file was opened for reading; open it with mode='rw'"
    if code in (errno.ENOMEM, errno.EFAULT):
        return "the buffer's memory could not be used; was it freed or resized during the request?"
    return None


def setup_hint(backend: str, code: int) -> str | None:
    """What to do about a backend that could not be set up."""
    if backend in ("libaio", "ctypes-libaio") and code == errno.EAGAIN:
        used, limit = _read("/proc/sys/fs/aio-nr"), _read("/proc/sys/fs/aio-max-nr")
        return (
            f"fs.aio-nr is {used} of fs.aio-max-nr = {limit}; raise it with "
            "`sysctl -w fs.aio-max-nr=1048576` or close other programs' queues"
        )
    if backend.startswith("uring"):
        disabled = _read("/proc/sys/kernel/io_uring_disabled")
        if code == errno.EPERM and disabled in ("1", "2"):
            return f"kernel.io_uring_disabled is {disabled}; set it to 0 with `sysctl -w`"
        if code in (errno.EPERM, errno.EACCES):
            return (
                "a seccomp filter blocks io_uring, as container engines do by default; "
                "allow io_uring_setup, io_uring_enter and io_uring_register in its profile"
            )
        if code == errno.ENOSYS:
            return "this kernel (or a seccomp filter) has no io_uring"
        if code == errno.ENOMEM:
            return memlock_hint()
    if backend in ("libaio", "ctypes-libaio") and code in (errno.EPERM, errno.ENOSYS):
        return "a seccomp filter or the kernel's build has no io_setup"
    return None


def memlock_hint() -> str:
    """The limit on locked memory, and how to raise it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return (
        f"`ulimit -l` allows {size} of locked memory; raise it (limits.conf memlock, or "
        "`--ulimit memlock=-1` for a container)"
    )


def _space(path: str) -> str:
    try:
        found = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return "the disk is full"
    return f"the disk is full: {found.f_bavail * found.f_frsize} bytes are free there"


def _file_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return "the file system allows no larger file"
    return f"`ulimit -f` allows files of {soft} bytes"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return "unknown"
