"""Writes bytes to files through a ring of aligned chunks, several requests in flight."""

from __future__ import annotations

from types import TracebackType

import torch

from offload import aio

CHUNK = 8 << 20  # bytes
CHUNKS = 8


class ChunkWriter:
    """One ring for any number of files, one after the other: `begin`, `write`..., `finish`."""

    def __init__(self) -> None:
        self._handle = aio.AioHandle(block_size=CHUNK, queue_depth=CHUNKS)
        self._memory = aio.alloc(CHUNK * CHUNKS, lock=False)
        memory = self._memory.tensor()
        self._chunks = [memory[i * CHUNK : (i + 1) * CHUNK] for i in range(CHUNKS)]
        self._busy: list[aio.IOFuture | None] = [None] * CHUNKS
        self._at = 0  # the chunk being filled
        self._filled = 0  # bytes of it
        self._offset = 0  # in the file
        self._file: aio.AioFile | None = None

    def begin(self, path: str) -> None:
        """Write to the existing file at `path` from its start on."""
        self._file = aio.open(path, "rw")
        self._offset = self._filled = 0

    def write(self, data: torch.Tensor) -> None:
        """Append uint8 [n]; its memory is free again on return."""
        at = 0
        while at < len(data):
            chunk, busy = self._chunks[self._at], self._busy[self._at]
            if busy is not None:
                self._busy[self._at] = None
                busy.result()
            count = min(len(data) - at, CHUNK - self._filled)
            chunk[self._filled : self._filled + count].copy_(data[at : at + count])
            at += count
            self._filled += count
            if self._filled == CHUNK:
                self._send()

    def finish(self) -> None:
        """Return once every byte is written; raises AioError where that failed."""
        if self._filled:
            self._send()
        for i, future in enumerate(self._busy):
            self._busy[i] = None
            if future is not None:
                future.result()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _send(self) -> None:
        if self._file is None:
            raise ValueError("begin() a file first")
        self._busy[self._at] = self._handle.async_pwrite(
            self._chunks[self._at][: self._filled], self._file, self._offset, self._filled
        )
        self._offset += self._filled
        self._at = (self._at + 1) % CHUNKS
        self._filled = 0

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.close()  # waits for what is in flight
        if self._file is not None:
            self._file.close()
        self._chunks.clear()
        self._memory.close()
