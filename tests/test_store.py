"""The weight store over real files: the right bytes in every slot from every tier, in any order,
while loading, after errors, and nothing left after close.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offload import aio
from offload.checkpoint.expressions import Deferred, Expression, Held
from offload.checkpoint.lazy import LazyTensor
from offload.checkpoint.safetensors_header import read_header
from offload.device import HostDevice
from offload.errors import ClosedError
from offload.scheduler.plan import Budget, LayerSize, Plan, Tier, Workload, fixed_plan
from offload.scheduler.stream import Stream
from offload.store import POISON, WeightStore
from offload.store.layout import Layer

DEVICE, CPU, NVME = Tier.DEVICE, Tier.CPU, Tier.NVME
SIZES = [5000, 90_001, 300, 40_000, 7, 66_000]  # elements: of one layer more than of another


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two tensors a layer, one layer after the other as in a checkpoint."""
    generator = torch.Generator().manual_seed(1)
    content = {}
    for i, size in enumerate(SIZES):
        content[f"layers.{i}.a"] = torch.randn(size, generator=generator)
        content[f"layers.{i}.b"] = torch.randn(3, 5, generator=generator)
    save_file(content, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def layers(file: Path) -> list[Layer]:
    extents = read_header(str(file))[0]
    return [
        Layer.lay_out(
            f"layers.{i}",
            [(n, LazyTensor.of(extents[n]).expression) for n in (f"layers.{i}.a", f"layers.{i}.b")],
        )
        for i in range(len(SIZES))
    ]


def plan_for(layers: list[Layer], tiers: list[Tier], depth: int = 1, chunks: int = 4) -> Plan:
    sizes = [LayerSize(x.name, x.nbytes, x.weight_bytes) for x in layers]
    work = Workload(0, 0, depth, max_chunk_bytes=32 << 10, max_chunks=chunks)
    return fixed_plan(sizes, tiers, Budget(1 << 40, 1 << 40), work)


class Made:
    """Stores that are closed when the test ends."""

    def __init__(self) -> None:
        self.stores: list[WeightStore] = []

    def __call__(
        self,
        layers: list[Layer],
        tiers: list[Tier],
        device: HostDevice | None = None,
        **options: Any,
    ) -> WeightStore:
        store = WeightStore(layers, plan_for(layers, tiers, **options), device or HostDevice())
        self.stores.append(store)
        return store


@pytest.fixture
def make() -> Iterator[Made]:
    made = Made()
    yield made
    for store in made.stores:
        store.close()


def values(layers: list[Layer]) -> list[list[torch.Tensor]]:
    return [[place.source.read() for place in layer.places] for layer in layers]


def same(layer: Layer, memory: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    for place, value in zip(layer.places, wanted, strict=True):
        assert torch.equal(place.view(memory), value), place.name


def load(store: WeightStore, layer: int, slot: int) -> torch.Tensor:
    store.finish(store.start(layer, slot, None))
    return store.slots[slot]


# ---- bytes --------------------------------------------------------------------------------------

PLACEMENTS = {
    "files": [NVME] * 6,
    "memory": [CPU] * 6,
    "both": [CPU, NVME, NVME, CPU, CPU, NVME],
    "all tiers": [NVME, DEVICE, CPU, DEVICE, CPU, NVME],
}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("tiers", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_every_layer_in_every_slot(
    layers: list[Layer],
    make: Made,
    tiers: list[Tier],
    poison: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(POISON, "1" if poison else "0")
    wanted = values(layers)
    store = make(layers, tiers, depth=2)
    assert len(store.slots) == 3
    for i, tier in enumerate(tiers):
        if tier is DEVICE:
            same(layers[i], store.resident(layers[i]), wanted[i])
    store.open()
    store.wait_loaded()
    moving = [i for i, tier in enumerate(tiers) if tier is not DEVICE]
    chance = random.Random(2)
    for _ in range(30):
        i, slot = chance.choice(moving), chance.randrange(3)
        memory = load(store, i, slot)
        same(layers[i], memory, wanted[i])
        rest = memory[layers[i].nbytes :]
        assert not poison or bool((rest == 0xFF).all())  # nothing of an earlier layer shows
    for i in moving:
        for index, value in enumerate(wanted[i]):
            store.read_tensor(i, index).zero_()  # a tensor of its own
            assert torch.equal(store.read_tensor(i, index), value)


def test_poison_shows_what_was_never_loaded(
    layers: list[Layer], make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is too early finds NaN, not the layer that was there before."""
    monkeypatch.setenv(POISON, "1")
    device = LateDevice()
    store = make(layers, [CPU] * 6, device=device)
    store.open()
    store.wait_loaded()
    load(store, 1, 0)
    device.late = store.slots[0]
    store.start(1, 0, None)  # its copy is late
    assert bool(layers[1].places[0].view(store.slots[0]).isnan().all())


def test_computed_and_held_tensors(layers: list[Layer], make: Made) -> None:
    """A cast and a live model's weight, on the tiers that do not need a file for them."""
    base = layers[1].places[0].source
    mixed = Layer.lay_out(
        "mixed",
        [
            ("plain", base),
            ("cast", cast(base)),
            ("held", Held(torch.arange(35.0).view(5, 7).t())),
            ("empty", Held(torch.empty(0, 3))),
        ],
    )
    all_layers = [layers[0], mixed, mixed]
    wanted = values(all_layers)
    store = make(all_layers, [NVME, CPU, DEVICE])
    same(mixed, store.resident(mixed), wanted[2])
    arrived: list[int] = []
    store.open(on_layer=arrived.append)
    store.wait_loaded()
    assert arrived == [1]
    same(mixed, load(store, 1, 0), wanted[1])
    same(layers[0], load(store, 0, 1), wanted[0])


def cast(source: Expression) -> Deferred:
    return Deferred(lambda: source.read().half(), (), {}, None, source.shape, torch.float16)


@pytest.mark.parametrize("tiers", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_under_a_stream(layers: list[Layer], make: Made, tiers: list[Tier]) -> None:
    wanted = values(layers)
    store = make(layers, tiers, depth=2)
    sites = [i for i, tier in enumerate(tiers) if tier is not DEVICE]
    store.open()
    stream = Stream(store, len(store.slots), sites, 2)
    chance = random.Random(4)
    for number in range(12):
        order = list(range(len(sites)))
        if number % 3 == 2:
            chance.shuffle(order)
        for site in order[: chance.choice([2, 6, 6])]:
            slot = stream.acquire(site)
            same(layers[sites[site]], store.slots[slot], wanted[sites[site]])
            stream.release(site)
        stream.end_pass()
    stream.clear()


# ---- while the CPU tier is still loading --------------------------------------------------------


class LateDevice(HostDevice):
    """Copies into `late` do not come within the test."""

    late: torch.Tensor | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> None:
        if self.late is not None:
            start = self.late.data_ptr()
            if start <= target.data_ptr() < start + self.late.nbytes:
                return
        super().copy(target, source, after)


def slow_layer(gate: threading.Event, name: str, computed: list[str] | None = None) -> Layer:
    def compute() -> torch.Tensor:
        assert gate.wait(30)
        if computed is not None:
            computed.append(name)
        return torch.arange(100.0)

    late = Deferred(compute, (), {}, None, torch.Size((100,)), torch.float32)
    return Layer.lay_out(name, [("late", late)])


def test_the_first_pass_begins_before_all_is_loaded(layers: list[Layer], make: Made) -> None:
    gate = threading.Event()
    all_layers = [layers[0], slow_layer(gate, "slow"), layers[2]]
    wanted = values([layers[0]])[0]
    store = make(all_layers, [CPU] * 3)
    arrived: list[int] = []
    store.open(on_layer=arrived.append)
    prefetched = store.start(1, 1, None)  # returns at once
    gave_up = store.start(2, 1, None)
    store.drop(gave_up)
    gate.set()
    same(layers[0], load(store, 0, 0), wanted)
    store.finish(prefetched)
    same(all_layers[1], store.slots[1], [torch.arange(100.0)])
    store.wait_loaded()
    assert arrived == [0, 1, 2]
    same(layers[2], load(store, 2, 0), values([layers[2]])[0])


def test_what_fails_while_loading_is_raised_for_who_needs_it(
    layers: list[Layer], make: Made
) -> None:
    def fail() -> torch.Tensor:
        raise OSError(5, "the disk is gone")

    broken = Deferred(fail, (), {}, None, torch.Size((3,)), torch.float32)
    all_layers = [layers[0], layers[1], Layer.lay_out("broken", [("x", broken)]), layers[3]]
    wanted = values(layers[:1])[0]
    for tiers in ([CPU] * 4, [CPU, NVME, CPU, CPU]):
        store = make(all_layers, tiers)
        store.open()
        with pytest.raises(OSError, match="the disk is gone"):
            store.wait_loaded()
        for layer in (2, 3):  # the rest did not arrive either
            with pytest.raises(OSError, match="the disk is gone"):
                load(store, layer, 0)
        if tiers[1] is NVME:
            same(layers[1], load(store, 1, 0), values(layers[1:2])[0])
        store.close()
    assert wanted


def test_close_while_loading(make: Made) -> None:
    gate = threading.Event()
    computed: list[str] = []
    store = make([slow_layer(gate, f"slow.{i}", computed) for i in range(7)], [CPU] * 7)
    store.open()
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._host._stopped:
        time.sleep(0.001)
    gate.set()
    closing.join(20)
    assert not closing.is_alive()
    # The rest is not loaded to be thrown away, nor the first where the close came before it.
    assert computed in ([], ["slow.0"])
    with pytest.raises(ClosedError):
        store.start(3, 0, None)
    with pytest.raises(ClosedError, match="closed while its weights were loading"):
        store.wait_loaded()


# ---- errors -------------------------------------------------------------------------------------


def test_a_file_that_shrinks_between_passes(layers: list[Layer], make: Made, file: Path) -> None:
    wanted = values(layers)
    store = make(layers, [NVME] * 6)
    store.open()
    for i in range(6):
        same(layers[i], load(store, i, i % 2), wanted[i])
    os.truncate(file, os.path.getsize(file) - SIZES[-1] * 4)
    for _ in range(3):
        with pytest.raises(aio.AioError) as caught:
            load(store, 5, 0)
        assert caught.value.filename == str(file) and str(file) in str(caught.value)
        same(layers[0], load(store, 0, 0), wanted[0])


def test_a_file_that_is_gone_before_it_is_opened(
    layers: list[Layer], make: Made, file: Path
) -> None:
    store = make(layers, [NVME] * 6)
    file.unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        store.open()


def test_nothing_is_loaded_after_close(layers: list[Layer], make: Made) -> None:
    store = make(layers, PLACEMENTS["both"])
    store.open()
    store.wait_loaded()
    load(store, 1, 0)
    store.close()
    store.close()
    for layer in (0, 1):
        with pytest.raises(ClosedError, match=r"offload\.run"):
            store.start(layer, 0, None)


# ---- nothing is left ----------------------------------------------------------------------------


def handles() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


class BehindDevice(HostDevice):
    """Copies may still run when they were issued: until somebody waits for them."""

    def __init__(self) -> None:
        self.running = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any = None) -> None:
        super().copy(target, source, after)
        self.running += 1

    def synchronize(self, point: Any) -> None:
        self.running = 0


@pytest.mark.parametrize("tiers", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_memory_is_given_back_behind_the_copies_from_it(
    layers: list[Layer], make: Made, tiers: list[Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = BehindDevice()
    store = make(layers, tiers, device)
    store.open()
    store.wait_loaded()
    for i, tier in enumerate(tiers):
        if tier is not DEVICE:
            load(store, i, 0)
    given_back: list[int] = []
    close = aio.AlignedBuffer.close

    def closed(self: aio.AlignedBuffer) -> None:
        given_back.append(device.running)
        close(self)

    monkeypatch.setattr(aio.AlignedBuffer, "close", closed)
    end = store._disk._reader.close

    def delivered() -> None:  # a last copy out of the ring
        end()
        device.running += 1

    monkeypatch.setattr(store._disk._reader, "close", delivered)
    device.running = 1
    store.close()
    assert given_back and not any(given_back)


@pytest.mark.parametrize("tiers", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_close_ends_threads_and_files(layers: list[Layer], make: Made, tiers: list[Tier]) -> None:
    def once() -> None:
        store = make(layers, tiers)
        store.open()
        for i, tier in enumerate(tiers):
            if tier is not DEVICE:
                store.start(i, 0, None)  # still under way
        make.stores.remove(store)
        store.close()

    once()
    before = handles()
    for _ in range(3):
        once()
    assert handles() == before


def test_without_layers_in_files_the_disk_is_done_after_loading(
    layers: list[Layer], make: Made
) -> None:
    before = handles()
    store = make(layers, [CPU] * 6)
    store.open()
    store.wait_loaded()
    deadline = time.monotonic() + 20
    while handles() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handles() == before and store.nvme_files() == []
    same(layers[3], load(store, 3, 1), values(layers)[3])


def test_what_the_store_says_of_itself(layers: list[Layer], make: Made, file: Path) -> None:
    store = make(layers, PLACEMENTS["both"])
    store.open()
    assert store.nvme_files() == [str(file)]
    assert store.pageable_bytes == (0, "")  # nothing needs pinning where the CPU computes
    assert store.describe_io()["queue_depth"] == 4
