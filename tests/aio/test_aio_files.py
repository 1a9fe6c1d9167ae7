"""Opening files: what can be read past the page cache, and what cannot be opened at all."""

import errno
import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from aio_machine import needs_root, why_not

from offload import aio


def test_ext4_is_read_directly(direct_file):
    assert direct_file.direct
    assert direct_file.mem_align in (1 << n for n in range(2, 13))
    assert 512 <= direct_file.offset_align <= 4096
    assert "O_DIRECT" in direct_file.direct_reason


def test_tmpfs_says_why_not():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as plain:
        plain.write(b"x" * 10_000)
        plain.flush()
        with aio.open(plain.name) as file:
            assert not file.direct
            assert "tmpfs" in file.direct_reason
            with aio.AioHandle() as handle:
                back = bytearray(10_000)
                assert handle.pread(back, file) == 10_000
                assert back == b"x" * 10_000
        with pytest.raises(aio.AioError, match="tmpfs"):
            aio.open(plain.name, direct=True)


@pytest.mark.parametrize("backend", ["libaio", "ctypes-libaio"])
def test_native_aio_refuses_the_page_cache(backend, data_file):
    if why_not(backend) is not None:
        pytest.skip(why_not(backend))
    with aio.open(data_file, direct=False) as file, aio.AioHandle(backend=backend) as handle:
        with pytest.raises(aio.BackendUnavailable, match="without blocking"):
            handle.pread(bytearray(10), file)
        assert not file.direct
        assert file.direct_reason == "asked for direct=False"


def test_direct_true_never_goes_another_way(data_file, content):
    with aio.open(data_file, direct=True) as file, aio.AioHandle() as handle:
        buffer = aio.alloc(64 << 10, lock=False)
        grain = file.offset_align
        assert handle.pread(buffer, file, grain) == 64 << 10
        assert buffer.view() == content[grain : grain + (64 << 10)]
        for view, offset, text in [
            (buffer.view(), grain + 1, "offset"),
            (buffer.view(0, 1000), 0, "length 1000"),
            (buffer.view(1, 1 + grain), 0, "address"),
        ]:
            with pytest.raises(aio.AlignmentError, match=text) as caught:
                handle.pread(view, file, offset)
            assert isinstance(caught.value, ValueError)
            assert caught.value.errno == errno.EINVAL
        assert handle.pread(buffer, file) == 64 << 10


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda path: path.mkdir(), errno.EISDIR, "directory"),
        (lambda path: os.mkfifo(path), errno.ESPIPE, "pipe"),
        (lambda path: None, errno.ENOENT, "No such file"),
    ],
    ids=["directory", "fifo", "missing"],
)
def test_what_cannot_be_opened(tmp_path, make, code, text):
    path = tmp_path / "it"
    make(path)
    with pytest.raises(aio.AioError, match=text) as caught:
        aio.open(path)
    assert caught.value.errno == code
    assert caught.value.filename == str(path)
    with aio.AioHandle() as handle, pytest.raises(aio.AioError, match=text):
        handle.pread(bytearray(1), path)


def test_no_permission(tmp_path, run_python):
    needs_root()
    # Root reads everything: ask as nobody, in a folder that nobody can enter.
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        secret = folder / "secret.bin"
        secret.write_bytes(b"x" * 100)
        secret.chmod(0o600)
        done = run_python(
            "import os, sys\n"
            "from offload import aio\n"
            "os.setuid(65534)\n"
            "try: aio.open(sys.argv[1])\n"
            "except aio.AioError as error: print(error.errno, error)\n",
            secret,
        )
    finally:
        shutil.rmtree(folder)
    assert done.stdout.startswith(f"{errno.EACCES} "), done.stderr
    assert str(secret) in done.stdout


def test_a_file_for_reading_is_not_written(data_file, content):
    with (
        aio.open(data_file) as file,
        aio.AioHandle() as handle,
        pytest.raises(aio.AioError, match="mode='rw'"),
    ):
        handle.pwrite(b"x", file)
    assert data_file.read_bytes() == content


@pytest.mark.parametrize(("mode", "direct"), [("w", "auto"), ("r", "yes")])
def test_arguments_are_checked(data_file, mode, direct):
    with pytest.raises(ValueError, match=r"mode must be|direct must be"):
        aio.open(data_file, mode, direct)


def test_errors_survive_pickling(direct_file, content):
    with aio.AioHandle() as handle, pytest.raises(aio.ShortReadError) as caught:
        handle.pread(bytearray(10), direct_file, len(content))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is aio.ShortReadError
    assert str(again) == str(caught.value)
    assert (again.errno, again.offset, again.filename) == (
        errno.ENODATA, len(content), direct_file.path,
    )  # fmt: skip


def test_a_closed_file_keeps_no_descriptor_in_the_kernel(data_file, tmp_path):
    """A ring's table of files holds a reference of its own: it would keep deleted files' space."""
    path = tmp_path / "doomed.bin"
    shutil.copy(data_file, path)
    free = shutil.disk_usage(tmp_path).free
    with path.open("ab") as file:
        file.write(bytes(64 << 20))
        file.flush()
        os.fsync(file.fileno())
    with aio.AioHandle() as handle:
        with aio.open(path) as file:
            handle.pread(bytearray(1 << 20), file)
        path.unlink()
        handle.pread(bytearray(10), data_file)  # a later request: the ring is alive and at work
        handle.wait()
        deadline = time.monotonic() + 5
        while shutil.disk_usage(tmp_path).free < free - (32 << 20) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert shutil.disk_usage(tmp_path).free >= free - (32 << 20)
