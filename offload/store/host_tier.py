"""The CPU tier: layers at rest in (pinned) CPU memory, filled in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch

from offload import aio
from offload.errors import ClosedError
from offload.store.disk import Disk
from offload.store.layout import Layer
from offload.store.reader import ReadLoad
from offload.store.reads import ReadOp

# Layers whose memory is touched and pinned before they are read. More would only take processors
# and memory bandwidth from the reads of the first layers.
AHEAD = 3


class HostTier:
    """One mapping a layer, in slot layout, so that a pass makes one copy a layer.

    Memory is touched and pinned in a thread ahead of the reads, and the first pass may begin while
    later layers are still on their way: whoever needs a layer waits for that layer alone.
    """

    def __init__(self, layers: Mapping[int, Layer], lock: Literal["auto", False]) -> None:
        self._layers = dict(layers)
        self._lock = lock
        self._here = {i: threading.Event() for i in self._layers}
        self._bytes: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, aio.AlignedBuffer] = {}
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def fill(
        self,
        disk: Disk,
        ops: Mapping[int, tuple[ReadOp, ...]],
        on_layer: Callable[[int], None],
        at_end: Callable[[], None],
    ) -> None:
        """Begin to bring every layer here, in order. `on_layer` is called (in the background) as
        each has arrived, and `at_end` after the last.
        """

        def run() -> None:
            try:
                self._fill(disk, ops, on_layer)
            except BaseException as error:  # it belongs to whoever needs the layer
                self._error = error
            finally:
                for event in self._here.values():
                    event.set()
                at_end()

        self._thread = threading.Thread(target=run, name="offload-fill", daemon=True)
        self._thread.start()

    def is_here(self, layer: int) -> bool:
        """Whether `bytes` returns at once."""
        return self._here[layer].is_set()

    def bytes(self, layer: int) -> torch.Tensor:
        """The layer's bytes (uint8, pinned for a GPU's copies); waits until they are here.

        Raises what made the filling fail, for every layer that did not arrive.
        """
        self._here[layer].wait()
        memory = self._bytes.get(layer)
        if memory is None:
            raise self._error or ClosedError("the model was closed while its weights were loading")
        return memory

    def wait(self) -> None:
        """Return once all layers are here, or raise what made that fail."""
        for layer in self._layers:
            self.bytes(layer)

    def close(self) -> None:
        """Stop filling and give the memory back."""
        self._stopped = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._bytes.clear()
        for buffer in self.buffers.values():
            buffer.close()

    def _fill(
        self, disk: Disk, ops: Mapping[int, tuple[ReadOp, ...]], on_layer: Callable[[int], None]
    ) -> None:
        indices = list(self._layers)
        with ThreadPoolExecutor(1, thread_name_prefix="offload-pin") as pool:
            memory: dict[int, Future[aio.AlignedBuffer]] = {}

            def prepare(position: int) -> None:
                for i in indices[position : position + 1]:
                    nbytes = max(1, self._layers[i].nbytes)
                    memory[i] = pool.submit(aio.alloc, nbytes, lock=self._lock)

            for position in range(AHEAD):
                prepare(position)
            under_way: tuple[int, ReadLoad, torch.Tensor] | None = None
            try:
                for position, i in enumerate(indices):
                    if self._stopped:
                        break
                    buffer = self.buffers[i] = memory.pop(i).result()
                    prepare(position + AHEAD)
                    target = buffer.tensor()[: self._layers[i].nbytes]
                    load = disk.begin_fill(self._layers[i], ops[i], target)
                    if under_way is not None:  # only now, so that the disk has the next to read
                        self._arrive(disk, on_layer, *under_way)
                    under_way = (i, load, target)
                if under_way is not None:
                    self._arrive(disk, on_layer, *under_way)
            finally:
                for future in memory.values():
                    future.cancel()

    def _arrive(
        self,
        disk: Disk,
        on_layer: Callable[[int], None],
        layer: int,
        load: ReadLoad,
        memory: torch.Tensor,
    ) -> None:
        disk.finish_fill(load)
        self._bytes[layer] = memory
        self._here[layer].set()
        on_layer(layer)
