"""The same work done by others: fio, and DeepSpeed's aio_handle where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import time
from typing import Any

from .hugepages import free_huge_bytes
from .work import GIB, Trial, Work

PEERS = ("fio", "deepspeed")


class PeerMissing(ValueError):
    """A peer was asked for that is not installed."""


def check(peer: str) -> None:
    """Raise PeerMissing, with what to do, where a peer cannot be run."""
    if peer == "fio" and shutil.which("fio") is None:
        raise PeerMissing("fio is not installed; install the system's package `fio`")
    if peer == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise PeerMissing("deepspeed is not installed; `pip install deepspeed` and libaio-dev")


def run(peer: str, work: Work) -> Trial:
    return _fio(work) if peer == "fio" else _deepspeed(work)


def fio_command(work: Work, huge: bool) -> list[str]:
    """fio's arguments for the same file, block, depth and memory."""
    return [
        "fio", "--name=offload", f"--filename={work.path}",
        f"--rw={'write' if work.write else 'read'}", f"--bs={work.block}",
        f"--iodepth={work.depth * work.threads}", f"--size={work.nbytes}",
        "--ioengine=io_uring", "--direct=1", "--thread", "--output-format=json",
        f"--iomem={'mmaphuge' if huge else 'mmap'}",
        *(["--end_fsync=1", "--overwrite=1"] if work.write else ["--readonly"]),
    ]  # fmt: skip


def _fio(work: Work) -> Trial:
    huge = free_huge_bytes() >= work.pool + (8 << 20)
    command = fio_command(work, huge)
    done = subprocess.run(command, capture_output=True, text=True)
    begin = done.stdout.find("{")
    if done.returncode or begin < 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(done.returncode, f"fio failed: {said[-1] if said else 'it said nothing'}")
    job: dict[str, Any] = json.loads(done.stdout[begin:])["jobs"][0]
    side = job["write" if work.write else "read"]
    # fio's own time leaves out the final fsync, which ours includes.
    seconds = max(side["runtime"], job["job_runtime"] if work.write else 0) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds * 1e3
    moved = side["io_bytes"]
    rate = moved / seconds if work.write else side["bw_bytes"]
    return Trial(rate / 1e9, cpu / (moved / GIB), "hugetlb" if huge else "4K")


def _deepspeed(work: Work) -> Trial:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(
        work.block, work.depth, False, True, work.threads
    )  # fmt: skip
    # It reads one whole tensor a request; two in flight share the same memory footprint.
    size = max(work.block, work.pool // 2)
    tensors = [handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))] * 1
    tensors.append(handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)))
    move = handle.async_pwrite if work.write else handle.async_pread
    before, start = _cpu(), time.perf_counter()
    moved = 0
    for at in range(0, work.nbytes - size + 1, size):
        if at >= 2 * size and (at // size) % 2 == 0:
            handle.wait()
        move(tensors[(at // size) % 2], os.fspath(work.path), at)
        moved += size
    handle.wait()
    seconds = time.perf_counter() - start
    used = _cpu() - before
    for tensor in tensors:
        handle.free_cpu_locked_tensor(tensor)
    return Trial(moved / seconds / 1e9, used * 1e3 / (moved / GIB), "4K")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
