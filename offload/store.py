"""The weight store: the bytes of every layer, wherever they rest, and their way into a slot."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload import aio
from offload.device import ComputeDevice
from offload.errors import ClosedError
from offload.layout import Layer
from offload.lazy import Pieces
from offload.reader import Reader, ReadLoad
from offload.reads import ReadOp, plan_reads
from offload.scheduler.plan import Plan, Tier

# Set to 1 to fill a slot with NaN patterns before it is loaded anew: what still reads it then
# shows.
POISON = "OFFLOAD_POISON"
_POISON_BYTE = 0xFF  # NaN in every IEEE format from fp8 to fp64


@dataclass(slots=True)
class _Copied:
    """A load from CPU memory: already on the device's queue."""

    point: Any


class WeightStore:
    """Holds layers on their tiers and brings them to the slots: the `Link` that the stream drives.

    `layers` and the plan's tiers correspond one to one. All memory is taken here, once.
    """

    def __init__(self, layers: Sequence[Layer], plan: Plan, device: ComputeDevice) -> None:
        self._layers = list(layers)
        self._plan = plan
        self._device = device
        self._poison = os.environ.get(POISON) == "1"
        # Pinned memory is for copies to a GPU; where the CPU computes, the kernel may do as it
        # likes.
        self._lock: Literal["auto", False] = "auto" if device.torch_device.type == "cuda" else False
        self._closed = False
        self._files: dict[str, aio.AioFile] = {}
        self._pinned: dict[int, aio.AlignedBuffer] = {}
        self._in_memory: dict[int, torch.Tensor] = {}  # layer: its bytes in slot layout, CPU tier
        self._ring: list[aio.AlignedBuffer] = []
        self._handle: aio.AioHandle | None = None
        self._reader: Reader | None = None
        self._ops: dict[int, tuple[ReadOp, ...]] = {}
        with torch.inference_mode(False):
            self.slots = [device.allocate(plan.slot_bytes) for _ in range(plan.slots)]
        self._targets = [
            [
                slot[: layer.nbytes] if layer.nbytes <= plan.slot_bytes else slot
                for layer in self._layers
            ]
            for slot in self.slots
        ]

    # -- loading, once
    # ------------------------------------------------------------------------------

    def resident(self, layer: Layer) -> torch.Tensor:
        """The layer's bytes on the compute device, in slot layout, for good."""
        with torch.inference_mode(False):
            target = self._device.allocate(layer.nbytes)
        self._fill([(layer, lambda: target, lambda: None)])
        return target

    def load_cpu_tier(self, on_layer: Callable[[int], None] = lambda index: None) -> None:
        """Read every layer of the CPU tier into pinned memory, one mapping a layer.

        Memory is touched and pinned ahead of the reads, so that the disk does not wait for it.
        `on_layer` is called with a layer's index once it has arrived.
        """
        indices = [i for i, tier in enumerate(self._plan.tiers) if tier is Tier.CPU]
        with ThreadPoolExecutor(1, thread_name_prefix="offload-pin") as pool:
            buffers = {
                i: pool.submit(aio.alloc, max(1, self._layers[i].nbytes), lock=self._lock)
                for i in indices
            }

            def memory(i: int) -> torch.Tensor:
                self._pinned[i] = buffers[i].result()
                self._in_memory[i] = self._pinned[i].tensor()[: self._layers[i].nbytes]
                return self._in_memory[i]

            try:
                self._fill(
                    [
                        (
                            self._layers[i],
                            functools.partial(memory, i),
                            functools.partial(on_layer, i),
                        )
                        for i in indices
                    ]
                )
            except BaseException:
                for future in buffers.values():
                    future.cancel()
                raise

    def open_nvme_tier(self) -> None:
        """Prepare the requests of every layer that stays in files; without any, the reader has done
        its work.
        """
        for i, tier in enumerate(self._plan.tiers):
            if tier is Tier.NVME:
                self._ops[i] = self._reads(self._layers[i])
        if not self._ops:
            self._close_reader()

    def _fill(
        self,
        jobs: Sequence[tuple[Layer, Callable[[], torch.Tensor], Callable[[], None]]],
    ) -> None:
        """Read each job's layer into the memory its first function gives; its second is called when
        it has arrived.

        The next layer is asked for before the one before it has arrived.
        """
        on_the_way: list[tuple[ReadLoad | None, Callable[[], None]]] = []

        def arrive() -> None:
            load, arrived = on_the_way.pop(0)
            if load is not None and self._reader is not None:
                self._device.synchronize(self._reader.finish(load))
            arrived()

        for layer, memory, arrived in jobs:
            plain = [p for p in layer.places if isinstance(p.source, Pieces)]
            ops = self._reads(Layer(layer.name, tuple(plain), layer.nbytes)) if plain else ()
            target = memory()
            load = self._reader.load(ops, target) if ops and self._reader is not None else None
            on_the_way.append((load, arrived))
            for (
                place
            ) in layer.places:  # what must be computed first is read by the expression itself
                if not isinstance(place.source, Pieces):
                    self._device.copy(place.view(target), place.source.read().contiguous())
            self._device.synchronize(self._device.copied())
            if len(on_the_way) > 1:
                arrive()
        while on_the_way:
            arrive()

    def _reads(self, layer: Layer) -> tuple[ReadOp, ...]:
        self._open_reader(layer)
        sizes = {path: file.size for path, file in self._files.items()}
        return plan_reads(layer, self._ring[0].nbytes, sizes)

    def _open_reader(self, layer: Layer) -> None:
        for place in layer.places:
            if isinstance(place.source, Pieces):
                for extent in place.source.extents:
                    if extent.file not in self._files:
                        self._files[extent.file] = aio.open(extent.file)
        if self._reader is None:
            chunk, count = self._plan.chunk_bytes, self._plan.chunks
            self._ring = [aio.alloc(chunk, lock=self._lock) for _ in range(count)]
            self._handle = aio.AioHandle(block_size=chunk, queue_depth=count)
            self._reader = Reader(
                self._handle, self._files, [b.tensor() for b in self._ring], self._device
            )

    # -- the link, every pass
    # -----------------------------------------------------------------------

    def start(self, layer: int, slot: int, after: Any) -> ReadLoad | _Copied:
        """Begin to bring `layer` into `slot` after the point `after`."""
        if self._closed:
            raise ClosedError("the weights were released by close(); call offload.run again")
        target = self._targets[slot][layer]
        if self._poison:
            self._device.fill(self.slots[slot], _POISON_BYTE, after)
        if layer in self._in_memory:
            self._device.copy(target, self._in_memory[layer], after)
            return _Copied(self._device.copied())
        assert self._reader is not None
        return self._reader.load(self._ops[layer], target, after)

    def finish(self, load: ReadLoad | _Copied) -> None:
        """What is computed from now on sees the load; raises AioError when the disk failed."""
        if isinstance(load, _Copied):
            self._device.wait(load.point)
        else:
            assert self._reader is not None
            self._device.wait(self._reader.finish(load))

    def drop(self, load: ReadLoad | _Copied) -> None:
        """Nothing of the load is issued any more; copies already issued come before those of any
        later load.
        """
        if isinstance(load, ReadLoad):
            assert self._reader is not None
            self._reader.drop(load)

    def mark(self) -> Any:
        """The point in the computation after all that was issued."""
        return self._device.mark()

    def read_tensor(self, layer: int, index: int) -> torch.Tensor:
        """One tensor of a layer that rests off the device, as a CPU tensor of its own."""
        place = self._layers[layer].places[index]
        if layer in self._in_memory:
            return place.view(self._in_memory[layer]).clone()
        return place.source.read()

    def nvme_files(self) -> list[str]:
        """The files that passes read, in the order of the layers."""
        return list(dict.fromkeys(op.file for ops in self._ops.values() for op in ops))

    @property
    def pageable_bytes(self) -> tuple[int, str]:
        """Bytes that a GPU copies from and that could not be pinned, and why."""
        if not self._lock:
            return 0, ""
        loose = [b for b in (*self._pinned.values(), *self._ring) if not b.registered]
        return sum(b.nbytes for b in loose), loose[0].lock_reason if loose else ""

    def describe_io(self) -> dict[str, Any]:
        """Which I/O backend reads the weights, and how."""
        return {} if self._handle is None else self._handle.describe()

    def close(self) -> None:
        """Release everything; the store cannot be used any more."""
        if self._closed:
            return
        self._closed = True
        self._close_reader()
        self._device.synchronize(self._device.copied())
        self._in_memory.clear()
        for buffer in self._pinned.values():
            buffer.close()
        self.slots.clear()
        self._targets.clear()

    def _close_reader(self) -> None:
        if self._reader is not None and self._handle is not None:
            self._reader.close()
            self._handle.close()
        self._reader = self._handle = None
        for file in self._files.values():
            file.close()
        self._files.clear()
        for buffer in self._ring:
            buffer.close()
        self._ring.clear()
