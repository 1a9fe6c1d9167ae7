"""The Python engines' account of a request: what each result of a system call means."""

import errno

import pytest
from aio_faults import scripted

from offload import aio
from offload.aio import extension, libaio, libaio_calls, threads
from offload.aio.engine import Shape
from offload.aio.file import Descriptors
from offload.aio.request import BOUNCE, BUFFERED, DIRECT, Request, Transfer, settle

PAGE = 4096


def begun(nbytes: int, path: str = DIRECT, write: bool = False) -> tuple[Request, Transfer, list]:
    """A request that is one transfer, at an aligned place."""
    ended: list[Request] = []
    files = Descriptors("none", -1, -1, 512, 512)
    request = Request(write, files, 1 << 20, 8 * PAGE, nbytes, ended.append)
    return request, Transfer(request, path, 0, nbytes), ended


def test_all_bytes_end_it():
    request, transfer, ended = begun(3 * PAGE)
    assert settle(transfer, 3 * PAGE) is None
    assert ended == [request]
    assert request.done()
    assert (request.outcome().kind, request.outcome().transferred) == ("ok", 3 * PAGE)


@pytest.mark.parametrize(("result", "kept"), [(2 * PAGE, 2 * PAGE), (2 * PAGE + 100, 2 * PAGE)])
def test_a_short_direct_result_goes_on_at_an_aligned_place(result, kept):
    request, transfer, ended = begun(3 * PAGE)
    left = settle(transfer, result)
    assert left is not None
    assert (left.at, left.nbytes, left.path) == (kept, 3 * PAGE - kept, DIRECT)
    assert left.offset == 8 * PAGE + kept
    assert not ended
    assert settle(left, left.nbytes) is None
    assert ended == [request]


def test_a_short_buffered_result_goes_on_where_it_stopped():
    _, transfer, _ = begun(3 * PAGE, BUFFERED)
    left = settle(transfer, 100)
    assert left is not None
    assert (left.at, left.nbytes) == (100, 3 * PAGE - 100)


def test_the_end_of_the_file():
    for path, results in ((BUFFERED, [0]), (DIRECT, [0]), (DIRECT, [100, 100, 100])):
        request, transfer, ended = begun(3 * PAGE, path)
        left: Transfer | None = transfer
        for result in results:
            assert left is not None
            left = settle(left, result)
        assert left is None
        assert ended == [request]
        outcome = request.outcome()
        assert (outcome.kind, outcome.errno) == ("short", errno.ENODATA)
        assert outcome.transferred == results[-1]
        assert outcome.offset == 8 * PAGE + results[-1]


def test_nothing_written_is_an_error():
    request, transfer, _ = begun(PAGE, BUFFERED, write=True)
    left: Transfer | None = transfer
    for _ in range(3):
        assert left is not None
        left = settle(left, 0)
    assert left is None
    assert (request.outcome().kind, request.outcome().errno) == ("error", errno.EIO)


def test_interruption_and_shortage():
    request, transfer, _ = begun(PAGE)
    assert settle(transfer, -errno.EINTR) is transfer
    for _ in range(200):
        assert settle(transfer, -errno.EAGAIN) is transfer
    assert settle(transfer, -errno.EAGAIN) is None
    assert request.outcome().errno == errno.EAGAIN


def test_what_o_direct_refuses_goes_through_the_cache():
    request, transfer, _ = begun(PAGE)
    left = settle(transfer, -errno.EINVAL)
    assert left is not None
    assert (left.path, left.at, left.nbytes) == (BUFFERED, 0, PAGE)
    assert settle(left, -errno.EINVAL) is None
    assert request.outcome().errno == errno.EINVAL


def test_a_failure_drops_the_rest_but_waits_for_it():
    ended: list[Request] = []
    files = Descriptors("none", -1, -1, 512, 512)
    request = Request(False, files, 1 << 20, 0, 3 * PAGE, ended.append)
    parts = [Transfer(request, DIRECT, i * PAGE, PAGE) for i in range(3)]
    assert settle(parts[1], -errno.EIO) is None
    assert request.failed
    assert not ended
    assert settle(parts[0], 100) is None  # short, and not tried again
    assert not ended
    assert settle(parts[2], PAGE) is None
    assert ended == [request]
    outcome = request.outcome()
    assert (outcome.errno, outcome.offset, outcome.transferred) == (errno.EIO, PAGE, PAGE + 100)


def test_cancel_is_promised_only_before_the_end():
    request, transfer, _ = begun(PAGE)
    assert request.cancel()
    assert request.cancel()
    assert settle(transfer, PAGE) is None
    assert request.outcome().kind == "cancelled"
    assert not request.cancel()
    failed, transfer, _ = begun(PAGE)
    failed.fail(errno.EIO, "error", 0)
    assert not failed.cancel()


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_a_batch_is_drained_first(direct_file, overlap):
    """Of native AIO by ctypes: whether anything is submitted while something is in flight."""
    in_flight, beside = 0, 0

    class Watched(libaio_calls.Calls):
        def __call__(self, name: str, *arguments):
            nonlocal in_flight, beside
            if name == "io_getevents":  # one at a time, so that others are still in flight
                arguments = (*arguments[:2], 1, *arguments[3:])
            result = super().__call__(name, *arguments)
            if name == "io_submit":
                if arguments[1] == 1 and arguments[2][0][0].opcode == 5:
                    return result  # the wakeup's poll
                beside += in_flight > 0
                in_flight += max(0, result)
            elif name == "io_getevents":
                events = arguments[3]
                in_flight -= sum(events[i].data != (1 << 64) - 1 for i in range(max(0, result)))
            return result

    engine = libaio.LibaioEngine(
        Shape(PAGE, 4, 1, single_submit=False, overlap_events=overlap), lambda *_: None, Watched()
    )
    buffer = aio.alloc(100 * PAGE, lock=False)
    ticket = engine.submit(1, False, direct_file.descriptors(), buffer.address, 0, 100 * PAGE)
    assert ticket.wait(30)
    engine.close()
    assert (beside > 0) is overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_the_compiled_engine_drains_too(direct_file, monkeypatch, overlap):
    if extension._aio is None:
        pytest.skip(extension.WHY_NOT)
    # One completion at a time (shuffled), so that there is room while others are in flight.
    monkeypatch.setattr(aio.backends, "select", scripted(shuffle=1))
    with aio.AioHandle(PAGE, 4, overlap_events=overlap) as handle:
        handle.pread(aio.alloc(100 * PAGE, lock=False), direct_file)
        assert (handle.stats()["system_calls"] > 0) is overlap


def test_a_threads_page_holds_the_grain_of_every_file(direct_file, monkeypatch):
    """What lies behind a page that is too small would be written over."""
    pages = []

    def moved(transfer: Transfer, bounce) -> int:
        pages.append((transfer.path, transfer.request.align, bounce and bounce.nbytes))
        return transfer.nbytes

    buffer = aio.alloc(2 * PAGE, lock=False)
    with aio.AioHandle(PAGE, 1, "python-threads") as handle:
        monkeypatch.setattr(threads, "move", moved)
        for grain in (512, 16 * PAGE, 4 * PAGE):
            direct_file.descriptors().offset_align = grain
            handle.pread(buffer.view(8, 108), direct_file, 8)  # as far into its page as the file's
    assert pages == [
        (BOUNCE, PAGE, PAGE),
        (BOUNCE, 16 * PAGE, 16 * PAGE),
        (BOUNCE, 4 * PAGE, 16 * PAGE),
    ]
