"""What this process holds: memory and its peak, threads, open files, maps."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def resident_bytes() -> int:
    """The memory of this process now; huge pages are counted apart by the kernel."""
    return status("VmRSS") + status("HugetlbPages")


def trim() -> None:
    """Let the allocator give back what is free in it; how much it keeps is a matter of history."""
    ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """`growth`: by how much resident memory rose above that of the start, at its peak."""

    growth = 0

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._start = resident_bytes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.growth = status("VmHWM") + status("HugetlbPages") - self._start


def open_files() -> list[str]:
    """What each open descriptor leads to."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the one of the listing itself
    return found


def own_threads() -> list[str]:
    """Names of this package's threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("offload")]


def kernel_threads() -> int:
    """All threads of the process, native ones too."""
    return len(os.listdir("/proc/self/task"))


def settles(holds: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether `holds` comes true soon: threads take a moment to end."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def mapped_files() -> set[str]:
    """Paths of all files mapped into memory."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {fields[5] for fields in lines if len(fields) == 6 and fields[5].startswith("/")}
