"""The files that hold layers, and the reader that brings layers from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch

from offload import aio
from offload.checkpoint.expressions import Pieces
from offload.device import ComputeDevice
from offload.errors import CheckpointError
from offload.store.layout import Layer
from offload.store.reader import Reader, ReadLoad
from offload.store.reads import ReadOp, plan_reads


class Disk:
    """Files open for direct reads, a ring of `chunks` chunks of `chunk_bytes`, and its reader.

    Plan all layers with `ops` before the first `load`; loads are then safe from any thread.
    """

    def __init__(
        self,
        chunk_bytes: int,
        chunks: int,
        lock: Literal["auto", False],
        device: ComputeDevice,
        io: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._device = device
        self._files: dict[str, aio.AioFile] = {}
        self._opened: dict[str, os.stat_result] = {}
        self.ring = [aio.alloc(chunk_bytes, lock=lock) for _ in range(chunks)]
        self._handle = _open_handle(chunk_bytes, chunks, io)
        self._reader = Reader(
            self._handle, self._files, [b.tensor() for b in self.ring], self._device
        )
        self._closed = False

    def ops(self, layer: Layer) -> tuple[ReadOp, ...]:
        """The requests for those of the layer's tensors that lie in files as plain bytes."""
        plain = tuple(p for p in layer.places if isinstance(p.source, Pieces))
        for place in plain:
            for file in self._files_of(place.source):
                if file not in self._files:
                    self._files[file] = aio.open(file)
                    self._opened[file] = os.fstat(self._files[file].descriptors().buffered)
        sizes = {file: status.st_size for file, status in self._opened.items()}
        return plan_reads(Layer(layer.name, plain, layer.nbytes), self._chunk_bytes, sizes)

    def check_content(self, file: str) -> None:
        """Raise CheckpointError where a file was written to since it was opened."""
        now, then = os.fstat(self._files[file].descriptors().buffered), self._opened[file]
        if (now.st_mtime_ns, now.st_size) != (then.st_mtime_ns, then.st_size):
            raise _changed(file)

    def check_path(self, file: str) -> None:
        """Raise CheckpointError where the name stands for another file or content by now."""
        self.check_content(file)
        now, then = os.stat(file), self._opened[file]
        if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
            raise _changed(file)

    @staticmethod
    def _files_of(source: Any) -> Iterable[str]:
        return (e.file for e in source.extents if e.nbytes)

    def load(self, ops: tuple[ReadOp, ...], target: torch.Tensor, after: Any = None) -> ReadLoad:
        """Begin to bring `ops` to `target`, writing nothing there before the point `after`."""
        return self._reader.load(ops, target, after)

    def begin(self, load: ReadLoad) -> None:
        """As `load`, for a load that the caller has noted already."""
        self._reader.begin(load)

    def finish(self, load: ReadLoad) -> Any:
        """Wait for the load; the point at which it has arrived. Raises AioError."""
        return self._reader.finish(load)

    def drop(self, load: ReadLoad) -> None:
        """Give a load up; on return nothing of it is written any more."""
        self._reader.drop(load)

    def begin_fill(self, layer: Layer, ops: tuple[ReadOp, ...], target: torch.Tensor) -> ReadLoad:
        """Begin to fill `target` with a whole layer; computed tensors are there on return."""
        load = self.load(ops, target)
        for place in layer.places:
            if not isinstance(place.source, Pieces):
                self._device.copy(place.view(target), place.source.read().contiguous())
        self._device.synchronize(self._device.copied())
        return load

    def finish_fill(self, load: ReadLoad) -> None:
        """Return once every byte of the layer has arrived."""
        self._device.synchronize(self.finish(load))

    def describe(self) -> dict[str, Any]:
        """Which I/O backend reads, and how."""
        return self._handle.describe()

    def close(self) -> None:
        """End the threads and give back files and memory; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._device.synchronize(self._device.copied())  # out of the ring
        self._handle.close()
        for file in self._files.values():
            file.close()
        for buffer in self.ring:
            buffer.close()


def _changed(file: str) -> CheckpointError:
    return CheckpointError(
        f"{file} was changed or replaced while its weights were in use; call offload.run again"
    )


def _open_handle(block: int, depth: int, io: Mapping[str, Any]) -> aio.AioHandle:
    """With the drive's tuned backend and threads; "auto" where this process may not use them."""
    chosen = {k: io[k] for k in ("backend", "intra_op_parallelism") if k in io}
    try:
        return aio.AioHandle(block_size=block, queue_depth=depth, **chosen)
    except (aio.BackendUnavailable, ValueError):
        return aio.AioHandle(block_size=block, queue_depth=depth)
