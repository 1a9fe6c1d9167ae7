"""What this machine offers to asynchronous I/O, found by trying it."""

from __future__ import annotations

import os
import platform
import resource
from typing import Any

from .backends import BACKENDS, candidates, try_out
from .extension import WHY_NOT
from .file import AioFile


def probe(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Each backend tried by one real read, the one that "auto" takes (None where that which
    OFFLOAD_AIO_BACKEND names cannot run), the limits that matter, and how `path` can be read.

    Raises ValueError where that variable names no backend.
    """
    wanted = candidates("auto")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    tried = [try_out(name) for name in BACKENDS]
    found: dict[str, Any] = {
        "selected": next((e["backend"] for e in tried if e["ok"] and e["backend"] in wanted), None),
        "backends": tried,
        "extension": WHY_NOT or "built",
        "kernel": platform.release(),
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "memlock_hard": None if hard == resource.RLIM_INFINITY else hard,
        "aio_nr": _number("/proc/sys/fs/aio-nr"),
        "aio_max_nr": _number("/proc/sys/fs/aio-max-nr"),
        "io_uring_disabled": _number("/proc/sys/kernel/io_uring_disabled"),
        "huge_pages_free": _number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
        "transparent_huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
    }
    if path is not None:
        with AioFile(path) as file:
            found["file"] = {
                "path": file.path,
                "size": file.size,
                "direct": file.direct,
                "direct_reason": file.direct_reason,
                "mem_align": file.mem_align,
                "offset_align": file.offset_align,
            }
    return found


def _text(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _number(path: str) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None
