"""Memory: aligned, of exact size, on huge pages, pinned in chunks, there as long as needed."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

from offload import aio
from offload.aio import extension, mapping, pinning

MIB = 1 << 20
HUGE = 2 * MIB


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, HUGE - 1, HUGE, 5 * MIB + 3])
def test_size_is_exact_and_alignment_kept(nbytes):
    with aio.alloc(nbytes, huge="thp", lock=False) as buffer:
        assert len(buffer) == buffer.nbytes == len(buffer.view()) == nbytes
        assert buffer.address % (HUGE if nbytes >= HUGE else 4096) == 0
        assert buffer._mapping.nbytes == -(-nbytes // 4096) * 4096
        assert not any(buffer.view(max(0, nbytes - 10)))


def test_huge_pages_are_asked_for_before_the_first_touch():
    if mapping._thp_mode() == "never":
        pytest.skip("transparent huge pages are off")
    with aio.alloc(16 * MIB, huge="thp", lock=False) as buffer:
        assert buffer.huge_share > 0.8
        assert "madvise" in buffer.huge_reason
    with aio.alloc(16 * MIB, huge=False, lock=False) as buffer:
        assert buffer.page_kind == "4K"
        if mapping._thp_mode() == "madvise":
            assert buffer.huge_share == 0.0


def test_reserved_huge_pages():
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    if free < 4:
        with pytest.raises(OSError, match="nr_hugepages"):
            aio.alloc(100 << 30, huge="hugetlb", lock=False)
        return
    with aio.alloc(8 * MIB, huge="hugetlb", lock=False) as buffer:
        assert buffer.page_kind == "hugetlb"
        assert buffer.huge_share == 1.0


def test_nothing_is_resident_before_it_is_populated():
    before = resident()
    with aio.alloc(256 * MIB, huge="thp", lock=False, populate=False) as buffer:
        assert resident() - before < 16 * MIB
        assert buffer.chunks == ()
        assert buffer.lock_reason == "not populated yet"
        chunk = buffer.populate(64 * MIB, 96 * MIB)
        assert 24 * MIB < resident() - before < 64 * MIB
        assert (chunk.start, chunk.stop) == (64 * MIB, 96 * MIB)
        assert buffer.chunks == (chunk,)


def test_chunks_do_not_overlap_and_begin_at_huge_pages():
    with aio.alloc(10 * MIB + 5, lock=False, populate=False) as buffer:
        buffer.populate(2 * MIB, 4 * MIB)
        for start, stop, text in [
            (2 * MIB, 4 * MIB, "populated already"),
            (0, 6 * MIB, "populated already"),
            (4096, 2 * MIB, "multiple of 2097152"),
            (4 * MIB, 5 * MIB, "multiple of 2097152"),
            (6 * MIB, 12 * MIB, "not a range"),
            (6 * MIB, 6 * MIB, "not a range"),
        ]:
            with pytest.raises(ValueError, match=text):
                buffer.populate(start, stop)
        buffer.populate(4 * MIB)
        buffer.populate(0, 2 * MIB)
        assert [chunk.start for chunk in buffer.chunks] == [0, 2 * MIB, 4 * MIB]
        assert buffer.chunks[-1].stop == 10 * MIB + 5


def test_alloc_with_chunk_sizes():
    with aio.alloc(10 * MIB, lock=False, chunks=[4 * MIB, 4 * MIB, 4 * MIB]) as buffer:
        assert [(c.start, c.stop) for c in buffer.chunks] == [
            (0, 4 * MIB), (4 * MIB, 8 * MIB), (8 * MIB, 10 * MIB),
        ]  # fmt: skip
    with pytest.raises(ValueError, match="chunks add up to"):
        aio.alloc(10 * MIB, chunks=[4 * MIB])
    with pytest.raises(ValueError, match="needs populate"):
        aio.alloc(10 * MIB, chunks=[10 * MIB], populate=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"huge": "yes"}, "huge must be"),
        ({"lock": "pin"}, "lock must be"),
        ({"nbytes": 0}, "nbytes"),
    ],
)
def test_arguments_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        aio.alloc(**{"nbytes": MIB, **options})


def test_memory_that_cannot_be_had_is_a_memory_error():
    with pytest.raises(MemoryError, match="mmap"):
        aio.alloc(1 << 46, huge="thp")


def test_populating_beside_reading(direct_file, content):
    """Chunks are touched and pinned by a thread while those before them are read into."""
    with aio.alloc(8 * MIB, populate=False) as buffer, aio.AioHandle() as handle:
        ready = [threading.Event() for _ in range(4)]

        def populate() -> None:
            for i, event in enumerate(ready):
                buffer.populate(i * HUGE, (i + 1) * HUGE)
                event.set()

        thread = threading.Thread(target=populate)
        thread.start()
        for i, event in enumerate(ready):
            assert event.wait(30)
            handle.async_pread(buffer.view(i * HUGE, i * HUGE + MIB), direct_file, i * 4096)
        thread.join()
        assert handle.wait(30) == 4
        for i in range(4):
            assert buffer.view(i * HUGE, i * HUGE + MIB) == content[i * 4096 :][:MIB]
        borders = [(chunk.start, chunk.stop) for chunk in buffer.chunks]
        assert borders == [(i * HUGE, (i + 1) * HUGE) for i in range(4)]


def test_every_view_is_the_same_memory():
    buffer = aio.alloc(5 * MIB, lock=False)
    array = numpy.frombuffer(buffer.view(), numpy.uint8)
    tensor, other = buffer.tensor(), torch.from_dlpack(buffer)
    array[7] = 9
    assert tensor[7] == other[7] == buffer.view()[7] == numpy.asarray(buffer)[7] == 9
    assert numpy.from_dlpack(buffer)[7] == 9
    assert tensor.data_ptr() == other.data_ptr() == buffer.address
    assert buffer.tensor(HUGE, 3 * MIB).shape == (MIB,)
    assert tensor.dtype == torch.uint8
    assert tensor[8:24].view(torch.float64).shape == (2,)


def test_the_buffer_protocol():
    if sys.version_info < (3, 12) and extension._aio is None:
        pytest.skip("before Python 3.12 it takes the compiled extension")
    buffer = aio.alloc(5000, lock=False)
    buffer.view()[7] = 9
    view = memoryview(buffer)
    assert (view[7], len(view), view.readonly, view.format) == (9, 5000, False, "B")
    assert numpy.frombuffer(buffer, numpy.uint8)[7] == 9
    assert torch.frombuffer(buffer, dtype=torch.uint8)[7] == 9
    buffer.close()
    assert view[7] == 9
    with pytest.raises(aio.AioClosedError):
        memoryview(buffer)


def test_memory_goes_with_its_last_user():
    gc.collect()
    before = mapped()
    buffer = aio.alloc(64 * MIB, lock=False)
    tensor = buffer.tensor()[5:].view(torch.uint8)
    view = buffer.view()
    address = buffer.address
    buffer.close()
    assert buffer.closed
    with pytest.raises(aio.AioClosedError):
        buffer.view()
    with pytest.raises(aio.AioClosedError):
        buffer.populate()
    tensor.fill_(3)
    assert view[5] == 3
    assert mapped() - before >= 64 * MIB
    del tensor
    gc.collect()
    assert mapped() - before >= 64 * MIB
    view.release()
    del view
    gc.collect()
    assert mapped() - before < 32 * MIB
    assert all(start != address for start, _ in _maps())


@pytest.mark.parametrize(("mode", "kind"), [("never", "4K"), ("madvise", "thp")])
def test_ordinary_pages_in_place_of_reserved_ones_say_what_they_are(mode, kind, monkeypatch):
    monkeypatch.setattr(mapping, "_thp_mode", lambda: mode)
    with mapping.Mapping(4 * MIB) as found:
        found.kind = "hugetlb"  # as one of reserved pages, which may not be here
        found.fall_back_to_small()
        assert found.kind == kind.replace("4K", f"{os.sysconf('SC_PAGESIZE') >> 10}K")
        assert mode in found.reason
        found.touch(0, found.nbytes)


def _maps() -> list[tuple[int, int]]:
    with open("/proc/self/maps") as maps:
        return [
            (int(low, 16), int(high.split()[0], 16))
            for low, high in (line.split("-", 1) for line in maps)
        ]


def test_a_freed_region_is_not_used_for_the_memory_that_follows(direct_file, content):
    """The kernel's registration of an address must not outlive the memory behind it."""
    with aio.AioHandle(block_size=64 << 10) as handle:
        for i in range(30):
            buffer = aio.alloc(MIB, huge=False, lock=False)
            handle.pread(buffer, direct_file, 4096 * i)
            assert buffer.view() == content[4096 * i :][:MIB]
            buffer.close()
            del buffer
        stats = handle.stats()
        if handle.backend == "uring-fixed":
            assert stats["fixed_buffers"] == 30 * 16


def _pinned() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmPin:")) << 10


def test_the_kernel_lets_go_of_registered_memory(direct_file):
    with aio.AioHandle() as handle:
        if handle.backend != "uring-fixed":
            pytest.skip(f"auto took {handle.backend}")
        before = _pinned()
        buffer = aio.alloc(8 * MIB, huge=False, lock=False)
        handle.pread(buffer.view(0, MIB), direct_file)
        assert _pinned() - before >= 8 * MIB
        buffer.close()
        deadline = time.monotonic() + 10
        while _pinned() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _pinned() == before


def test_no_registration_holds_more_than_a_gib(direct_file, content):
    """A transfer across the border of two registrations goes the plain way."""
    border = 1 << 30
    with (
        aio.alloc(border + 2 * MIB, lock=False, huge=False) as buffer,
        aio.AioHandle(block_size=MIB, backend="auto") as handle,
    ):
        for start in (border - MIB, border - 4096, border):
            part = buffer.view(start, start + MIB)
            assert handle.pread(part, direct_file) == MIB
            assert part == content[:MIB]
        if handle.backend == "uring-fixed":
            assert handle.stats()["fixed_buffers"] == 2


def test_locked_memory_is_locked():
    with aio.alloc(64 << 10, lock="mlock") as buffer:
        if not buffer.locked:
            assert "ulimit -l" in buffer.lock_reason
            pytest.skip(buffer.lock_reason)
        assert not buffer.registered
        with open("/proc/self/smaps") as smaps:
            inside, locked = False, 0
            for line in smaps:
                if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                    low, high = (int(part, 16) for part in line.split()[0].split("-"))
                    inside = low < buffer.address + buffer.nbytes and high > buffer.address
                elif inside and line.startswith("Locked:"):
                    locked += int(line.split()[1]) << 10
        assert locked >= 64 << 10


def test_a_registration_that_is_refused_leaves_usable_memory(monkeypatch):
    class Refusing:
        """Stands where the CUDA runtime would, on machines that have none."""

        def register(self, address: int, nbytes: int, device: int | None) -> str | None:
            return "cudaHostRegister of 4 bytes: out of memory" if nbytes > HUGE else None

        def unregister(self, address: int) -> bool:
            undone.append(address)
            return True

    undone: list[int] = []
    monkeypatch.setattr(pinning, "cuda_state", lambda: (Refusing(), 0, "a stand-in"))
    buffer = aio.alloc(8 * MIB, lock="cuda", chunks=[HUGE, 4 * MIB, HUGE])
    assert [chunk.registered for chunk in buffer.chunks] == [True, False, True]
    assert not buffer.registered
    assert "out of memory" in buffer.lock_reason
    assert buffer.is_pinned(0, HUGE)
    assert buffer.is_pinned(100, 200)
    assert not buffer.is_pinned(0, HUGE + 1)
    assert not buffer.is_pinned(3 * MIB, 3 * MIB + 1)
    address = buffer.address
    buffer.close()
    del buffer
    gc.collect()
    assert undone == [address, address + 6 * MIB]


def test_memory_that_stays_registered_is_not_given_back(monkeypatch):
    """CUDA would take whatever comes to lie there next for pinned."""

    class Capturing:
        """The CUDA runtime while a graph is captured, which lets go of nothing."""

        busy = True

        def register(self, address: int, nbytes: int, device: int | None) -> str | None:
            return None

        def unregister(self, address: int) -> bool:
            return not self.busy

    def mapped(address: int) -> bool:
        with open("/proc/self/maps") as maps:
            spans = (line.split(maxsplit=1)[0].split("-") for line in maps)
            return any(int(low, 16) <= address < int(high, 16) for low, high in spans)

    runtime = Capturing()
    monkeypatch.setattr(pinning, "cuda_state", lambda: (runtime, 0, "a stand-in"))
    buffer = aio.alloc(HUGE, lock="cuda")
    address = buffer.address
    buffer.close()
    del buffer
    gc.collect()
    assert mapped(address) and len(pinning._kept) == 1
    runtime.busy = False
    aio.alloc(HUGE, lock="cuda").close()
    gc.collect()
    assert pinning._kept == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_memory_is_pinned_for_the_gpu():
    with aio.alloc(64 * MIB, chunks=[32 * MIB, 32 * MIB]) as buffer:
        assert buffer.registered, buffer.lock_reason
        tensor = buffer.tensor(0, 32 * MIB)
        assert tensor.is_pinned()
        tensor.random_(0, 255)
        moved = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        moved.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(moved.cpu(), tensor)
        del tensor


@pytest.mark.parametrize("nbytes", [1 << 63, (1 << 64) + 4096, 1 << 200])
def test_more_than_there_can_be_is_one_clear_error(nbytes: int) -> None:
    with pytest.raises(MemoryError, match=f"^{nbytes} bytes are more than a process can have$"):
        aio.alloc(nbytes, lock=False)
