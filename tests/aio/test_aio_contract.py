"""One contract for every backend: any range, any memory, all bytes or an exception."""

import itertools
import os
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy
import pytest
import torch

from offload import aio

MIB = 1 << 20
PAGE = 4096


def guarded(nbytes: int, skew: int) -> tuple[aio.AlignedBuffer, memoryview]:
    """Memory at `skew` from a page's start with a page of guard bytes on both sides."""
    buffer = aio.alloc(nbytes + 4 * PAGE, huge=False, lock=False)
    buffer.view()[:] = b"\xa5" * len(buffer)
    return buffer, buffer.view()[PAGE + skew : PAGE + skew + nbytes]


def guards_intact(buffer: aio.AlignedBuffer, nbytes: int, skew: int) -> bool:
    whole = bytes(buffer.view())
    before, after = whole[: PAGE + skew], whole[PAGE + skew + nbytes :]
    return set(before) | set(after) == {0xA5}


RANGES = [
    (0, 0), (0, 1), (1, 1), (4095, 2), (0, PAGE), (1, PAGE), (PAGE, PAGE), (100, 2 * PAGE),
    (512, PAGE - 512), (4095, PAGE + 2), (0, 300_000), (77, 300_000), (2 * PAGE, 128 << 10),
    (PAGE - 1, 2 * MIB + 2),
]  # fmt: skip


@pytest.mark.parametrize("skew", [0, 1, 512, 511])
def test_any_range_is_read_exactly(backend, direct_file, content, skew):
    with aio.AioHandle(block_size=64 << 10, queue_depth=4, backend=backend) as handle:
        for offset, nbytes in RANGES:
            for at in (skew, (skew + offset) % PAGE):  # the second: congruent with the offset
                buffer, view = guarded(nbytes, at)
                assert handle.pread(view, direct_file, offset) == nbytes
                assert view == content[offset : offset + nbytes], (offset, nbytes, at)
                assert guards_intact(buffer, nbytes, at), (offset, nbytes, at)


@pytest.mark.parametrize("direct", ["auto", False])
def test_ragged_neighbours_are_written_exactly(backend, tmp_path, content, direct):
    if backend in ("libaio", "ctypes-libaio") and direct is False:
        pytest.skip("native AIO refuses files in the page cache")
    path = tmp_path / "out.bin"
    cuts = [0, 1, 4095, 4097, 8192, 9000, 9001, 70_000, 1 << 20, (1 << 20) + 5, len(content)]
    with (
        aio.open(path, "rw", direct) as file,
        aio.AioHandle(block_size=64 << 10, queue_depth=8, backend=backend) as handle,
    ):
        for start, stop in itertools.pairwise(cuts):
            # At an address congruent with the offset, so that the middle goes by O_DIRECT.
            _, view = guarded(stop - start, start % PAGE)
            view[:] = content[start:stop]
            handle.async_pwrite(view, file, start)
        assert handle.wait(30) == len(cuts) - 1
        file.fsync()
        assert file.size == len(content)
        assert path.read_bytes() == content
        back = bytearray(len(content))
        handle.pread(back, file)
        assert back == content


def test_overwriting_keeps_what_lies_around(backend, tmp_path):
    path = tmp_path / "out.bin"
    path.write_bytes(b"a" * 100_000)
    with aio.open(path, "rw") as file, aio.AioHandle(backend=backend) as handle:
        handle.pwrite(b"b" * 50_001, file, 10_001)
    assert path.read_bytes() == b"a" * 10_001 + b"b" * 50_001 + b"a" * 39_998


@pytest.mark.parametrize(
    "options",
    [
        {"single_submit": True},
        {"overlap_events": False},
        {"intra_op_parallelism": 3},
        {"queue_depth": 1, "block_size": 4096 + 512},
        {"queue_depth": 64, "block_size": 4096, "intra_op_parallelism": 2},
    ],
    ids=lambda options: ",".join(options),
)
def test_every_way_to_queue_moves_the_same_bytes(backend, direct_file, content, options):
    settings = {"block_size": 64 << 10, "queue_depth": 4, **options}
    with aio.AioHandle(backend=backend, **settings) as handle:
        for key, value in settings.items():
            assert handle.describe()[key] == value
        buffers = [bytearray(500_000) for _ in range(4)]
        for i, buffer in enumerate(buffers):
            handle.async_pread(buffer, direct_file, i * 500_003)
        assert handle.wait(30) == 4
        for i, buffer in enumerate(buffers):
            assert buffer == content[i * 500_003 :][:500_000]


def test_every_kind_of_memory(backend, direct_file, content):
    with aio.AioHandle(backend=backend) as handle:
        aligned = aio.alloc(100_000, lock=False)
        assert handle.pread(aligned, direct_file) == 100_000
        assert aligned.view() == content[:100_000]

        array = numpy.zeros((10, 1000), numpy.float64)
        handle.pread(array, direct_file, 3)
        assert array.tobytes() == content[3:80_003]

        tensor = torch.zeros(7, 1111, dtype=torch.bfloat16)
        handle.pread(tensor, direct_file, 5)
        assert tensor.view(torch.uint8).numpy().tobytes() == content[5 : 5 + 2 * 7777]

        plain = bytearray(33)
        handle.pread(memoryview(plain)[3:30], direct_file, 9)
        assert plain == bytes(3) + content[9:36] + bytes(3)

        assert handle.pread(plain, direct_file, 0, nbytes=4) == 4
        assert plain[:5] == content[:4] + content[10:11]


def test_memory_that_cannot_be_used_is_refused(direct_file):
    with aio.AioHandle() as handle:
        for buffer, text in [
            (b"constant", "writable"),
            ("text", "buffer must be"),
            (numpy.zeros((10, 10))[:, ::2], "contiguous"),
            (torch.zeros(10, 10)[:, ::2], "contiguous"),
            (torch.zeros(3, device="meta"), "host memory"),
        ]:
            with pytest.raises(TypeError, match=text):
                handle.pread(buffer, direct_file)
        with pytest.raises(ValueError, match="nbytes is 9, the buffer holds 8"):
            handle.pread(bytearray(8), direct_file, nbytes=9)
        with pytest.raises(ValueError, match="file_offset is -1"):
            handle.pread(bytearray(8), direct_file, -1)
        assert handle.stats()["reads"] == 0


@pytest.mark.parametrize("value", [1.5, "4", True])
def test_bytes_are_counted_in_whole_numbers(backend, direct_file, content, value):
    """Of any kind; what is none would end a thread of the engines in Python."""
    with aio.AioHandle(backend=backend) as handle:
        memory = aio.alloc(8, lock=False)
        with pytest.raises(TypeError, match=f"nbytes must be a whole number of .* not {value!r}"):
            handle.pread(memory, direct_file, nbytes=value)
        with pytest.raises(TypeError, match=f"file_offset must be a whole number.* not {value!r}"):
            handle.pread(memory, direct_file, value)
        assert handle.pread(memory, direct_file, numpy.int64(3), numpy.uint8(5)) == 5
        assert bytes(memory.tensor()[:5].tolist()) == content[3:8]
    with pytest.raises(TypeError, match="nbytes must be a whole number"):
        aio.alloc(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", 100), ("queue_depth", 0), ("intra_op_parallelism", "2"), ("queue_depth", True)],
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        aio.AioHandle(**{name: value})


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="posix"):
        aio.AioHandle(backend="posix")


def test_paths_are_opened_and_closed(backend, data_file, content, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with aio.AioHandle(backend=backend) as handle:
        inside = len(os.listdir("/proc/self/fd"))
        for i in range(20):
            part = bytearray(1000)
            handle.pread(part, str(data_file), i)
            assert part == content[i : i + 1000]
        handle.pwrite(part, tmp_path / "new.bin")
        del part
        assert len(os.listdir("/proc/self/fd")) == inside
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "new.bin").read_bytes() == content[19:1019]


def test_results_are_counted_once(backend, direct_file):
    with aio.AioHandle(backend=backend) as handle:
        futures = [handle.async_pread(bytearray(5000), direct_file, i) for i in range(6)]
        assert futures[2].result(10) == 5000
        assert futures[2].result(10) == 5000
        assert futures[2].done()
        assert handle.wait(10) == 5
        assert handle.wait(10) == 0
        assert futures[0].result(10) == 5000
        handle.async_pread(bytearray(10), direct_file)
        assert handle.wait(10) == 1
        stats = handle.stats()
        assert (stats["reads"], stats["read_bytes"], stats["in_flight"]) == (7, 30_010, 0)


def test_a_short_file_is_an_error_and_the_handle_goes_on(backend, direct_file, content):
    with aio.AioHandle(block_size=64 << 10, queue_depth=2, backend=backend) as handle:
        for lead in (0, 1, 100, 5000, 200_000):
            buffer = bytearray(lead + 9000)
            with pytest.raises(aio.ShortReadError) as caught:
                handle.pread(buffer, direct_file, len(content) - lead)
            error = caught.value
            assert isinstance(error, EOFError)
            assert isinstance(error, OSError)
            assert error.transferred == lead
            assert error.length == lead + 9000
            assert error.filename == direct_file.path
            assert error.offset == len(content)
            assert error.backend == backend
            assert str(lead) in str(error)
            assert buffer[:lead] == content[len(content) - lead :]
        assert handle.pread(buffer, direct_file, 0) == len(buffer)
        assert handle.wait() == 0


def test_a_file_that_is_cut_under_the_reader(backend, tmp_path):
    path = tmp_path / "cut.bin"
    path.write_bytes(os.urandom(4 * MIB))
    with aio.open(path) as file, aio.AioHandle(block_size=MIB, backend=backend) as handle:
        os.truncate(path, MIB + 100)
        with pytest.raises(aio.ShortReadError) as caught:
            handle.pread(bytearray(4 * MIB), file)
        assert caught.value.transferred == MIB + 100
        assert file.size == MIB + 100


def test_wait_raises_the_first_error_after_all_have_ended(backend, direct_file, content):
    with aio.AioHandle(backend=backend) as handle:
        good = [handle.async_pread(bytearray(100_000), direct_file, 0) for _ in range(3)]
        for extra in (10, 20):
            handle.async_pread(bytearray(100 + extra), direct_file, len(content) - 100)
        with pytest.raises(aio.ShortReadError) as caught:
            handle.wait(10)
        assert len(caught.value.others) == 1
        assert "1 more failed" in str(caught.value)
        assert {caught.value.length, caught.value.others[0].length} == {110, 120}
        assert all(future.done() for future in good)
        assert handle.wait(10) == 0
        good.append(handle.async_pread(bytearray(1), direct_file))
        assert handle.wait(10) == 1


def test_leaving_the_block_reports_an_error_nobody_has_seen(backend, direct_file, content):
    with pytest.raises(aio.ShortReadError), aio.AioHandle(backend=backend) as handle:
        handle.async_pread(bytearray(100), direct_file, len(content) - 1)
    assert handle.closed
    handle.close()


def test_cancel_drops_what_is_queued_and_nothing_else(each_engine, direct_file, content):
    with aio.AioHandle(block_size=4096, queue_depth=1, backend=each_engine) as handle:
        buffers = [bytearray(2 * MIB) for _ in range(6)]
        futures = [handle.async_pread(buffer, direct_file) for buffer in buffers]
        promised = [future.cancel() for future in futures[1:]]
        assert any(promised)
        assert futures[0].result(30) == 2 * MIB
        assert buffers[0] == content[: 2 * MIB]
        for future, buffer, cancelled in zip(futures[1:], buffers[1:], promised, strict=True):
            if cancelled:
                with pytest.raises(CancelledError):
                    future.result(30)
            else:
                assert future.result(30) == 2 * MIB
                assert buffer == content[: 2 * MIB]
            assert future.done()
            assert not (future.cancel() and not cancelled)
        assert handle.wait(10) == 0
        # Really dropped: at most one of the cancelled had begun.
        whole = 1 + promised.count(False)
        assert handle.stats()["read_bytes"] < 2 * MIB * (whole + 1)
        assert handle.pread(buffers[0], direct_file) == 2 * MIB


def test_close_waits_for_what_was_begun(backend, tmp_path, content):
    with aio.open(tmp_path / "out.bin", "rw") as file:
        handle = aio.AioHandle(block_size=64 << 10, queue_depth=1, backend=backend)
        future = handle.async_pwrite(content, file)
        handle.close()
        assert future.done()
        assert future.result() == len(content)
        with pytest.raises(aio.AioClosedError, match="closed"):
            handle.pread(bytearray(1), file)
        handle.close()
    assert (tmp_path / "out.bin").read_bytes() == content


def test_close_while_another_thread_waits(backend, direct_file):
    handle = aio.AioHandle(block_size=4096, queue_depth=1, backend=backend)
    for _ in range(3):
        handle.async_pread(bytearray(2 * MIB), direct_file)
    counts = []
    waiter = threading.Thread(target=lambda: counts.append(handle.wait(60)))
    waiter.start()
    handle.close()
    waiter.join(60)
    assert counts == [3]


def test_a_closed_file_ends_its_requests_first(backend, data_file, content):
    with aio.AioHandle(block_size=4096, queue_depth=1, backend=backend) as handle:
        file = aio.open(data_file)
        buffer = bytearray(len(content))
        future = handle.async_pread(buffer, file)
        file.close()
        with pytest.raises(aio.AioClosedError, match="the file is closed"):
            handle.pread(buffer, file)
        assert future.result(30) == len(content)
        assert buffer == content


def test_a_request_keeps_its_memory(backend, direct_file):
    with aio.AioHandle(block_size=4096, queue_depth=1, backend=backend) as handle:
        for _ in range(20):
            buffer = aio.alloc(MIB, huge=False, lock=False)
            handle.async_pread(buffer, direct_file)
            buffer.close()
            del buffer
        owner = bytearray(2 * MIB)
        future = handle.async_pread(owner, direct_file)
        if not future.done():
            with pytest.raises(BufferError):
                owner.clear()
        assert handle.wait(30) == 21
        owner.clear()  # and lets go of it afterwards


def test_many_threads_share_many_handles(backend, direct_file, content):
    def work(seed: int, handle: aio.AioHandle) -> None:
        for i in range(15):
            offset = (seed * 7919 + i * 104_729) % (len(content) - 70_000)
            part = bytearray(70_000)
            handle.pread(part, direct_file, offset)
            assert part == content[offset : offset + 70_000], (seed, offset)

    handles = [aio.AioHandle(block_size=16 << 10, queue_depth=4, backend=backend) for _ in range(8)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16), handles * 2, timeout=60))
    for handle in handles:
        assert handle.wait() == 0
        handle.close()


def test_more_than_two_gib_in_one_request(each_engine, tmp_path):
    size = (2 << 30) + MIB + 7
    path = tmp_path / "large.bin"
    marks = [0, (1 << 30) - 3, (1 << 31) - 4, (1 << 31) + 11, size - 5]
    with path.open("wb") as file:
        file.truncate(size)
        for mark in marks:
            file.seek(mark)
            file.write(b"mark!"[: size - mark])
    buffer = aio.alloc(size, huge=False, lock=False)
    with aio.AioHandle(backend=each_engine) as handle:
        assert handle.pread(buffer, path) == size
    view = buffer.view()
    for mark in marks:
        assert view[mark : mark + 5] == b"mark!"


def test_offsets_beyond_32_bits(backend, tmp_path):
    path = tmp_path / "sparse.bin"
    with aio.open(path, "rw") as file, aio.AioHandle(backend=backend) as handle:
        handle.pwrite(b"far" * 3000, file, (5 << 30) + 123)
        back = bytearray(9000)
        handle.pread(back, file, (5 << 30) + 123)
        assert back == b"far" * 3000


def test_one_layer_does_not_wait_for_what_was_prefetched(each_engine, direct_file):
    with aio.AioHandle(block_size=4096, queue_depth=2, backend=each_engine) as handle:
        first = handle.async_pread(bytearray(4096), direct_file)
        buffer = aio.alloc(3 * MIB, lock=False)
        later = [handle.async_pread(buffer, direct_file) for _ in range(20)]
        first.result(30)
        assert not later[-1].done()
        handle.wait(60)


def test_a_result_can_time_out_and_still_come(each_engine, direct_file):
    with aio.AioHandle(block_size=4096, queue_depth=1, backend=each_engine) as handle:
        buffer = aio.alloc(3 * MIB, lock=False)
        futures = [handle.async_pread(buffer, direct_file) for _ in range(4)]
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="has not ended"):
            futures[-1].result(0.001)
        with pytest.raises(TimeoutError, match="requests have not ended"):
            handle.wait(0.001)
        assert time.monotonic() - started < 1
        assert futures[-1].result(60) == 3 * MIB
        assert handle.wait(60) == 3


def test_registered_memory_and_files_are_used(direct_file):
    with aio.AioHandle(block_size=64 << 10) as handle:
        if handle.backend != "uring-fixed":
            pytest.skip(f"auto took {handle.backend}")
        buffer = aio.alloc(MIB)
        assert handle.pread(buffer, direct_file) == MIB
        assert handle.pread(bytearray(MIB), direct_file, 1) == MIB
        stats = handle.stats()
        assert stats["fixed_buffers"] == 16
        assert stats["fixed_files"] >= 16
        assert handle.describe()["registered"] is True


def test_backends_read_equal_bytes(data_file, content):
    from aio_machine import why_not

    found = {}
    for name in aio.backends.BACKENDS:
        if why_not(name) is None:
            part = bytearray(1_234_567)
            with aio.AioHandle(block_size=100_000, queue_depth=3, backend=name) as handle:
                handle.pread(part, data_file, 4321)
            found[name] = bytes(part)
    assert len(found) >= 2
    assert set(found.values()) == {content[4321 : 4321 + 1_234_567]}
