"""The weight store: the bytes of every layer, wherever they rest, and their way into a slot."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload.checkpoint.expressions import Pieces
from offload.device import ComputeDevice
from offload.errors import ClosedError
from offload.scheduler.plan import Plan, Tier
from offload.store.disk import Disk
from offload.store.host_tier import HostTier
from offload.store.layout import Layer
from offload.store.reader import ReadLoad
from offload.store.reads import ReadOp

# Set to 1 to fill a slot with NaN patterns before it is loaded anew: what still reads it shows.
POISON = "OFFLOAD_POISON"
POISON_BYTE = 0xFF  # NaN in every IEEE format from fp8 to fp64


@dataclass(slots=True)
class _HostLoad:
    """A load from the CPU tier; issued at once if the layer is there, else when it is needed."""

    layer: int
    target: torch.Tensor
    after: Any
    issued: bool = False
    point: Any = None


class WeightStore:
    """Holds layers on their tiers and brings them to the slots: the `Link` that the stream drives.

    `layers` and the plan's tiers correspond one to one. Call `resident` for what stays on the
    device, then `open`. `io` holds the drive's tuned settings (`aio.tuned`), if there are any.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: Plan,
        device: ComputeDevice,
        io: Mapping[str, Any] | None = None,
    ) -> None:
        self._layers = list(layers)
        self._plan = plan
        self._device = device
        self._poison = os.environ.get(POISON) == "1"
        self._closed = False
        # Only a GPU's copies need pinned memory.
        lock: Literal["auto", False] = "auto" if device.torch_device.type == "cuda" else False
        self._disk = Disk(plan.chunk_bytes, plan.chunks, lock, device, io or {})
        self._pinned = bool(lock)
        self._host = HostTier(
            {i: x for i, x in enumerate(self._layers) if plan.tiers[i] is Tier.CPU}, lock
        )
        self._ops: dict[int, tuple[ReadOp, ...]] = {}  # of the layers that stay in files
        self._nvme_files: list[str] = []
        # The latest read into each slot: Ctrl-C may keep the caller from ever learning of it.
        self._reads: list[ReadLoad | None] = [None] * plan.slots
        with torch.inference_mode(False):
            self.slots = [device.allocate(plan.slot_bytes) for _ in range(plan.slots)]
        self._targets = [
            [
                slot[: layer.nbytes] if layer.nbytes <= plan.slot_bytes else slot
                for layer in self._layers
            ]
            for slot in self.slots
        ]

    def resident(self, layer: Layer) -> torch.Tensor:
        """The layer's bytes on the compute device, in slot layout, for good."""
        with torch.inference_mode(False):
            target = self._device.allocate(layer.nbytes)
        ops = self._disk.ops(layer)
        self._disk.finish_fill(self._disk.begin_fill(layer, ops, target))
        return target

    def open(self, on_layer: Callable[[int], None] = lambda index: None) -> None:
        """Begin to fill the CPU tier, and prepare the requests of every layer that stays in files.

        `on_layer` is called, in the background, with the index of each layer of the CPU tier that
        has arrived.
        """
        ops = {
            i: self._disk.ops(layer)
            for i, layer in enumerate(self._layers)
            if self._plan.tiers[i] is not Tier.DEVICE
        }
        self._ops = {i: x for i, x in ops.items() if self._plan.tiers[i] is Tier.NVME}
        self._nvme_files = list(dict.fromkeys(op.file for x in self._ops.values() for op in x))
        # Without layers in files the disk has done its work once all are loaded.
        at_end = (lambda: None) if self._ops else self._disk.close
        self._host.fill(self._disk, ops, on_layer, at_end)

    def wait_loaded(self) -> None:
        """Return once the CPU tier holds all its layers; raises what made that fail."""
        self._host.wait()

    def start(self, layer: int, slot: int, after: Any) -> ReadLoad | _HostLoad:
        """Begin to bring `layer` into `slot` after the point `after`."""
        self._check_open()
        before = self._reads[slot]
        if before is not None:
            self._disk.drop(before)
            self._reads[slot] = None
        target = self._targets[slot][layer]
        if self._poison:
            self._device.fill(self.slots[slot], POISON_BYTE, after)
        if layer not in self._host:
            read = self._reads[slot] = ReadLoad(self._ops[layer], target, after)
            self._disk.begin(read)
            return read
        load = _HostLoad(layer, target, after)
        if self._host.is_here(layer):
            self._issue(load)
        return load

    def _issue(self, load: _HostLoad) -> None:
        self._device.copy(load.target, self._host.bytes(load.layer), load.after)
        load.point = self._device.copied()
        load.issued = True

    def finish(self, load: ReadLoad | _HostLoad) -> None:
        """What is computed from now on sees the load; raises AioError when the disk failed."""
        if isinstance(load, ReadLoad):
            self._device.wait(self._disk.finish(load))
            return
        if not load.issued:
            self._issue(load)
        self._device.wait(load.point)

    def drop(self, load: ReadLoad | _HostLoad) -> None:
        """Nothing of the load is issued any more; copies already issued come before those of any
        later load.
        """
        if isinstance(load, ReadLoad):
            self._disk.drop(load)

    def mark(self) -> Any:
        """The point in the computation after all that was issued."""
        return self._device.mark()

    def read_tensor(self, layer: int, index: int) -> torch.Tensor:
        """One tensor of a layer that rests off the device, as a CPU tensor of its own."""
        self._check_open()
        place = self._layers[layer].places[index]
        if layer in self._host:
            return place.view(self._host.bytes(layer)).clone()
        if isinstance(place.source, Pieces):
            for file in {extent.file for extent in place.source.extents if extent.nbytes}:
                self._disk.check_path(file)
        return place.source.read()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the weights were released by close(); call offload.run again")

    def check_files(self) -> None:
        """Raise CheckpointError where a file that passes read was written to since it was opened.

        A file that was deleted, or replaced by another of its name, is still the one in use.
        """
        if not self._closed:
            for file in self._nvme_files:
                self._disk.check_content(file)

    def nvme_files(self) -> list[str]:
        """The files that passes read, in the order of the layers."""
        return self._nvme_files

    @property
    def pageable_bytes(self) -> tuple[int, str]:
        """Bytes that a GPU copies from and that could not be pinned, and why."""
        if not self._pinned:
            return 0, ""
        ring = self._disk.ring if self._ops else []
        loose = [b for b in (*self._host.buffers.values(), *ring) if not b.registered]
        return sum(b.nbytes for b in loose), loose[0].lock_reason if loose else ""

    def describe_io(self) -> dict[str, Any]:
        """Which I/O backend reads the weights, and how."""
        return self._disk.describe()

    def close(self) -> None:
        """Release everything; the store cannot be used any more."""
        if self._closed:
            return
        self._closed = True
        # Memory is given back behind the copies from it: CUDA does not promise to wait for them.
        self._device.synchronize(self._device.copied())
        self._host.close()
        self._disk.close()
        self.slots.clear()
        self._targets.clear()
