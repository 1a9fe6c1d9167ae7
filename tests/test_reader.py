"""The reader on real files with real asynchronous I/O: order, given-up loads, errors, the end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import aio
from offload.device import HostDevice
from offload.errors import ClosedError
from offload.store.reader import Reader, ReadLoad
from offload.store.reads import Move, ReadOp

CHUNK = 64 << 10
CHUNKS = 4
LOAD = 5 * CHUNK
FILE_BYTES = 20 * CHUNK
UNTOUCHED = 0xA5


class SlowDevice(HostDevice):
    """A CPU whose copies can be held up, and which says what it copied to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.copied_to: list[int] = []  # addresses
        self.broken: Exception | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> None:
        self.copied_to.append(target.data_ptr())
        assert self.gate.wait(30)
        super().copy(target, source, after)

    def copied(self) -> None:
        if self.broken is not None:
            raise self.broken


class Machine:
    """A file of random bytes, a device and a reader over them."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "weights")
        self.content = os.urandom(FILE_BYTES)
        Path(self.path).write_bytes(self.content)
        self.device = SlowDevice()
        self.files = {self.path: aio.open(self.path)}
        self.handle = aio.AioHandle(block_size=CHUNK, queue_depth=CHUNKS)
        self.ring = aio.alloc(CHUNK * CHUNKS, lock=False)
        memory = self.ring.tensor()
        chunks = [memory[i * CHUNK : (i + 1) * CHUNK] for i in range(CHUNKS)]
        self.reader = Reader(self.handle, self.files, chunks, self.device)

    def ops(self, start: int = 0, nbytes: int = LOAD, file: str | None = None) -> list[ReadOp]:
        """Requests for `nbytes` from `start` on, the first bytes of each chunk last."""
        found = []
        for at in range(0, nbytes, CHUNK):
            moves = (Move(CHUNK // 2, at, CHUNK // 2), Move(0, at + CHUNK // 2, CHUNK // 2))
            found.append(ReadOp(file or self.path, start + at, CHUNK, moves))
        return found

    def expected(self, start: int = 0, nbytes: int = LOAD) -> bytes:
        halves = []
        for at in range(start, start + nbytes, CHUNK):
            chunk = self.content[at : at + CHUNK]
            halves += [chunk[CHUNK // 2 :], chunk[: CHUNK // 2]]
        return b"".join(halves)

    def close(self) -> None:
        self.device.gate.set()
        self.reader.close()
        self.handle.close()
        self.ring.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def slot(nbytes: int = LOAD) -> torch.Tensor:
    return torch.full((nbytes,), UNTOUCHED, dtype=torch.uint8)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_loads_arrive_whole_and_in_order(machine: Machine) -> None:
    starts = [i % 15 * CHUNK for i in range(40)]
    slots = [slot() for _ in starts]
    loads = [
        machine.reader.load(machine.ops(start), target)
        for start, target in zip(starts, slots, strict=True)
    ]
    for start, target, load in zip(starts, slots, loads, strict=True):
        machine.reader.finish(load)
        assert target.numpy().tobytes() == machine.expected(start)
    owner = {s.data_ptr() + at: i for i, s in enumerate(slots) for at in range(0, LOAD, CHUNK // 2)}
    order = [owner[address] for address in machine.device.copied_to]
    assert order == sorted(order) and len(order) == 40 * 10
    machine.reader.finish(loads[3])  # once more is no harm


def test_a_load_of_nothing_is_done(machine: Machine) -> None:
    machine.reader.finish(machine.reader.load([], slot()))


def test_no_more_requests_than_chunks_are_under_way(machine: Machine) -> None:
    machine.device.gate.clear()
    loads = [machine.reader.load(machine.ops(), slot()) for _ in range(3)]
    until(lambda: len(machine.device.copied_to) == 1)
    time.sleep(0.05)
    assert machine.handle.stats()["reads"] + machine.handle.stats()["in_flight"] <= CHUNKS
    assert not any(load.done.is_set() for load in loads)
    machine.device.gate.set()
    for load in loads:
        machine.reader.finish(load)


def test_a_dropped_load_writes_nothing_more(machine: Machine) -> None:
    machine.device.gate.clear()
    target = slot()
    load = machine.reader.load(machine.ops(), target)
    until(lambda: len(machine.device.copied_to) == 1)  # in the middle of the first chunk
    dropping = in_thread(lambda: machine.reader.drop(load))
    dropping.join(0.1)
    assert dropping.is_alive()  # bytes are still being written: it may not return
    machine.device.gate.set()
    dropping.join(20)
    assert not dropping.is_alive()
    target.fill_(UNTOUCHED)
    after = slot()
    machine.reader.finish(machine.reader.load(machine.ops(CHUNK), after))
    assert bool((target == UNTOUCHED).all())
    assert after.numpy().tobytes() == machine.expected(CHUNK)
    assert len(machine.device.copied_to) == 2 + 10  # one chunk of the dropped load, no more


def test_a_load_dropped_before_its_turn_is_not_read(machine: Machine) -> None:
    machine.device.gate.clear()
    first, second, third = slot(), slot(), slot()
    loads = [machine.reader.load(machine.ops(), s) for s in (first, second, third)]
    until(lambda: len(machine.device.copied_to) == 1)
    dropping = in_thread(lambda: machine.reader.drop(loads[1]))
    until(lambda: loads[1].cancelled)
    machine.device.gate.set()
    dropping.join(20)
    machine.reader.finish(loads[2])
    assert bool((second == UNTOUCHED).all())
    assert third.numpy().tobytes() == machine.expected()
    assert first.numpy().tobytes() == machine.expected()
    machine.reader.drop(loads[2])  # done already
    assert machine.handle.stats()["reads"] == 5 + 5


def works(machine: Machine) -> None:
    """All chunks are there still: more loads than there are chunks arrive."""
    for _ in range(2 * CHUNKS):
        target = slot()
        load = machine.reader.load(machine.ops(), target)
        assert load.done.wait(20)
        machine.reader.finish(load)
        assert target.numpy().tobytes() == machine.expected()


def test_a_file_that_ends_early_fails_its_load_alone(machine: Machine) -> None:
    os.truncate(machine.path, 7 * CHUNK + 100)
    before, broken, after = slot(), slot(), slot()
    loads = [
        machine.reader.load(machine.ops(0), before),
        machine.reader.load(machine.ops(4 * CHUNK), broken),
        machine.reader.load(machine.ops(2 * CHUNK), after),
    ]
    machine.reader.finish(loads[0])
    for _ in range(2):  # whoever asks is told
        with pytest.raises(aio.AioError) as caught:
            machine.reader.finish(loads[1])
        assert caught.value.filename == machine.path
        assert caught.value.offset == 7 * CHUNK + 100
        assert machine.path in str(caught.value)
    machine.reader.finish(loads[2])
    assert after.numpy().tobytes() == machine.expected(2 * CHUNK)
    works(machine)


def test_requests_that_cannot_begin_fail_their_load_alone(machine: Machine) -> None:
    other = machine.path + "-2"
    Path(other).write_bytes(machine.content)
    machine.files[other] = aio.open(other)
    machine.files[other].close()
    for _ in range(3 * CHUNKS):  # each one would lose a chunk for good
        load = machine.reader.load(machine.ops(file=other), slot())
        assert load.done.wait(20)
        with pytest.raises(aio.AioClosedError, match="the file is closed"):
            machine.reader.finish(load)
        load = machine.reader.load(machine.ops(file="nowhere"), slot())
        assert load.done.wait(20)
        with pytest.raises(KeyError):
            machine.reader.finish(load)
    works(machine)


def test_a_slot_that_is_too_small_fails_its_load_alone(machine: Machine) -> None:
    for _ in range(3 * CHUNKS):
        load = machine.reader.load(machine.ops(), slot(CHUNK))
        with pytest.raises(RuntimeError, match="size"):
            machine.reader.finish(load)
    works(machine)


def test_a_failing_device_fails_the_load_and_not_the_reader(machine: Machine) -> None:
    machine.device.broken = RuntimeError("CUDA error: an illegal memory access")
    load = machine.reader.load(machine.ops(), slot())
    assert load.done.wait(20)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        machine.reader.finish(load)
    machine.device.broken = None
    works(machine)


def test_close_with_loads_under_way(machine: Machine) -> None:
    machine.device.gate.clear()
    loads = [machine.reader.load(machine.ops(), slot()) for _ in range(50)]
    until(lambda: len(machine.device.copied_to) == 1)
    errors: list[BaseException] = []

    def wait_for(load: ReadLoad) -> None:
        try:
            machine.reader.finish(load)
        except ClosedError as error:
            errors.append(error)

    waiting = in_thread(lambda: wait_for(loads[-1]))
    closing = in_thread(machine.reader.close)
    until(lambda: machine.reader._closed)
    machine.device.gate.set()
    closing.join(20)
    waiting.join(20)
    assert not closing.is_alive() and not waiting.is_alive()
    assert "released" in str(errors[0])
    assert all(load.done.is_set() for load in loads)
    assert len(machine.device.copied_to) < 10 * 10  # the rest was not read
    assert not any(thread.is_alive() for thread in machine.reader._threads)
    with pytest.raises(ClosedError, match=r"offload\.run"):
        machine.reader.load(machine.ops(), slot())
    machine.reader.close()


def test_many_loads_some_of_them_given_up(machine: Machine) -> None:
    chance = random.Random(5)
    slots = [slot() for _ in range(3)]
    under_way: list[ReadLoad | None] = [None] * 3
    starts = [0] * 3
    kept = 0
    for _ in range(600):
        i = chance.randrange(3)
        load = under_way[i]
        if load is not None and chance.random() < 0.6:
            machine.reader.finish(load)
            assert slots[i].numpy().tobytes() == machine.expected(starts[i])
            kept += 1
        elif load is not None:
            machine.reader.drop(load)
        starts[i] = chance.randrange(15) * CHUNK
        under_way[i] = machine.reader.load(machine.ops(starts[i]), slots[i])
    assert kept > 200
