"""The memory in which weights stand whole while they are used, one module's after another's."""

from __future__ import annotations

import threading

import torch

from offload.store.layout import align


class Scratch:
    """Memory that the modules of one model share.

    Filling it and reading it are work of one stream, in whose order the next module's weights
    follow the last one's; when the stream is another, it waits for the one before. `lock` is held
    by the thread that uses it, and `top` is where what it uses ends.
    """

    def __init__(self) -> None:
        self.nbytes = 0  # that it takes
        self.peak = 0  # the same, and what filling it takes besides
        self.lock = threading.RLock()
        self.top = 0
        self._memory: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def need(self, nbytes: int, beside: int = 0) -> None:
        """Some use takes `nbytes`, and filling it `beside` more; to be said before the first."""
        self.nbytes = max(self.nbytes, align(nbytes))
        self.peak = max(self.peak, align(nbytes) + beside)

    def view(
        self, offset: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor of this shape, `offset` bytes from the start, with any content."""
        memory = self._memory
        if memory is None or memory.device != device or memory.numel() < self.nbytes:
            raw = torch.empty(self.nbytes + align(1), dtype=torch.uint8, device=device)
            skip = -raw.data_ptr() % align(1)
            memory = self._memory = raw[skip : skip + self.nbytes]
        return memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def stream(self, device: torch.device) -> int:
        """The number of the current stream, which may use the memory from now on."""
        if device.type != "cuda":
            return 0
        stream = torch.cuda.current_stream(device)
        before = self._stream
        if before is None or before.cuda_stream != stream.cuda_stream:
            if torch.cuda.is_current_stream_capturing():
                return stream.cuda_stream  # nothing runs yet
            if before is not None and before.device == stream.device:
                stream.wait_stream(before)
                if self._memory is not None:
                    self._memory.record_stream(stream)
            self._stream = stream
        return stream.cuda_stream

    def release(self) -> None:
        """Give the memory back."""
        self._memory = self._stream = None
