"""Files that no page cache helps to read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def drop_cache(files: Iterable[str | os.PathLike[str]]) -> None:
    """Bring the files to the disk and their pages out of memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's files of weights, in the order of their names."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
