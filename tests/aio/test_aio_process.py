"""Processes, signals and the garbage collector: nothing hangs, nothing is lost, nothing leaks."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from operator import gt
from pathlib import Path

import pytest
from aio_machine import ROOT

from offload import aio

MIB = 1 << 20


def test_a_forked_child_is_told_and_the_parent_goes_on(backend, data_file, run_python):
    done = run_python(
        "import os, sys\nfrom offload import aio\n"
        "file = aio.open(sys.argv[2])\n"
        "handle = aio.AioHandle(block_size=4096, queue_depth=2, backend=sys.argv[1])\n"
        "buffer = aio.alloc(2 << 20, lock=False)\n"
        "future = handle.async_pread(buffer, file)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for use in (lambda: handle.pread(bytearray(1), file), handle.wait, future.result):\n"
        "        try: use()\n"
        "        except aio.AioClosedError as error: print('child:', error)\n"
        "    handle.close()\n"
        "    part = bytearray(100_000)\n"
        "    with aio.AioHandle(backend=sys.argv[1]) as own:\n"
        "        print('child read', own.pread(part, file))\n"
        "    del handle, future, buffer\n"
        "    sys.exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print('status', status)\n"
        "expected = open(sys.argv[2], 'rb').read(2 << 20)\n"
        "print('parent', future.result(30), bytes(buffer.view()) == expected)\n"
        "print('again', handle.pread(bytearray(50_000), file))\n",
        backend, data_file,
    )  # fmt: skip
    assert done.stdout.count("child: ") == 3, done.stdout + done.stderr
    assert done.stdout.count("forked") == 3
    for line in ("child read 100000", "status 0", f"parent {2 * MIB} True", "again 50000"):
        assert line in done.stdout, done.stdout + done.stderr


def test_a_child_does_not_inherit_the_rings_memory():
    """It would move the indices that the parent reads its completions by."""
    with aio.AioHandle() as handle:
        if not handle.backend.startswith("uring"):
            pytest.skip(f"auto took {handle.backend}")
        rings = 0
        with open("/proc/self/smaps") as smaps:
            inside = False
            for line in smaps:
                if not line.split()[0].endswith(":"):
                    inside = "io_uring" in line
                elif inside and line.startswith("VmFlags:"):
                    rings += 1
                    assert " dc" in line  # MADV_DONTFORK
        assert rings >= 3


def test_the_interpreter_ends_with_requests_under_way(backend, data_file, tmp_path, run_python):
    started = time.monotonic()
    done = run_python(
        "import sys\nfrom offload import aio\n"
        "handle = aio.AioHandle(block_size=4096, queue_depth=2, backend=sys.argv[1])\n"
        "buffer = aio.alloc(3 << 20)\n"
        "for _ in range(300): handle.async_pread(buffer, sys.argv[2])\n"
        "handle.async_pwrite(b'kept' * 100_000, sys.argv[3])\n",
        backend, data_file, tmp_path / "out",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - started < 30
    assert (tmp_path / "out").read_bytes() == b"kept" * 100_000


def test_a_forgotten_handle_is_collected(each_engine, data_file):
    threads = threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        handle = aio.AioHandle(block_size=4096, queue_depth=2, backend=each_engine)
        for _ in range(4):
            handle.async_pread(aio.alloc(MIB, lock=False), data_file)
        del handle
        gc.collect()
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > tasks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= tasks
    assert threading.active_count() <= threads


def test_control_c_ends_a_wait(run_python, data_file):
    """A request that takes a second (a script of EAGAIN) does not hold Ctrl-C up."""
    done = run_python(
        "import errno, os, signal, sys, threading, time\n"
        "from unittest import mock\n"
        "from aio_faults import scripted\n"
        "from offload import aio\nfrom offload.aio import backends, extension\n"
        "if extension._aio is None: print('skip'); sys.exit()\n"
        "busy = [('error', errno.EAGAIN)] * 190\n"
        "for name in ('result', 'wait'):\n"
        "    with mock.patch.object(backends, 'select', scripted(faults=busy)):\n"
        "        handle = aio.AioHandle(queue_depth=1)\n"
        "    future = handle.async_pread(aio.alloc(4096, lock=False), sys.argv[1])\n"
        "    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))\n"
        "    started = time.monotonic()\n"
        "    timer.start()\n"
        "    try: getattr(future if name == 'result' else handle, name)()\n"
        "    except KeyboardInterrupt:\n"
        "        print('stopped', time.monotonic() - started < 0.6, future.done())\n"
        "    print('then', future.result(20))\n",
        data_file,
    )
    if done.stdout.strip() == "skip":
        pytest.skip("the extension is not built")
    assert done.stdout.splitlines() == ["stopped True False", "then 4096"] * 2, done.stderr


def test_control_c_ends_a_wait_of_the_python_engines():
    from offload.aio.file import Descriptors
    from offload.aio.request import Request

    never = Request(False, Descriptors("none", -1, -1, 1, 1), 0, 0, 1, lambda request: None)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        never.wait(10)
    assert time.monotonic() - started < 2


def test_other_threads_run_while_one_waits(each_engine, data_file):
    counted = 0
    waiting = True

    def count() -> None:
        nonlocal counted
        while waiting:
            counted += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    with aio.AioHandle(block_size=4096, queue_depth=1, backend=each_engine) as handle:
        buffer = aio.alloc(3 * MIB, lock=False)
        file = aio.open(data_file)
        counter.start()
        try:
            for _ in range(6):
                handle.async_pread(buffer, file)
            before = counted
            handle.wait(60)
            during = counted - before
        finally:
            waiting = False
            counter.join()
    assert during > 100


def test_killed_in_mid_write_the_old_file_or_the_new_one_is_there(tmp_path):
    """The way to replace a file: write another, have the drive keep it, rename."""
    path = tmp_path / "file"
    old, size = b"old", 4 * MIB
    code = (
        "import os, sys\nfrom offload import aio\n"
        "handle = aio.AioHandle(block_size=64 << 10, queue_depth=4)\n"
        "print('go', flush=True)\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    with aio.open(sys.argv[1] + '.new', 'rw') as file:\n"
        "        handle.pwrite(bytes([n % 256]) * (4 << 20), file)\n"
        "        file.fsync()\n"
        "    os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    renamed = 0
    for i in range(5):
        path.write_bytes(old)
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.01 + 0.03 * i)
        child.kill()
        child.wait()
        child.stdout.close()
        found = path.read_bytes()
        assert found == old or (len(found) == size and set(found) == {found[0]})
        renamed += found != old
    assert renamed > 0


def _aio_nr() -> int:
    return int(Path("/proc/sys/fs/aio-nr").read_text())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_ten_thousand_requests_leave_nothing_behind(each_engine, data_file, tmp_path):
    def measure() -> tuple[int, int, int]:
        return (
            len(os.listdir("/proc/self/fd")), _aio_nr(), len(os.listdir("/proc/self/task")),
        )  # fmt: skip

    def work(count: int) -> None:
        part = bytearray(5000)
        with (
            aio.open(data_file) as file,
            aio.open(tmp_path / "out", "rw") as out,
            aio.AioHandle(block_size=4096, queue_depth=8, backend=each_engine) as handle,
        ):
            for i in range(count):
                # Results that are asked for, counted, and never looked at.
                future = handle.async_pread(part, file, i)
                if i % 3 == 0:
                    future.result(30)
                elif i % 10 == 0:
                    handle.async_pwrite(b"x" * 700, out, i * 100)
                elif i % 501 == 0:
                    handle.wait(30)

    work(1000)
    gc.collect()
    before, resident = measure(), _resident()
    work(10_000)
    gc.collect()
    # The kernel frees native queues a little after their end, and has a thread that was joined
    # among its tasks for a moment longer: so either measure may be high at first.
    deadline = time.monotonic() + 10
    while any(map(gt, after := measure(), before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after[0] == before[0]
    assert after[1] <= before[1] and after[2] <= before[2]
    assert _resident() - resident < 8 * MIB
