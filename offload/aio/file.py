"""One open file: a descriptor for O_DIRECT where it is granted, one for the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
from collections.abc import Callable
from typing import Literal

from . import regions
from .errors import AioClosedError, AioError
from .mapping import Mapping
from .system import file_system_magic, statx_direct_alignment

Direct = Literal["auto", True, False]

# Requests are split at this grain at least: pages of direct and of page-cache transfers must never
# be the same page, or the kernel could write back a stale copy of bytes that went past the cache.
PAGE = 4096

# These keep files in the page cache itself: O_DIRECT is accepted and means nothing.
_CACHE_ONLY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}

_serial = itertools.count(1)


class Descriptors:
    """The descriptors of one open file, closed when the last request that uses them has ended."""

    def __init__(self, path: str, buffered: int, direct: int, mem_align: int, offset_align: int):
        self.serial = next(_serial)
        self.path = path
        self.buffered = buffered
        self.direct = direct  # -1 where O_DIRECT is not in use
        self.mem_align = mem_align
        self.offset_align = offset_align
        self.strict = False  # direct=True: misalignment is an error, never a fallback
        self.writable = False

    def __del__(
        self,
        close: Callable[[int], None] = os.close,
        closed: Callable[[int], None] = regions.file_closed,
    ) -> None:
        for name in ("direct", "buffered"):
            fd = getattr(self, name, -1)
            if fd >= 0:
                setattr(self, name, -1)
                with contextlib.suppress(OSError):  # nobody is left to be told
                    close(fd)
        closed(self.serial)


class AioFile:
    """A file for `AioHandle`; made by `offload.aio.open`, closed by `close` or a `with` block.

    `mode`: "r", or "rw", which makes the file where there is none. `direct`: "auto" moves aligned
    bytes past the page cache (O_DIRECT) where the file system grants it, and others through it;
    True refuses what is not aligned, False goes through the cache alone.

    Raises AioError where the file cannot be opened so, ValueError for another mode.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "r", direct: Direct = "auto"):
        if mode not in ("r", "rw"):
            raise ValueError(f"mode must be 'r' or 'rw', not {mode!r}")
        if direct not in ("auto", True, False):
            raise ValueError(f"direct must be 'auto', True or False, not {direct!r}")
        self.path = os.fspath(path)
        self.mode = mode
        self._files: Descriptors | None = None
        self.direct_reason = "asked for direct=False"
        flags = (os.O_RDWR | os.O_CREAT if mode == "rw" else os.O_RDONLY) | os.O_CLOEXEC
        _refuse_unseekable(self.path)
        files = Descriptors(self.path, _open(self.path, flags), -1, 1, 1)
        files.strict = direct is True
        files.writable = mode == "rw"
        if direct is not False:
            self.direct_reason = _try_direct(files, flags & ~os.O_CREAT)
            if direct is True and files.direct < 0:
                raise AioError(
                    errno.EINVAL,
                    f"O_DIRECT is not possible: {self.direct_reason}",
                    filename=self.path,
                    hint="open the file with direct='auto'",
                )
        self._files = files

    @property
    def size(self) -> int:
        """Bytes in the file now (also for a block device)."""
        fd = self.descriptors().buffered
        found = os.fstat(fd)
        if stat.S_ISBLK(found.st_mode):
            return os.lseek(fd, 0, os.SEEK_END)
        return found.st_size

    @property
    def direct(self) -> bool:
        """Whether aligned transfers go past the page cache; `direct_reason` says why or why not."""
        return self.descriptors().direct >= 0

    @property
    def mem_align(self) -> int:
        """What a buffer's address must be a multiple of for O_DIRECT."""
        return self.descriptors().mem_align

    @property
    def offset_align(self) -> int:
        """What offset and length must be multiples of for a transfer that is direct throughout."""
        return self.descriptors().offset_align

    @property
    def closed(self) -> bool:
        """Whether the file was given up."""
        return self._files is None

    def descriptors(self) -> Descriptors:
        """The descriptors, for a request to hold as long as it runs."""
        if self._files is None:
            raise AioClosedError("the file is closed", filename=self.path)
        return self._files

    def fsync(self) -> None:
        """Have the drive keep what was written: data and size."""
        os.fsync(self.descriptors().buffered)

    def close(self) -> None:
        """Give the file up; requests in flight still end as they would have."""
        self._files = None

    def __enter__(self) -> AioFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else ("direct" if self.direct else "buffered")
        return f"AioFile({self.path!r}, {self.mode!r}, {state})"


def open(path: str | os.PathLike[str], mode: str = "r", direct: Direct = "auto") -> AioFile:
    """Open `path` for reading ("r") or reading and writing ("rw"); see AioFile."""
    return AioFile(path, mode, direct)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise AioError(error.errno or 0, f"cannot open: {error.strerror}", filename=path) from None


def _refuse_unseekable(path: str) -> None:
    # Looked at before opening: opening a FIFO waits for its other end.
    try:
        kind = os.stat(path).st_mode
    except OSError:
        return  # open() reports it, or creates the file
    if stat.S_ISDIR(kind):
        raise AioError(errno.EISDIR, "cannot open: it is a directory", filename=path)
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
        raise AioError(
            errno.ESPIPE, "cannot open: a pipe or socket has no offsets to read at", filename=path
        )


def _try_direct(files: Descriptors, flags: int) -> str:
    """Open the O_DIRECT descriptor if the file really takes such reads; returns the reason."""
    kind = os.fstat(files.buffered).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISBLK(kind)):
        return "neither a regular file nor a block device"
    cache_only = _CACHE_ONLY.get(file_system_magic(files.buffered))
    # A block device's node may lie in a tmpfs; its bytes do not.
    if cache_only and not stat.S_ISBLK(kind):
        return f"{cache_only} keeps its files in the page cache"
    alignment = statx_direct_alignment(files.buffered)
    if alignment == (0, 0):
        return "the file system reports no direct I/O for this file"
    try:
        direct = os.open(files.path, flags | os.O_DIRECT)
    except OSError as error:
        return f"open with O_DIRECT failed: {error.strerror}"
    first, second = os.fstat(direct), os.fstat(files.buffered)
    if (first.st_dev, first.st_ino) != (second.st_dev, second.st_ino):
        os.close(direct)
        return "the path was replaced by another file while it was opened"
    # A file system that tells no alignment gets a page, which every known device accepts.
    mem_align, offset_align = alignment or (PAGE, PAGE)
    code = _one_direct_read(direct, max(mem_align, 512), max(offset_align, 512))
    if code:
        os.close(direct)
        return f"a trial read with O_DIRECT failed: {os.strerror(code)}"
    files.direct, files.mem_align, files.offset_align = direct, mem_align, offset_align
    told = "statx" if alignment else "not told by the file system, a page assumed"
    return f"O_DIRECT, memory at {mem_align}, offsets at {offset_align} ({told})"


def _one_direct_read(fd: int, mem_align: int, offset_align: int) -> int:
    """Read once, at exactly the alignment that was told; returns the errno or 0."""
    with Mapping(max(mem_align, PAGE) + max(offset_align, PAGE)) as page:
        view = (ctypes.c_ubyte * offset_align).from_address(page.address + mem_align % PAGE)
        try:
            os.preadv(fd, [view], 0)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0
