"""The file that is read or written: an existing one, or one made for the run and removed after."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

from ..buffer import alloc
from ..file import AioFile
from ..handle import AioHandle
from .sizes import show

_CHUNK = 16 << 20


@contextlib.contextmanager
def existing(path: str, max_size: int) -> Iterator[tuple[str, int]]:
    """A file of the user's: read, never written. Gives its path and the bytes to read."""
    with AioFile(path) as file:
        nbytes = min(file.size, max_size) // _CHUNK * _CHUNK
    if nbytes == 0:
        raise ValueError(f"{path!r} is smaller than {show(_CHUNK)}: too small to measure a drive")
    yield path, nbytes


@contextlib.contextmanager
def made(
    folder: str, nbytes: int, progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[str, int]]:
    """A file of random bytes in `folder`, removed whatever happens."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder!r} is no folder; name one on the drive to be measured")
    nbytes = max(nbytes // _CHUNK, 1) * _CHUNK
    free = shutil.disk_usage(folder).free
    if free < nbytes + (1 << 30):
        raise ValueError(
            f"{folder!r} has {show(free >> 20 << 20)} free, and the test file takes {show(nbytes)} "
            "beside 1 GiB that stays free; choose a smaller --max-size or another folder"
        )
    handle, path = tempfile.mkstemp(prefix="offload-bench-", suffix=".tmp", dir=folder)
    os.close(handle)
    try:
        _write(path, nbytes, progress)
        yield path, nbytes
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _write(path: str, nbytes: int, progress: Callable[[str], None]) -> None:
    # Really written: a drive need not read what was only allocated. Random: some compress.
    with (
        alloc(_CHUNK, lock=False) as chunk,
        AioFile(path, "rw") as file,
        AioHandle(4 << 20, 8) as writer,
    ):
        chunk.view()[:] = os.urandom(_CHUNK)
        os.posix_fallocate(file.descriptors().buffered, 0, nbytes)
        for at in range(0, nbytes, _CHUNK):
            chunk.view()[:8] = at.to_bytes(8, "little")  # no two chunks are the same
            writer.pwrite(chunk, file, at)
            progress(f"writing the test file: {at * 100 // nbytes} %")
        file.fsync()
        os.posix_fadvise(file.descriptors().buffered, 0, 0, os.POSIX_FADV_DONTNEED)
