"""Faults that no disk makes on demand: results by script, behind the same interface as the rest."""

import errno
from unittest import mock

import pytest
from aio_faults import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import aio
from offload.aio import backends, extension

if extension._aio is None:
    pytest.skip(extension.WHY_NOT, allow_module_level=True)

BLOCK = 16 << 10


def handle_with(depth: int = 4, overlap: bool = True, single: bool = False, **script):
    with mock.patch.object(backends, "select", scripted(**script)):
        return aio.AioHandle(
            block_size=BLOCK, queue_depth=depth, overlap_events=overlap, single_submit=single
        )


def test_short_results_are_completed(direct_file, content):
    cuts = [("short", n) for n in (8192, 4096, 100, 12_288, 4097, 1)]
    with handle_with(faults=cuts) as handle:
        buffer = aio.alloc(200_000, lock=False)
        assert handle.pread(buffer, direct_file, 4096) == 200_000
        assert buffer.view() == content[4096 : 4096 + 200_000]


def test_short_results_stay_aligned(direct_file, content):
    """With direct=True there is no other way for what a misaligned remainder would need."""
    cuts = [("short", n) for n in (4097, 8191, 100, 12_289)]
    with aio.open(direct_file.path, direct=True) as strict, handle_with(faults=cuts) as handle:
        buffer = aio.alloc(40 * 4096, lock=False)
        assert handle.pread(buffer, strict, 4096) == 40 * 4096
        assert buffer.view() == content[4096 : 41 * 4096]


def test_interruptions_and_shortages_are_tried_again(direct_file, content):
    faults = [("error", errno.EINTR), ("error", errno.EAGAIN)] * 10 + [("refuse", errno.EAGAIN)] * 5
    with handle_with(faults=faults) as handle:
        buffer = aio.alloc(200_000, lock=False)
        assert handle.pread(buffer, direct_file, 4096) == 200_000
        assert buffer.view() == content[4096 : 4096 + 200_000]


def test_a_shortage_that_does_not_end_is_an_error(direct_file):
    with handle_with(depth=1, faults=[("error", errno.EAGAIN)] * 300) as handle:
        with pytest.raises(aio.AioError) as caught:
            handle.pread(aio.alloc(4096, lock=False), direct_file)
        assert caught.value.errno == errno.EAGAIN
        assert handle.pread(bytearray(10), direct_file) == 10


@pytest.mark.parametrize("at", range(6))
def test_one_failed_block_fails_its_request_only(direct_file, content, at):
    with handle_with(faults=[("none", 0)] * at + [("error", errno.EIO)]) as handle:
        buffers = [aio.alloc(3 * BLOCK, lock=False) for _ in range(2)]
        futures = [
            handle.async_pread(buffer, direct_file, i * 3 * BLOCK)
            for i, buffer in enumerate(buffers)
        ]
        bad, good = (0, 1) if at < 3 else (1, 0)
        assert futures[good].result(10) == 3 * BLOCK
        assert buffers[good].view() == content[good * 3 * BLOCK :][: 3 * BLOCK]
        with pytest.raises(aio.AioError) as caught:
            futures[bad].result(10)
        assert caught.value.errno == errno.EIO
        assert caught.value.offset == at * BLOCK
        assert caught.value.transferred <= 2 * BLOCK
        assert handle.pread(buffers[bad], direct_file) == 3 * BLOCK


def test_a_direct_read_that_is_refused_goes_through_the_cache(direct_file, content):
    with handle_with(faults=[("error", errno.EINVAL)] * 3) as handle:
        buffer = aio.alloc(8 * BLOCK, lock=False)
        assert handle.pread(buffer, direct_file) == 8 * BLOCK
        assert buffer.view() == content[: 8 * BLOCK]
    with (
        aio.open(direct_file.path, direct=True) as strict,
        handle_with(faults=[("error", errno.EINVAL)]) as handle,
        pytest.raises(aio.AioError, match="direct='auto'"),
    ):
        handle.pread(buffer, strict)


@pytest.mark.parametrize("refusal", [errno.EBADF, errno.EINVAL, errno.ENOMEM])
def test_a_submission_that_is_refused_fails_alone(direct_file, content, refusal):
    with handle_with(depth=8, faults=[("none", 0), ("refuse", refusal)]) as handle:
        buffers = [bytearray(BLOCK) for _ in range(4)]
        with aio.open(direct_file.path, direct=False) as file:
            futures = [handle.async_pread(b, file, i * BLOCK) for i, b in enumerate(buffers)]
            with pytest.raises(aio.AioError) as caught:
                futures[1].result(10)
            assert caught.value.errno == refusal
            for i in (0, 2, 3):
                assert futures[i].result(10) == BLOCK
                assert buffers[i] == content[i * BLOCK : (i + 1) * BLOCK]


def test_nothing_written_is_no_success(tmp_path):
    with aio.open(tmp_path / "out", "rw", direct=False) as file:
        with (
            handle_with(faults=[("short", 0)] * 9) as handle,
            pytest.raises(aio.AioError) as caught,
        ):
            handle.pwrite(bytes(1000), file)
        assert caught.value.errno == errno.EIO
        assert caught.value.transferred == 0


FAULT = st.one_of(
    st.just(("none", 0)),
    st.tuples(st.just("short"), st.sampled_from([0, 1, 511, 4096, 8192, BLOCK - 1])),
    st.tuples(
        st.just("error"), st.sampled_from([errno.EINTR, errno.EIO, errno.ENOSPC, errno.EINVAL])
    ),
    st.tuples(st.just("refuse"), st.sampled_from([errno.EAGAIN, errno.EBADF])),
)


@settings(max_examples=150, deadline=None)
@given(
    faults=st.lists(FAULT, max_size=30),
    shuffle=st.integers(0, 3),
    batch=st.integers(0, 3),
    # Deep enough, too, for several completions to be waited for together.
    depth=st.one_of(st.integers(1, 5), st.integers(8, 40)),
    overlap=st.booleans(),
    single=st.booleans(),
    ranges=st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 90_000)), max_size=5),
)
def test_every_request_ends_once_and_truthfully(
    data_file, content, faults, shuffle, batch, depth, overlap, single, ranges
):
    """No schedule of faults makes a request hang, or succeed without all its bytes."""
    with (
        aio.open(data_file) as file,
        handle_with(depth, overlap, single, faults=faults, shuffle=shuffle, batch=batch) as handle,
    ):
        requests = []
        for offset, nbytes in ranges:
            buffer = aio.alloc(nbytes + 4096, huge=False, lock=False)
            view = buffer.view(offset % 4096, offset % 4096 + nbytes)
            requests.append((offset, view, handle.async_pread(view, file, offset)))
        failed = 0
        for offset, view, future in requests:
            try:
                assert future.result(20) == len(view)
                assert view == content[offset : offset + len(view)]
            except aio.AioError as error:
                failed += 1
                assert any(kind != "none" for kind, _ in faults)
                assert error.transferred < error.length == len(view)
        assert handle.wait(10) == 0
        stats = handle.stats()
        assert (stats["reads"], stats["failed"], stats["in_flight"]) == (len(ranges), failed, 0)
