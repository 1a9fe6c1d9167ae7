"""Which cores are used: hyperthreads, quotas of cgroups of both versions, cores left free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.kernels.cores import cpu_quota, physical_cores, worker_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def siblings(root: Path, groups: list[str]) -> Path:
    """A machine whose cores have these hyperthreads, as /sys says them: "0,8", or "0-1"."""
    for group in groups:
        first, _, last = group.partition("-")
        cpus = range(int(first), int(last) + 1) if last else [int(x) for x in group.split(",")]
        for cpu in cpus:
            name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            write(root, {name: group + "\n"})
    return root


@pytest.mark.parametrize(
    ("groups", "allowed", "cores"),
    [
        (["0,4", "1,5", "2,6", "3,7"], range(8), [0, 1, 2, 3]),
        (["0-1", "2-3", "4-5"], range(6), [0, 2, 4]),
        (["0-1", "2-3", "4-5"], [1, 2, 5], [1, 2, 5]),
        (["0,4", "1,5"], [4, 5], [4, 5]),
        ([], [3, 1], [1, 3]),
    ],
)
def test_one_of_each_core(
    tmp_path: Path, groups: list[str], allowed: list[int], cores: list[int]
) -> None:
    assert physical_cores(allowed, siblings(tmp_path, groups)) == cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "350000 100000\n"}, 3.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/of/host\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n1:memory:/y\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            6.0,
        ),
        ({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("cores", "quota", "spare", "used"),
    [
        (1, None, None, [0]),
        (2, None, None, [1]),
        (7, None, None, [1, 2, 3, 4, 5, 6]),
        (8, None, None, [2, 3, 4, 5, 6, 7]),
        (8, None, 0, list(range(8))),
        (4, None, 9, [3]),
        (8, 4.5, None, [5, 6, 7]),
        (8, 0.5, None, [7]),
    ],
)
def test_some_are_left_free(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    quota: float | None,
    spare: int | None,
    used: list[int],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    if quota is not None:
        text = f"{int(quota * 100000)} 100000"
        write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text})
    assert worker_cpus(spare, tmp_path) == used
