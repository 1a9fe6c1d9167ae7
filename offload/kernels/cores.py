"""Which CPU cores this process may keep busy: its affinity, one of each core's hyperthreads, and no
more than its cgroup's share of CPU time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

MANY = 8  # from so many cores on, two are left free rather than one


def worker_cpus(spare: int | None = None, root: str | os.PathLike[str] = "/") -> list[int]:
    """The CPUs for a pool's threads, one a physical core; at least one.

    `spare` cores, the first ones, are left to the threads that launch kernels and do I/O (None:
    one, or two of eight or more). `root` is where /proc and /sys are looked up.
    """
    if spare is not None and spare < 0:
        raise ValueError(f"spare must be 0 cores or more, not {spare}")
    cores = physical_cores(os.sched_getaffinity(0), root)
    usable = len(cores)
    quota = cpu_quota(root)
    if quota is not None:
        usable = min(usable, int(quota))
    if spare is None:
        spare = 2 if usable >= MANY else 1
    return cores[-max(1, usable - spare) :]


def physical_cores(allowed: Iterable[int], root: str | os.PathLike[str] = "/") -> list[int]:
    """Of `allowed` CPUs, the first of every core."""
    seen: set[int] = set()
    cores = []
    for cpu in sorted(allowed):
        if cpu not in seen:
            cores.append(cpu)
            seen |= _siblings(cpu, Path(root))
    return cores


def cpu_quota(root: str | os.PathLike[str] = "/") -> float | None:
    """How many CPUs' time this process may use under its cgroups' limits; None: no limit."""
    return min(_quotas(Path(root)), default=None)


def _siblings(cpu: int, root: Path) -> set[int]:
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    found = {cpu}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _quotas(root: Path) -> Iterator[float]:
    """The limits of this process's own cgroup and of all visible ones above it. In a container the
    mount often shows the process's own cgroup as its root, under whatever path the host has for it;
    then the root is the only one that is read.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            tops = [root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"]
        else:
            continue
        for top in tops:
            folder = top / path.strip("/")
            folder = folder if folder.is_dir() and ".." not in folder.parts else top
            while True:
                yield from _quota_of(folder)
                if folder == top:
                    break
                folder = folder.parent


def _quota_of(folder: Path) -> Iterator[float]:
    quota, *period = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if quota.isdigit() and period and period[0].isdigit() and int(period[0]):
        yield int(quota) / int(period[0])


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""
