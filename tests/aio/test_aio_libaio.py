"""Native AIO through ctypes: the kernel's layout, and each way to reach the calls."""

import ctypes
import errno
import os

import pytest
from aio_machine import why_not

from offload import aio
from offload.aio import libaio, libaio_calls
from offload.aio.engine import Shape


def test_the_layout_is_the_kernels():
    assert ctypes.sizeof(libaio_calls.Iocb) == 64
    assert ctypes.sizeof(libaio_calls.IoEvent) == 32
    offsets = {
        name: getattr(libaio_calls.Iocb, name).offset for name, _ in libaio_calls.Iocb._fields_
    }
    assert (offsets["opcode"], offsets["fildes"], offsets["buf"]) == (16, 20, 24)
    assert (offsets["nbytes"], offsets["offset"], offsets["flags"]) == (32, 40, 56)


def _sources() -> list:
    found = [pytest.param((), id="system calls")]
    for soname in libaio_calls.SONAMES:
        try:
            ctypes.CDLL(soname)
        except OSError:
            continue
        found.append(pytest.param((soname,), id=soname))
    return found


@pytest.mark.parametrize("sonames", _sources())
def test_each_way_to_the_calls_reads(sonames, direct_file, content):
    if why_not("ctypes-libaio") is not None:
        pytest.skip(why_not("ctypes-libaio"))
    calls = libaio_calls.Calls(sonames)
    assert calls.source == (sonames[0] if sonames else "system calls")
    done = []
    engine = libaio.LibaioEngine(
        Shape(4096, 2, 1, single_submit=False, overlap_events=True),
        lambda token, ticket: done.append(token),
        calls,
    )
    try:
        buffer = aio.alloc(50_000, lock=False)
        ticket = engine.submit(
            5, False, direct_file.descriptors(), buffer.address, 4096, buffer.nbytes
        )
        assert ticket.wait(20)
        assert ticket.outcome().kind == "ok"
        assert done == [5]
        assert buffer.view() == content[4096:54_096]
    finally:
        engine.close()


def test_queues_that_end_before_they_are_woken():
    """A queue that is at work sees by itself that no more will come. The descriptor that it is
    woken by lasts until nobody wakes it any more, or another file would be written to.
    """
    if why_not("ctypes-libaio") is not None:
        pytest.skip(why_not("ctypes-libaio"))
    before = len(os.listdir("/proc/self/fd"))
    shape = Shape(4096, 4, 2, single_submit=False, overlap_events=True)
    engine = libaio.LibaioEngine(shape, lambda *_: None)
    engine._lane.close()
    for queue in engine._queues:
        queue.wake()
        queue._thread.join(20)
    engine.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("sonames", _sources())
def test_each_way_to_the_calls_returns_the_errno(sonames):
    calls = libaio_calls.Calls(sonames)
    context = ctypes.c_void_p(12345)
    assert calls("io_submit", context, 1, None) in (-errno.EINVAL, -errno.EFAULT)
    assert calls("io_destroy", context) == -errno.EINVAL


def test_declarations_are_this_modules_own():
    """Another user's view of the same library is not changed."""
    name = next((n for n in libaio_calls.SONAMES if _loads(n)), None)
    if name is None:
        pytest.skip("no libaio here")
    theirs = ctypes.CDLL(name).io_setup
    libaio_calls.Calls((name,))
    assert theirs.argtypes is None


def _loads(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return False
    return True
