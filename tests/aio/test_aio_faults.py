"""Faults of real devices and file systems: the right errno, and a handle that goes on."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import aio_faults
import pytest
from aio_machine import needs_root, why_not

from offload import aio
from offload.aio import request
from offload.aio.file import Descriptors

MIB = 1 << 20


@pytest.fixture
def still_good(direct_file, content):
    """After a failure, the same handle reads."""

    def check(handle: aio.AioHandle) -> None:
        back = bytearray(100_000)
        assert handle.pread(back, direct_file, 17) == 100_000
        assert back == content[17 : 17 + 100_000]
        assert handle.wait() == 0

    return check


def test_a_device_that_fails(backend, tmp_path, still_good):
    needs_root()
    backing = tmp_path / "disk.img"
    with (
        aio_faults.loop_device(backing, 8 * MIB) as device,
        aio.open(device) as file,
        aio.AioHandle(block_size=MIB, queue_depth=4, backend=backend) as handle,
    ):
        assert file.size == 8 * MIB
        assert file.direct
        buffer = aio.alloc(4 * MIB, lock=False)
        assert handle.pread(buffer, file) == 4 * MIB
        os.truncate(backing, 2 * MIB)
        with pytest.raises(aio.AioError, match="Input/output error") as caught:
            handle.pread(buffer, file, 4 * MIB)
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == device
        assert 4 * MIB <= caught.value.offset < 8 * MIB
        assert caught.value.transferred < 4 * MIB
        assert caught.value.backend == backend
        assert "dmesg" in str(caught.value)
        assert handle.pread(buffer.view(0, MIB), file, 0) == MIB
        still_good(handle)


def test_memory_of_a_process_that_is_not_mapped(backend, still_good):
    if "libaio" in backend:
        pytest.skip("native AIO refuses files in the page cache")
    with aio.open("/proc/self/mem") as file, aio.AioHandle(backend=backend) as handle:
        assert not file.direct
        with pytest.raises(aio.AioError) as caught:
            handle.pread(bytearray(100), file, 4096)
        assert caught.value.errno == errno.EIO
        still_good(handle)


def test_dev_full(backend, still_good):
    if "libaio" in backend:
        pytest.skip("native AIO refuses files in the page cache")
    with aio.open("/dev/full", "rw") as file, aio.AioHandle(backend=backend) as handle:
        with pytest.raises(aio.AioError, match="disk is full") as caught:
            handle.pwrite(bytes(10_000), file)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.transferred == 0
        still_good(handle)


def test_a_full_disk(backend, tmp_path, still_good):
    needs_root()
    with (
        aio_faults.small_disk(tmp_path) as disk,
        aio.AioHandle(block_size=MIB, queue_depth=2, backend=backend) as handle,
    ):
        buffer = aio.alloc(16 * MIB, lock=False)
        with aio.open(disk / "file", "rw") as file:
            assert file.direct
            future = handle.async_pwrite(buffer, file)
            with pytest.raises(aio.AioError) as caught:
                future.result(60)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.transferred < 8 * MIB
            assert "bytes are free" in caught.value.hint
            assert handle.wait() == 0
            # Once there is room again, the same handle and file write.
            os.ftruncate(file.descriptors().buffered, 0)
            assert handle.pwrite(buffer.view(0, MIB), file) == MIB
        still_good(handle)


def test_a_full_tmpfs(tmp_path, run_python):
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    code = (
        "import sys\nfrom offload import aio\n"
        "with aio.AioHandle() as handle:\n"
        "    try: handle.pwrite(bytes(6 << 20), sys.argv[1] + '/file')\n"
        "    except aio.AioError as error: print(error.errno, error.transferred)\n"
        "    print(handle.pwrite(bytes(100), sys.argv[1] + '/file'))\n"
    )
    script = (
        f'mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    )
    done = run_python(
        "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)",
        *enter, "sh", "-c", script, code,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{errno.ENOSPC} "), done.stderr
    assert lines[1] == "100"


def test_a_file_size_limit(backend, tmp_path, run_python):
    done = run_python(
        "import resource, signal, sys\nfrom offload import aio\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "buffer = aio.alloc(4 << 20, lock=False)\n"
        "with aio.AioHandle(block_size=256 << 10, backend=sys.argv[1]) as handle:\n"
        "    try: handle.pwrite(buffer, sys.argv[2])\n"
        "    except aio.AioError as error: print(error.errno, error)\n"
        "    print(handle.pwrite(buffer.view(0, 1 << 20), sys.argv[2]))\n",
        backend, tmp_path / "file",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{errno.EFBIG} "), done.stderr
    assert "ulimit -f" in lines[0]
    assert lines[1] == str(MIB)


def test_a_descriptor_that_is_gone_fails_alone(each_engine, direct_file, content):
    """Native AIO takes a batch up to the bad one; the requests around it are none the worse."""
    with aio.AioHandle(block_size=4096, queue_depth=8, backend=each_engine) as handle:
        broken = aio.open(direct_file.path)
        broken._files = Descriptors("gone", -1, -1, 512, 512)
        broken._files.direct = 1 << 20  # no process has so many
        buffers = [aio.alloc(4096, lock=False) for _ in range(6)]
        futures = [
            handle.async_pread(buffer, broken if i in (1, 4) else direct_file, 4096 * i)
            for i, buffer in enumerate(buffers)
        ]
        for i, (future, buffer) in enumerate(zip(futures, buffers, strict=True)):
            if i in (1, 4):
                with pytest.raises(aio.AioError) as caught:
                    future.result(30)
                assert caught.value.errno == errno.EBADF
            else:
                assert future.result(30) == 4096
                assert buffer.view() == content[4096 * i :][:4096]
        broken._files.direct = -1


def test_signals_disturb_nothing(each_engine, direct_file, content):
    count = 0

    def count_one(*_: object) -> None:
        nonlocal count
        count += 1

    before = signal.signal(signal.SIGALRM, count_one)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with aio.AioHandle(block_size=16 << 10, queue_depth=4, backend=each_engine) as handle:
            buffer = aio.alloc(3 * MIB, lock=False)
            for _ in range(15):
                assert handle.pread(buffer, direct_file) == 3 * MIB
            assert buffer.view() == content[: 3 * MIB]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count > 5


@pytest.mark.parametrize(
    ("calls", "code", "expected", "text"),
    [
        ("io_uring_setup", errno.EPERM, "libaio", "seccomp"),
        ("io_uring_setup", errno.ENOSYS, "libaio", "no io_uring"),
        ("io_uring_setup,io_setup", errno.EPERM, "threads", "seccomp"),
    ],
)
def test_calls_that_a_container_refuses(calls, code, expected, text, data_file, content):
    if why_not("libaio") is not None:
        pytest.skip(f"libaio: {why_not('libaio')}")
    script = (
        "import json, sys\nfrom offload import aio\n"
        "part = bytearray(500_000)\n"
        "with aio.AioHandle() as handle:\n"
        "    handle.pread(part, sys.argv[1], 11)\n"
        "    found = handle.describe()\n"
        "try: aio.AioHandle(backend='uring')\n"
        "except aio.BackendUnavailable as error: named = [error.errno, str(error), error.tried]\n"
        "print(json.dumps([found, named, part.hex()]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, aio_faults.__file__, calls, str(code), sys.executable, "-c", script,
         str(data_file)],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, named, part = json.loads(done.stdout)
    assert found["requested"] == "auto"
    assert found["selected"] == expected
    refused = [entry for entry in found["tried"] if not entry["ok"]]
    assert {entry["errno"] for entry in refused} == {code}
    assert all(text in entry["reason"] for entry in refused if "uring" in entry["backend"])
    assert bytes.fromhex(part) == content[11 : 11 + 500_000]
    assert named[0] == code
    assert [entry["backend"] for entry in named[2]] == ["uring"]
    assert "uring-fixed is not in use" in done.stderr


@pytest.fixture
def few_threads(monkeypatch):
    """Lets Python start so many I/O threads from now on, and no more."""
    start = threading.Thread.start

    def allow(count: int) -> None:
        left = iter(range(count))

        def started(thread: threading.Thread) -> None:
            if thread.name.startswith("offload-") and next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)

    return allow


def test_a_process_that_may_start_few_python_threads(few_threads, data_file, content):
    few_threads(1 + 3)  # the first for the trial of the backend
    with aio.AioHandle(4096, 16, "python-threads") as handle:
        part = bytearray(100_000)
        assert handle.pread(part, data_file, 5) == 100_000
        assert part == content[5:100_005]
        assert handle.describe()["threads"] == 3
    assert not [t for t in threading.enumerate() if t.name.startswith("offload-")]


@pytest.mark.parametrize("name", ["ctypes-libaio", "python-threads"])
def test_a_process_that_may_start_no_python_thread(few_threads, name):
    if why_not(name) is not None:
        pytest.skip(why_not(name))
    few_threads(0)
    with pytest.raises(aio.BackendUnavailable, match="no I/O thread") as caught:
        aio.AioHandle(backend=name)
    assert caught.value.errno == errno.EAGAIN
    few_threads(2)  # the trial's, and one queue of two
    with pytest.raises(aio.BackendUnavailable, match="no I/O thread"):
        aio.AioHandle(backend="ctypes-libaio", intra_op_parallelism=2)
    assert not [t for t in threading.enumerate() if t.name.startswith("offload-")]


def test_native_aio_by_ctypes_without_threads(few_threads, tmp_path):
    """Nothing of a write is under way when its end finds no thread, and the handle goes on."""
    if why_not("ctypes-libaio") is not None:
        pytest.skip(why_not("ctypes-libaio"))
    path = tmp_path / "written"
    buffer = aio.alloc(8192 + 100, lock=False)
    buffer.view()[:] = os.urandom(buffer.nbytes)
    with aio.open(path, "rw") as file, aio.AioHandle(backend="ctypes-libaio") as handle:
        if not file.direct:
            pytest.skip(f"no O_DIRECT in {tmp_path}: {file.direct_reason}")
        few_threads(0)
        with pytest.raises(aio.AioError, match="no I/O thread"):
            handle.pwrite(buffer, file)
        assert handle.stats()["in_flight"] == 0 and file.size == 0
        # What O_DIRECT refuses later goes to threads, too: that request fails, and no other.
        transfer = request.Transfer(
            request.Request(True, file.descriptors(), buffer.address, 0, 4096, lambda _: None),
            request.BUFFERED, 0, 4096,
        )  # fmt: skip
        handle._engine._put(transfer)
        assert transfer.request.outcome().errno == errno.EAGAIN
        few_threads(1)
        assert handle.pwrite(buffer, file) == buffer.nbytes
    assert path.read_bytes() == buffer.view()


@pytest.mark.parametrize("name", ["threads", "libaio"])
def test_a_process_that_may_start_few_native_threads(name, tmp_path, run_python):
    """Stacks of 64 do not fit: some threads serve all, and without any the backend serves itself.
    An exception that no destructor could join would end the process.
    """
    if why_not(name) is not None:
        pytest.skip(why_not(name))
    done = run_python(
        "import os, resource, sys\nfrom offload import aio\n"
        "name, target = sys.argv[1:]\n"
        "threads = name == 'threads'\n"
        "handle = None if threads else aio.AioHandle(4096, 64, name)\n"
        "buffer = aio.alloc(8192 + 100, lock=False)\n"
        "buffer.view()[:] = os.urandom(buffer.nbytes)\n"
        "file = aio.open(target, 'rw')\n"
        "with open('/proc/self/statm') as found: pages = int(found.read().split()[0])\n"
        "most = pages * os.sysconf('SC_PAGESIZE') + ((48 << 20) if threads else (1 << 20))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "handle = handle or aio.AioHandle(4096, 64, name)\n"
        "with handle: print(handle.pwrite(buffer, file))\n"
        "print(open(target, 'rb').read() == bytes(buffer.view()))\n",
        name, tmp_path / "written",
    )  # fmt: skip
    assert done.stdout.split() == ["8292", "True"], done.stdout + done.stderr


@pytest.mark.parametrize("name", ["libaio", "ctypes-libaio"])
def test_no_native_queue_is_left(name, run_python):
    if why_not(name) is not None:
        pytest.skip(why_not(name))
    with open("/proc/sys/fs/aio-max-nr") as file:
        limit = int(file.read())
    if limit > 1 << 20:
        pytest.skip(f"fs.aio-max-nr is {limit}: too many to hold")
    done = run_python(
        "import ctypes, sys\nfrom offload import aio\nfrom offload.aio.libaio_calls import Calls\n"
        "calls, held, size = Calls(), [], int(sys.argv[2])\n"
        "while size:\n"  # others on this machine may hold some
        "    context = ctypes.c_void_p()\n"
        "    if calls('io_setup', size, ctypes.byref(context)) == 0: held.append(context)\n"
        "    else: size //= 2\n"
        "try: aio.AioHandle(backend=sys.argv[1])\n"
        "except aio.BackendUnavailable as error: print(error.errno, error)\n",
        name, limit,
    )  # fmt: skip
    assert done.stdout.startswith(f"{errno.EAGAIN} "), done.stdout + done.stderr
    assert f"fs.aio-max-nr = {limit}" in done.stdout
    assert "fs.aio-nr is" in done.stdout


def test_without_locked_memory_and_without_root(data_file, content, run_python):
    needs_root()
    done = run_python(
        "import json, os, resource, sys\nfrom offload import aio\n"
        "file = aio.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "buffer = aio.alloc(1 << 20)\n"
        "with aio.AioHandle() as handle:\n"
        "    assert handle.pread(buffer, file, 4096) == 1 << 20\n"
        "    found = handle.describe()\n"
        "read = bytes(buffer.view()).hex()\n"
        "print(json.dumps([found, buffer.locked, buffer.lock_reason, read]))\n",
        data_file,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, locked, reason, read = json.loads(done.stdout)
    assert bytes.fromhex(read) == content[4096 : 4096 + MIB]
    assert locked is False
    assert "ulimit -l` allows 0 KiB" in reason
    if why_not("uring-fixed") is None:
        fixed = found["tried"][0]
        assert (fixed["backend"], fixed["ok"]) == ("uring-fixed", False)
        assert "ulimit -l" in fixed["reason"]
        # Some kernels charge the ring itself to the limit.
        assert found["selected"] in ("uring", "libaio", "threads")


def test_more_memory_than_may_be_registered_is_read_all_the_same(data_file, content, run_python):
    """The trial's page is granted, the buffer is not: plain transfers, and describe() says so."""
    needs_root()
    done = run_python(
        "import json, os, resource, sys\nfrom offload import aio\n"
        "file = aio.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "buffer = aio.alloc(3 << 20)\n"
        "with aio.AioHandle(backend='uring-fixed') as handle:\n"
        "    assert handle.pread(buffer, file) == 3 << 20\n"
        "    print(json.dumps([handle.describe(), handle.stats(), bytes(buffer.view()).hex()]))\n",
        data_file,
    )
    if "BackendUnavailable" in done.stderr:
        pytest.skip("registered memory is not granted to other users here")
    assert done.returncode == 0, done.stderr
    found, stats, read = json.loads(done.stdout)
    assert bytes.fromhex(read) == content[: 3 * MIB]
    assert found["registered"] is False
    assert "ulimit -l" in found["registered_reason"]
    assert stats["fixed_buffers"] == 0


def test_the_environment_names_a_backend(data_file, run_python, monkeypatch):
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "python-threads")
    script = "from offload import aio\nprint(aio.AioHandle().describe()['selected'])\n"
    assert run_python(script).stdout.strip() == "python-threads"
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "posix")
    assert "OFFLOAD_AIO_BACKEND must be one of" in run_python(script).stderr
