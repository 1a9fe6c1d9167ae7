"""Ctrl-C in the middle of the handle's own bookkeeping: what is under way keeps its memory, a read
that failed is never taken for one that went well, and the handle goes on.
"""

import gc
import os
import time
import weakref

import pytest

from offload import aio
from offload.aio.native import NativeEngine


def _interrupted_once(monkeypatch, owner: object, name: str) -> None:
    """Ctrl-C behind the next call of the method."""
    called = getattr(owner, name)

    def then_interrupted(*arguments):
        monkeypatch.setattr(owner, name, called)
        called(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, then_interrupted)


class Memory(bytearray):
    """That can be watched."""


def test_a_request_that_was_begun_keeps_its_memory(each_engine, data_file, content, monkeypatch):
    buffer = Memory(100_000)
    watched = weakref.ref(buffer)
    handle = aio.AioHandle(4096, 4, each_engine)
    engine = handle._engine
    # What is behind the call that begins it in the compiled engine, else behind the engine's own.
    native = isinstance(engine, NativeEngine)
    if native:
        monkeypatch.setattr(engine, "_engine", _Forwards(engine._engine))
    _interrupted_once(monkeypatch, engine._engine if native else engine, "submit")
    with pytest.raises(KeyboardInterrupt):
        handle.async_pread(buffer, data_file)
    del buffer
    part = bytearray(50_000)
    for _ in range(5):
        assert handle.pread(part, data_file, 7) == 50_000
        assert part == content[7:50_007]
    if native:  # others tell by themselves that it has ended
        assert watched() is not None
    handle.close()
    del handle, engine
    gc.collect()
    assert watched() is None


class _Forwards:
    """An object of the extension, whose methods may be replaced."""

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)


def test_a_failed_read_is_never_a_success(data_file, content, monkeypatch):
    with aio.AioHandle(4096, 4) as handle:
        if not isinstance(handle._engine, NativeEngine):
            pytest.skip("the compiled extension was not built")
        failed = handle.async_pread(bytearray(10), data_file, len(content))
        assert failed._ticket.wait(20)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(handle._engine, "_on_done", _interrupt)
            handle.stats()
        with pytest.raises(aio.ShortReadError):
            failed.result(20)
        assert handle.pread(bytearray(10), data_file) == 10


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_close_that_was_broken_off_goes_on(each_engine, data_file, monkeypatch):
    gc.collect()
    threads, files = (set(os.listdir(f"/proc/self/{x}")) for x in ("task", "fd"))
    handle = aio.AioHandle(4096, 4, each_engine)
    handle.async_pread(bytearray(100_000), data_file)
    _interrupted_once(monkeypatch, handle._engine, "close")
    with pytest.raises(KeyboardInterrupt):
        handle.close()
    with pytest.raises(aio.AioClosedError):
        handle.pread(bytearray(1), data_file)
    handle.close()
    # In the middle of it, and by nobody but the collector.
    other = aio.AioHandle(4096, 4, each_engine)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(other._engine, "close", _interrupt)
        other.close()
    del other
    gc.collect()
    deadline = time.monotonic() + 20
    while set(os.listdir("/proc/self/task")) - threads:  # one that was joined is still ending
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(set(os.listdir("/proc/self/fd")) - files) <= 1  # the listing's own
