"""The offload folder: what it refuses, that writes are whole or absent, and who waits for whom."""

import errno
import multiprocessing
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from offload.errors import BudgetError
from offload.store.folder import (
    atomic_write,
    check_folder,
    lock,
    remove_temporaries,
    sync_folder,
)

MIB = 1 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change user or mount")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- what is checked ----------------------------------------------------------------------------


def test_a_folder_is_made_and_left_clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_folder("a/b/ç") == tmp_path / "a" / "b" / "ç"
    assert check_folder(tmp_path / "a" / "b" / "ç", needed_bytes=1000).is_dir()
    assert list((tmp_path / "a" / "b" / "ç").iterdir()) == []


def test_a_link_to_a_folder_is_a_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert check_folder(tmp_path / "link") == tmp_path / "link"


@pytest.mark.parametrize("path", ["file", "file/below", "link"])
def test_a_file_where_the_folder_should_be(tmp_path, path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(NotADirectoryError) as caught:
        check_folder(tmp_path / path)
    message = str(caught.value)
    assert str(tmp_path / path) in message and "is a" in message and "\n" not in message
    assert "offload_folder=" in message
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(OSError, match=r"offload folder .*File name too long.*offload_folder="):
        check_folder(tmp_path / ("x" * 300))


def test_more_than_the_disk_holds_leaves_no_folder(tmp_path):
    needed = 1 << 60
    with pytest.raises(BudgetError, match=rf"needs {needed} bytes.*has \d+ free.*offload_folder="):
        check_folder(tmp_path / "new" / "folder", needed_bytes=needed)
    assert list(tmp_path.iterdir()) == []


def test_the_margin_counts(small_disk):
    assert check_folder(small_disk, needed_bytes=2 * MIB)
    with pytest.raises(BudgetError, match=f"needs {4 * MIB - 8192} bytes"):
        check_folder(small_disk, needed_bytes=4 * MIB - 8192)


def fill(folder):
    """Leave not one free byte."""
    with open(folder / "filler", "wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_a_full_disk_is_seen_by_the_attempt(small_disk):
    fill(small_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        check_folder(small_disk)
    assert caught.value.errno == errno.ENOSPC
    assert [file.name for file in small_disk.iterdir()] == ["filler"]


def as_nobody(work):
    """Run `work` in a child without root's rights; its failure is this test's failure."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(folder):
    with pytest.raises(PermissionError) as caught:
        check_folder(folder)
    message = str(caught.value)
    assert str(folder) in message and "not writable for user id 65534" in message
    assert "offload_folder=" in message and "\n" not in message


@as_root
def test_a_folder_of_another_user(tmp_path):
    for parent in [tmp_path, *tmp_path.parents]:  # pytest's own folders are closed to others
        if parent != Path("/") and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    as_nobody(lambda: refused(closed))
    as_nobody(lambda: refused(closed / "below"))
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    as_nobody(lambda: check_folder(opened))
    assert pwd.getpwuid(65534)


def test_a_read_only_file_system(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"not writable.*Read-only file system") as caught:
        check_folder(small_disk)
    assert caught.value.errno == errno.EROFS


# ---- whole or absent ----------------------------------------------------------------------------


def test_a_write_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "manifest.json"
    with atomic_write(target) as stream:
        stream.write(b"one")
        assert not target.exists()
    assert target.read_bytes() == b"one"
    with atomic_write(target) as stream:
        stream.write(b"two")
        assert target.read_bytes() == b"one"
    assert target.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_what_was(tmp_path, kind):
    target = tmp_path / "manifest.json"
    target.write_bytes(b"old")
    with pytest.raises(kind), atomic_write(target) as stream:
        stream.write(b"new")
        raise kind
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_longest_name_and_the_usual_rights(tmp_path):
    target = tmp_path / ("x" * 255)
    with atomic_write(target) as stream:
        stream.write(b"data")
    (tmp_path / "plain").touch()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("big", [False, True], ids=["while flushing", "while writing"])
def test_a_full_disk_leaves_nothing_and_a_retry_works(small_disk, big):
    filler = small_disk / "filler"
    fill(small_disk)
    if big:
        os.truncate(filler, filler.stat().st_size - MIB)
    before = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(OSError, match=r"disk is full.*pack\.bin.*free some space") as caught,
        atomic_write(small_disk / "pack.bin") as stream,
    ):
        stream.write(b"x" * (2 * MIB if big else 100))
    assert caught.value.errno == errno.ENOSPC
    assert [file.name for file in small_disk.iterdir()] == ["filler"]
    assert len(os.listdir("/proc/self/fd")) == before
    filler.unlink()
    with atomic_write(small_disk / "pack.bin") as stream:
        stream.write(b"x" * 2 * MIB)
    assert (small_disk / "pack.bin").stat().st_size == 2 * MIB


def test_a_killed_writer_leaves_the_old_file_and_its_part_can_be_removed(tmp_path):
    target = tmp_path / "pack.bin"
    target.write_bytes(b"old")
    child = os.fork()
    if child == 0:
        with atomic_write(target) as stream:
            stream.write(b"new")
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    os.waitpid(child, 0)
    assert target.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    remove_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == [target]


def test_the_data_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """The order that survives a power cut: data, rename, folder."""
    order = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "data"
        order.append((kind, os.fstat(descriptor).st_size if kind == "data" else None))
        real_sync(descriptor)

    def replace(source, target):
        order.append(("rename", None))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    with atomic_write(tmp_path / "pack.bin") as stream:
        stream.write(b"12345")
    assert order == [("data", 5), ("rename", None), ("folder", None)]
    sync_folder(tmp_path)
    assert order[-1] == ("folder", None)


# ---- who waits ----------------------------------------------------------------------------------

processes = multiprocessing.get_context("fork")  # a fresh interpreter would import torch first


def count_up(folder, times):
    counter = Path(folder) / "counter"
    for _ in range(times):
        with lock(folder, "pack"):
            value = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(value + 1))


def test_processes_take_turns(tmp_path):
    (tmp_path / "counter").write_text("0")
    children = [processes.Process(target=count_up, args=(tmp_path, 20)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert (tmp_path / "counter").read_text() == "60"


def hold(folder, ready):
    with lock(folder, "pack"):
        ready.set()
        time.sleep(60)


def test_a_killed_holder_frees_the_lock_and_the_waiter_says_so_once(tmp_path, capfd):
    ready = processes.Event()
    holder = processes.Process(target=hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(60)
    killer = subprocess.Popen(
        [sys.executable, "-S", "-c",
         f"import os, time; time.sleep(2.5); os.kill({holder.pid}, 9)"]
    )  # fmt: skip
    start = time.monotonic()
    with lock(tmp_path, "pack"):
        assert 1.0 < time.monotonic() - start < 30
    killer.wait()
    holder.join()
    message = capfd.readouterr().err
    assert message.count("waiting") == 1
    assert str(tmp_path / "pack.lock") in message


def test_a_free_lock_is_silent_and_names_are_apart(tmp_path, capfd):
    with lock(tmp_path, "one"), lock(tmp_path, "two"):
        pass
    with pytest.raises(ValueError), lock(tmp_path, "one"):
        raise ValueError
    start = time.monotonic()
    with lock(tmp_path, "one"):
        assert time.monotonic() - start < 0.5
    assert capfd.readouterr().err == ""


def test_readers_share(tmp_path):
    with lock(tmp_path, "pack", shared=True):
        start = time.monotonic()
        with lock(tmp_path, "pack", shared=True):
            assert time.monotonic() - start < 0.5


def test_threads_take_turns(tmp_path):
    import threading

    inside, most = [], []

    def work():
        for _ in range(5):
            with lock(tmp_path, "pack"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 20


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path):
    """The child outlives the parent; whoever waits must not wait for the child."""
    script = (
        "import os, sys, time\n"
        "from offload.store.folder import lock\n"
        "with lock(sys.argv[1], 'pack'):\n"
        "    if os.fork() == 0:\n"
        "        os.close(1); os.close(2)\n"
        "        time.sleep(20); os._exit(0)\n"
        "    print('held', flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert done.stdout == "held\n", done.stderr
    start = time.monotonic()
    with lock(tmp_path, "pack"):
        assert time.monotonic() - start < 5
