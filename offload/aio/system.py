"""The system calls that Python's os module lacks, declared once."""

from __future__ import annotations

import ctypes
import errno
import os

libc = ctypes.CDLL(None, use_errno=True)

_size, _ptr, _int, _long = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_long

libc.mmap.argtypes = [_ptr, _size, _int, _int, _int, _long]
libc.mmap.restype = _ptr
libc.munmap.argtypes = [_ptr, _size]
libc.munmap.restype = _int
libc.madvise.argtypes = [_ptr, _size, _int]
libc.madvise.restype = _int
libc.mlock.argtypes = [_ptr, _size]
libc.mlock.restype = _int
libc.fstatfs.argtypes = [_int, _ptr]
libc.fstatfs.restype = _int

PROT_READ_WRITE = 0x1 | 0x2
MAP_PRIVATE, MAP_ANONYMOUS, MAP_HUGETLB = 0x02, 0x20, 0x40000
MAP_HUGE_2MB = 21 << 26
MADV_DONTFORK, MADV_HUGEPAGE, MADV_POPULATE_WRITE = 10, 14, 23
MAP_FAILED = ctypes.c_void_p(-1).value


def check(result: int, call: str) -> int:
    """Turn a call's -1 into one OSError that names the call."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


class _Statx(ctypes.Structure):
    _fields_ = [
        ("stx_mask", ctypes.c_uint32),
        ("_to_direct", ctypes.c_uint8 * 148),
        ("stx_dio_mem_align", ctypes.c_uint32),
        ("stx_dio_offset_align", ctypes.c_uint32),
        ("_rest", ctypes.c_uint8 * 96),
    ]


_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000

_has_statx = hasattr(libc, "statx")  # not in C libraries older than the call
if _has_statx:
    libc.statx.argtypes = [
        _int, ctypes.c_char_p, _int, ctypes.c_uint, ctypes.POINTER(_Statx)
    ]  # fmt: skip
    libc.statx.restype = _int


def statx_direct_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment for O_DIRECT; (0, 0): none possible; None: not told."""
    found = _Statx()
    if not _has_statx:
        return None
    if libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(found)) != 0:
        return None
    if not found.stx_mask & _STATX_DIOALIGN:
        return None
    return found.stx_dio_mem_align, found.stx_dio_offset_align


def file_system_magic(fd: int) -> int:
    """The `f_type` of the file system that holds an open file, 0 if it is not told."""
    found = (ctypes.c_ulong * 32)()  # larger than any struct statfs; f_type stands first
    if libc.fstatfs(fd, found) != 0:
        return 0
    return found[0] & 0xFFFFFFFF


def madvise(address: int, nbytes: int, advice: int) -> int:
    """madvise that returns 0 or the errno; EINTR and EAGAIN are tried again."""
    while libc.madvise(address, nbytes, advice) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            return code
    return 0
