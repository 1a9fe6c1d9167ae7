"""Streams: ranges of a file in order through a small buffer, on every backend."""

import errno
import gc
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from unittest import mock

import pytest
import torch
from aio_faults import scripted
from aio_machine import why_not
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import aio
from offload.aio import backends, extension
from offload.aio.backends import BACKENDS
from offload.aio.pieces import course

PAGE = 4096
MIB = 1 << 20
RUNNING = [name for name in BACKENDS if why_not(name) is None]


def read_all(stream: aio.Stream) -> bytes:
    """Everything, with the offsets checked to follow each other within the pieces' ranges."""
    return b"".join(bytes(view) for _, view in stream)


def open_files(expected: int) -> int:
    """How many; a Python engine's thread lets go a little after the result is there."""
    deadline = time.monotonic() + 10
    while (found := len(os.listdir("/proc/self/fd"))) > expected > 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def test_a_whole_file_through_a_small_buffer(backend, direct_file, content):
    with aio.AioHandle(16 << 10, 4, backend) as handle, aio.alloc(256 << 10, lock=False) as buffer:
        at = 0
        with handle.stream(buffer, direct_file) as stream:
            for offset, view in stream:
                assert offset == at
                assert len(view) <= 64 << 10
                assert view == content[at : at + len(view)]
                at += len(view)
        assert at == len(content) == stream.nbytes
        assert list(stream) == []
        assert handle.wait(10) == 0


def test_ranges_in_any_order_of_any_length(backend, direct_file, content):
    ranges = [(100_000, 70_001), (0, 0), (5, 1), (4095, 2), (3 * MIB, 1234), (100_000, 70_001)]
    with aio.AioHandle(8192, 3, backend) as handle:
        buffer = aio.alloc(5 * 8192, lock=False)
        with handle.stream(buffer, direct_file, ranges, chunk=8192) as stream:
            pieces = [(offset, bytes(view)) for offset, view in stream]
    for offset, data in pieces:
        assert data == content[offset : offset + len(data)]
    whole = b"".join(data for _, data in pieces)
    assert whole == b"".join(content[offset : offset + nbytes] for offset, nbytes in ranges)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_what_is_kept_stays(backend, direct_file, content, keep):
    with aio.AioHandle(4096, 8, backend) as handle:
        buffer = aio.alloc(6 * 8192, lock=False)
        kept: list[tuple[int, memoryview]] = []
        for offset, view in handle.stream(buffer, direct_file, chunk=8192, keep=keep):
            kept = [*kept, (offset, view)][-keep:]
            for start, seen in kept:
                assert seen == content[start : start + len(seen)]


def test_one_slot_is_enough(backend, direct_file, content):
    with aio.AioHandle(4096, 2, backend) as handle:
        assert read_all(handle.stream(bytearray(8192), direct_file, chunk=8192)) == content


def test_every_kind_of_memory_and_a_path(direct_file, content):
    with aio.AioHandle(backend=RUNNING[0]) as handle:
        for buffer in (
            aio.alloc(MIB, lock=False),
            bytearray(100_001),
            torch.empty(50_001, dtype=torch.bfloat16),
            memoryview(bytearray(90_000))[77:],
        ):
            assert read_all(handle.stream(buffer, direct_file.path)) == content


def test_streams_and_requests_share_a_handle(each_engine, direct_file, content):
    with aio.AioHandle(8192, 4, each_engine) as handle:
        streams = [handle.stream(aio.alloc(64 << 10, lock=False), direct_file) for _ in range(3)]
        part = bytearray(300_000)
        request = handle.async_pread(part, direct_file, 11)
        parts = [b"", b"", b""]
        for pieces in zip(*streams, strict=True):
            for i, (_, view) in enumerate(pieces):
                parts[i] += bytes(view)
        assert parts == [content] * 3
        assert request.result(10) == 300_000
        assert part == content[11 : 11 + 300_000]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranges=st.lists(st.tuples(st.integers(0, 3 * MIB), st.integers(0, 60_000)), max_size=5),
    chunk=st.sampled_from([4096, 8192, 20_480, 65_536]),
    slots=st.integers(1, 5),
    spare=st.integers(0, 4095),
    keep=st.integers(1, 3),
    skew=st.sampled_from([0, 1, 512, 4095]),
    block=st.sampled_from([4096, 5000, 64 << 10]),
    depth=st.sampled_from([1, 4, 16]),
    backend=st.sampled_from(RUNNING),
)
def test_streams_equal_plain_reads(
    data_file, content, ranges, chunk, slots, spare, keep, skew, block, depth, backend
):
    ranges = [(offset, min(nbytes, len(content) - offset)) for offset, nbytes in ranges]
    nbytes = max(slots, keep) * chunk + spare
    buffer = aio.alloc(nbytes + 3 * PAGE, huge=False, lock=False)
    buffer.view()[:] = b"\xa5" * len(buffer)
    at = PAGE + skew
    expected = iter([(o, n) for o, n in ranges])
    pieces: list[tuple[int, bytes]] = []
    with aio.open(data_file) as file, aio.AioHandle(block, depth, backend) as handle:
        stream = handle.stream(
            buffer.view(at, at + nbytes), file, ranges, chunk=chunk, keep=keep
        )  # fmt: skip
        for offset, view in stream:
            pieces.append((offset, bytes(view)))
            assert 0 < len(view) <= chunk
            view.release()
    for start, length in expected:  # each range is whole, in order, and no piece spans two
        stop = start + length
        while start < stop:
            offset, data = pieces.pop(0)
            assert offset == start
            assert data == content[start : start + len(data)]
            start += len(data)
        assert start == stop
    assert pieces == []
    whole = bytes(buffer.view())
    assert set(whole[:at]) | set(whole[at + nbytes :]) <= {0xA5}


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 1 << 40),
    nbytes=st.integers(0, 1 << 20),
    chunk=st.sampled_from([4096, 12_288, 1 << 18]),
    slot=st.integers(0, 100),
)
def test_pieces_stay_in_their_slots(direct_file, start, nbytes, chunk, slot):
    span = aio.span.Span(1 << 30, 101 * chunk, None)
    found = course(direct_file.descriptors(), span, [(start, nbytes)], chunk, 1)
    at = start
    for offset, length in found.pieces():
        assert offset == at
        place = found.place(slot, offset)
        assert slot * chunk <= place
        assert place + length <= (slot + 1) * chunk
        assert (place - offset) % PAGE == 0
        at += length
    assert at == start + nbytes


@pytest.mark.parametrize("lead", [0, 1, 5000, 100_000])
def test_a_file_that_ends_within_a_stream(backend, direct_file, content, lead):
    start = len(content) - lead
    with aio.AioHandle(8192, 4, backend) as handle:
        buffer = aio.alloc(5 * 16_384, lock=False)
        stream = handle.stream(buffer, direct_file, [(start, lead + 50_000)], chunk=16_384)
        read = b""
        with pytest.raises(aio.ShortReadError) as caught:
            for _, view in stream:
                read += bytes(view)
        assert content[start:].startswith(read)
        error = caught.value
        assert error.offset >= len(content)
        assert len(read) + error.transferred == lead
        assert error.filename == direct_file.path
        assert error.backend == backend
        with pytest.raises(aio.AioClosedError):
            next(stream)
        assert handle.wait(10) == 0
        assert handle.pread(bytearray(10), direct_file) == 10


def test_nothing_is_written_after_a_close(backend, direct_file):
    with aio.AioHandle(4096, 2, backend) as handle:
        buffer = aio.alloc(MIB, lock=False)
        stream = handle.stream(buffer, direct_file)
        next(stream)
        stream.close()
        buffer.view()[:] = b"\xa5" * MIB
        with pytest.raises(aio.AioClosedError, match="stream is closed"):
            next(stream)
        stream.close()
        for _ in range(5):
            handle.pread(bytearray(100_000), direct_file)
        assert set(bytes(buffer.view())) == {0xA5}
        assert handle.wait(10) == 0


def test_closing_the_handle_ends_its_streams(backend, direct_file):
    handle = aio.AioHandle(4096, 2, backend)
    buffer = aio.alloc(MIB, lock=False)
    stream = handle.stream(buffer, direct_file)
    next(stream)
    handle.close()
    buffer.view()[:] = b"\xa5" * MIB
    with pytest.raises(aio.AioClosedError):
        next(stream)
    stream.close()
    assert set(bytes(buffer.view())) == {0xA5}
    with pytest.raises(aio.AioClosedError):
        handle.stream(buffer, direct_file)


def test_closing_while_another_thread_waits(each_engine, direct_file, content):
    for _ in range(5):
        handle = aio.AioHandle(4096, 1, each_engine)
        stream = handle.stream(aio.alloc(3 * MIB, lock=False), direct_file, chunk=MIB)
        seen: list[object] = []

        def iterate(stream: aio.Stream = stream, seen: list = seen) -> None:
            try:
                for offset, view in stream:
                    seen.append(view[:100] == content[offset : offset + 100])
            except aio.AioClosedError:
                seen.append("closed")

        reader = threading.Thread(target=iterate)
        reader.start()
        stream.close()
        reader.join(60)
        assert not reader.is_alive()
        # At the end, or told so; never silently short.
        assert seen[-1] == "closed" or stream.nbytes == len(content)
        handle.close()


def test_only_one_thread_iterates(direct_file):
    with aio.AioHandle() as handle:
        stream = handle.stream(aio.alloc(MIB, lock=False), direct_file)
        with stream._turn, pytest.raises(ValueError, match="another thread"):
            next(stream)
        next(stream)


def test_a_stream_keeps_and_lets_go(backend, data_file, content):
    gc.collect()  # what failed tests hold
    before = open_files(0)
    with aio.AioHandle(4096, 2, backend) as handle:
        inside = open_files(0)
        file = aio.open(data_file)
        buffer = aio.alloc(256 << 10, lock=False)
        stream = handle.stream(buffer, file)
        file.close()
        buffer.close()
        del buffer
        _, view = next(stream)
        assert read_all(stream) == content[len(view) :]
        assert open_files(inside) == inside
        del stream
        assert len(bytes(view)) == 64 << 10  # its memory is still there
        # Dropped in the middle: what is in flight ends first, and nothing stays open.
        for _ in range(5):
            next(handle.stream(aio.alloc(256 << 10, lock=False), data_file))
        gc.collect()
        assert open_files(inside) == inside
        assert handle.wait(10) == 0
    assert open_files(before) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"chunk": 5000}, "chunk must be a positive multiple of 4096, not 5000"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": True}, "chunk"),
        ({"chunk": 1 << 20}, "holds 0 chunks of 1048576"),
        ({"keep": 0}, "keep must be a positive integer, not 0"),
        ({"keep": 9, "chunk": 4096}, "holds 8 chunks of 4096"),
        ({"ranges": [(-1, 5)]}, r"range \(-1, 5\)"),
        ({"ranges": [(0, 1 << 63)]}, "outside of any file"),
    ],
)
def test_arguments_are_checked(direct_file, options, text):
    with aio.AioHandle() as handle:
        with pytest.raises(ValueError, match=text):
            handle.stream(aio.alloc(8 * PAGE, lock=False), direct_file, **options)
        with pytest.raises(TypeError, match="buffer must be"):
            handle.stream(b"constant", direct_file)
        with pytest.raises(TypeError, match="a range's offset must be a whole number"):
            handle.stream(aio.alloc(8 * PAGE, lock=False), direct_file, [(0.5, 3)])


def test_strict_files_take_aligned_ranges_only(direct_file, content):
    with aio.open(direct_file.path, direct=True) as strict, aio.AioHandle() as handle:
        buffer = aio.alloc(64 << 10, lock=False)
        with pytest.raises(aio.AlignmentError, match="direct=True"):
            handle.stream(buffer, strict, [(100, 4096)])
        assert read_all(handle.stream(buffer, strict, [(4096, 65_536)])) == content[4096:69_632]


def test_native_aio_refuses_streams_through_the_cache(data_file):
    for name in ("libaio", "ctypes-libaio"):
        if why_not(name) is None:
            with (
                aio.open(data_file, direct=False) as file,
                aio.AioHandle(backend=name) as handle,
                pytest.raises(aio.BackendUnavailable),
            ):
                handle.stream(bytearray(8192), file)


def test_ctrl_c_ends_the_wait(each_engine, direct_file):
    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with aio.AioHandle(4096, 1, each_engine) as handle:
            buffer = aio.alloc(3 * MIB, lock=False)
            stream = handle.stream(buffer, direct_file, [(0, 3 * MIB)] * 2000, chunk=MIB)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupt):
                for _ in stream:
                    pass
            stream.close()
            assert handle.pread(bytearray(10), direct_file) == 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_leaves_the_stream_alone(each_engine, direct_file, content):
    with aio.AioHandle(4096, 1, each_engine) as handle:
        stream = handle.stream(aio.alloc(MIB, lock=False), direct_file)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    next(stream)
                except aio.AioClosedError:
                    code = 0
                stream.close()
                del stream
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert read_all(stream) == content


# --- faults by script, in the compiled engine ---

needs_extension = pytest.mark.skipif(extension._aio is None, reason=str(extension.WHY_NOT))
BLOCK = 16 << 10


def scripted_handle(depth: int = 8, **script) -> aio.AioHandle:
    with mock.patch.object(backends, "select", scripted(**script)):
        return aio.AioHandle(BLOCK, depth)


@needs_extension
def test_short_results_within_a_stream_are_completed(direct_file, content):
    cuts = [("none", 0), ("short", 4096), ("error", errno.EINTR), ("short", 8192), ("short", 5000)]
    with scripted_handle(faults=cuts * 9, shuffle=3) as handle:
        buffer = aio.alloc(8 * BLOCK, lock=False)
        assert read_all(handle.stream(buffer, direct_file, chunk=2 * BLOCK)) == content


@needs_extension
@pytest.mark.parametrize("at", [0, 3, 10, 40])
def test_a_failed_block_ends_the_stream_at_its_piece(direct_file, content, at):
    faults = [("none", 0)] * at + [("error", errno.EIO)]
    with scripted_handle(faults=faults) as handle:
        buffer = aio.alloc(8 * BLOCK, lock=False)
        stream = handle.stream(buffer, direct_file, chunk=2 * BLOCK)
        read = b""
        with pytest.raises(aio.AioError, match="Input/output error") as caught:
            for _, view in stream:
                read += bytes(view)
        assert caught.value.errno == errno.EIO
        assert read == content[: len(read)]
        assert len(read) == at // 2 * 2 * BLOCK
        assert caught.value.offset == at * BLOCK
        assert caught.value.length == 2 * BLOCK
        buffer.view()[:] = b"\xa5" * len(buffer)
        with pytest.raises(aio.AioClosedError):
            next(stream)
        assert handle.pread(bytearray(10), direct_file) == 10
        assert set(bytes(buffer.view())) == {0xA5}


FAULT = st.one_of(
    st.just(("none", 0)),
    st.tuples(st.just("short"), st.sampled_from([0, 511, 4096, BLOCK - 1])),
    st.tuples(st.just("error"), st.sampled_from([errno.EINTR, errno.EIO, errno.EINVAL])),
    st.tuples(st.just("refuse"), st.sampled_from([errno.EAGAIN, errno.EBADF])),
)


@needs_extension
@settings(max_examples=100, deadline=None)
@given(
    faults=st.lists(FAULT, max_size=30),
    shuffle=st.integers(0, 3),
    batch=st.integers(0, 3),
    depth=st.integers(1, 20),
    ranges=st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 90_000)), max_size=4),
    keep=st.integers(1, 3),
    stop_after=st.one_of(st.none(), st.integers(0, 5)),
)
def test_a_stream_ends_once_and_truthfully(
    data_file, content, faults, shuffle, batch, depth, ranges, keep, stop_after
):
    """No schedule of faults makes it hang, or end early without an error."""
    expected = b"".join(content[offset : offset + nbytes] for offset, nbytes in ranges)
    with (
        aio.open(data_file) as file,
        scripted_handle(depth, faults=faults, shuffle=shuffle, batch=batch) as handle,
    ):
        buffer = aio.alloc(4 * BLOCK, huge=False, lock=False)
        stream = handle.stream(buffer, file, ranges, chunk=BLOCK, keep=keep)
        read = b""
        try:
            for number, (_, view) in enumerate(stream):
                if number == stop_after:
                    stream.close()
                    break
                read += bytes(view)
            else:
                assert read == expected
        except aio.AioError:
            assert any(kind != "none" for kind, _ in faults)
        except CancelledError:
            pytest.fail("a stream that nobody has closed was cancelled")
        assert expected.startswith(read)
        assert handle.wait(10) == 0
        assert handle.pread(bytearray(0), file) == 0
