"""Properties over drawn ranges, memory, settings and histories, against plain bytes."""

import contextlib
import os
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from aio_machine import why_not
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload import aio
from offload.aio import extension
from offload.aio.backends import BACKENDS
from offload.aio.file import Descriptors
from offload.aio.request import Request, misaligned, plan

PAGE = 4096
RUNNING = [name for name in BACKENDS if why_not(name) is None]
NEAR_PAGES = st.one_of(
    st.integers(0, 3 << 20),
    st.builds(lambda page, off: max(0, page * PAGE + off), st.integers(0, 768), st.integers(-2, 2)),
)


@pytest.fixture(scope="session")
def sized_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sizes")
    paths = []
    for size in (0, 1, 511, 512, 4095, 4096, 4097, 70_000, 1 << 20, (3 << 20) - 3):
        path = folder / str(size)
        path.write_bytes(os.urandom(size))
        paths.append(path)
    return paths


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    which=st.integers(0, 9),
    offset=NEAR_PAGES,
    nbytes=NEAR_PAGES,
    skew=st.integers(0, PAGE - 1),
    congruent=st.booleans(),
    block=st.sampled_from([4096, 5000, 16 << 10, 1 << 20]),
    depth=st.sampled_from([1, 3, 16]),
    backend=st.sampled_from(RUNNING),
    direct=st.sampled_from(["auto", False]),
)
def test_reads_equal_os_pread(
    sized_files, which, offset, nbytes, skew, congruent, block, depth, backend, direct
):
    path = sized_files[which]
    nbytes = min(nbytes, 1 << 20)
    at = PAGE + (offset % PAGE if congruent else skew)
    buffer = aio.alloc(nbytes + 3 * PAGE, huge=False, lock=False)
    buffer.view()[:] = b"\xa5" * len(buffer)
    fd = os.open(path, os.O_RDONLY)
    expected = os.pread(fd, nbytes, offset)
    os.close(fd)
    with aio.open(path, direct=direct) as file, aio.AioHandle(block, depth, backend) as handle:
        if not file.direct and backend in ("libaio", "ctypes-libaio"):
            with pytest.raises(aio.BackendUnavailable):
                handle.pread(buffer, file)
            return
        try:
            got = handle.pread(buffer.view(at, at + nbytes), file, offset)
            assert got == nbytes == len(expected)
        except aio.ShortReadError as error:
            assert len(expected) < nbytes
            assert error.transferred == len(expected)
    read = bytes(buffer.view())
    assert read[at : at + len(expected)] == expected
    assert set(read[:at]) | set(read[at + nbytes :]) == {0xA5}


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 40_000), st.integers(0, 30_000), st.integers(0, PAGE - 1)),
        min_size=1, max_size=8,
    ),
    backend=st.sampled_from(RUNNING),
)  # fmt: skip
def test_overlapping_writes_in_order_read_back(tmp_path_factory, pieces, backend):
    """Each write waits for the one before, so the later one wins wherever they overlap."""
    path = tmp_path_factory.mktemp("writes") / "out"
    expected = bytearray()
    with aio.open(path, "rw") as file, aio.AioHandle(8192, 4, backend) as handle:
        for number, (offset, nbytes, skew) in enumerate(pieces):
            buffer = aio.alloc(nbytes + PAGE, huge=False, lock=False)
            view = buffer.view(skew, skew + nbytes)
            view[:] = bytes([number + 1]) * nbytes
            assert handle.pwrite(view, file, offset) == nbytes
            if nbytes:
                expected.extend(bytes(max(0, offset + nbytes - len(expected))))
                expected[offset : offset + nbytes] = view
        assert file.size == len(expected)
        back = bytearray(len(expected))
        handle.pread(back, file)
    assert back == expected == path.read_bytes()


@settings(max_examples=500, deadline=None)
@given(
    write=st.booleans(),
    direct=st.booleans(),
    mem_align=st.sampled_from([4, 512, 4096]),
    offset_align=st.sampled_from([512, 4096, 16_384]),
    address=st.integers(0, 1 << 20),
    offset=st.integers(0, 1 << 44),
    nbytes=st.integers(0, 1 << 33),
)
def test_plans_cover_each_byte_once_and_never_share_a_page(
    write, direct, mem_align, offset_align, address, offset, nbytes
):
    files = Descriptors("none", -1, -1, mem_align, offset_align)
    files.direct = 0 if direct else -1
    request = Request(write, files, address, offset, nbytes, lambda request: None)
    parts = [(segment.path, segment.at, segment.stop) for segment in plan(request)]
    files.direct = -1

    assert [part[1] for part in parts[1:]] == [part[2] for part in parts[:-1]]
    if nbytes:
        assert (parts[0][1], parts[-1][2]) == (0, nbytes)
    else:
        assert parts == []
    grain = max(PAGE, offset_align)
    pages: dict[str, set[int]] = {}
    for path, at, stop in parts:
        start, end = offset + at, offset + stop
        if path == "direct":
            assert misaligned(files, address + at, start, stop - at) is None
        if path == "bounce":
            assert not write
            assert start // grain == (end - 1) // grain
        kind = "cache" if path == "buffered" else "drive"
        pages.setdefault(kind, set()).update({start // grain, (end - 1) // grain})
    if len(pages) == 2:
        assert not pages["cache"] & pages["drive"]
    if extension._aio is not None:
        assert parts == extension._aio.plan(
            write, direct, mem_align, offset_align, address, offset, nbytes
        )


SIZE = 200_000


class Histories(RuleBasedStateMachine):
    """Any order of reading, writing, cancelling, waiting and closing ends with the right bytes."""

    folder: Path

    @initialize(backend=st.sampled_from(RUNNING), depth=st.sampled_from([1, 2, 8]))
    def start(self, backend: str, depth: int) -> None:
        self.backend, self.depth = backend, depth
        self.path = self.folder / f"{os.getpid()}-{id(self)}"
        self.model = bytearray(os.urandom(SIZE))
        self.path.write_bytes(self.model)
        self.file = aio.open(self.path, "rw")
        self.handle = aio.AioHandle(8192, depth, backend)
        self.reads: list[tuple[aio.IOFuture, bytearray, int]] = []
        self.writes: list[aio.IOFuture] = []

    @rule(offset=st.integers(0, SIZE), nbytes=st.integers(0, 60_000))
    def read(self, offset: int, nbytes: int) -> None:
        self.settle_writes()  # what a read overlaps must not change meanwhile
        nbytes = min(nbytes, SIZE - offset)
        buffer = bytearray(nbytes)
        self.reads.append((self.handle.async_pread(buffer, self.file, offset), buffer, offset))

    @rule(offset=st.integers(0, SIZE), nbytes=st.integers(0, 60_000), fill=st.integers(0, 255))
    def write(self, offset: int, nbytes: int, fill: int) -> None:
        self.settle_reads()
        self.settle_writes()
        nbytes = min(nbytes, SIZE - offset)
        self.model[offset : offset + nbytes] = bytes([fill]) * nbytes
        self.writes.append(
            self.handle.async_pwrite(bytes([fill]) * nbytes, self.file, offset)
        )  # fmt: skip

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        future, buffer, offset = self.reads.pop(pick % len(self.reads))
        promised = future.cancel()
        try:
            assert future.result(20) == len(buffer)
            assert not promised
            assert buffer == self.model[offset : offset + len(buffer)]
        except CancelledError:
            assert promised

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 1000))
    def result(self, pick: int) -> None:
        future, buffer, offset = self.reads.pop(pick % len(self.reads))
        assert future.result(20) == len(buffer)
        assert buffer == self.model[offset : offset + len(buffer)]

    @rule()
    def wait(self) -> None:
        assert self.handle.wait(20) == len(self.reads) + len(self.writes)
        for future, _, _ in self.reads:
            assert future.done()
        # They were counted: their results can still be had, and do not count again.
        self.settle_reads()
        self.settle_writes()
        assert self.handle.wait(20) == 0

    @rule()
    def read_past_the_end(self) -> None:
        with pytest.raises(aio.ShortReadError):
            self.handle.pread(bytearray(10), self.file, SIZE - 3)

    @rule()
    def reopen(self) -> None:
        self.handle.close()
        with pytest.raises(aio.AioClosedError):
            self.handle.pread(bytearray(1), self.file)
        self.settle_reads()
        self.settle_writes()
        self.handle = aio.AioHandle(8192, self.depth, self.backend)

    def settle_reads(self) -> None:
        for future, buffer, offset in self.reads:
            assert future.result(20) == len(buffer)
            assert buffer == self.model[offset : offset + len(buffer)]
        self.reads.clear()

    def settle_writes(self) -> None:
        for future in self.writes:
            future.result(20)
        self.writes.clear()

    @invariant()
    def in_flight_is_bounded(self) -> None:
        if hasattr(self, "handle"):
            assert self.handle.stats()["in_flight"] <= len(self.reads) + len(self.writes)

    def teardown(self) -> None:
        if not hasattr(self, "handle"):
            return
        self.settle_reads()
        self.settle_writes()
        self.handle.close()
        self.file.close()
        assert self.path.read_bytes() == self.model
        with contextlib.suppress(OSError):
            self.path.unlink()


def test_histories(tmp_path):
    from hypothesis.stateful import run_state_machine_as_test

    Histories.folder = tmp_path
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )
