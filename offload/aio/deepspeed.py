"""DeepSpeed's names: scripts for its aio_handle run when they import this module instead.

Only an import changes:

    from offload.aio.deepspeed import AsyncIOBuilder      # was: deepspeed.ops.op_builder
    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 32, False, True, 2)

Argument order and status codes are DeepSpeed's: 0 for a request that was begun, the number of
requests for one that has ended. Failures raise AioError, where DeepSpeed reports success.
"""

from __future__ import annotations

import sys
from typing import Any

from .buffer import AlignedBuffer, alloc
from .handle import AioHandle

_GRAIN = 512


class aio_handle:
    """DeepSpeed's handle over an `AioHandle`, which is its attribute `handle`."""

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self.handle = AioHandle(
            block_size, queue_depth, "auto", single_submit, overlap_events, intra_op_parallelism
        )
        self._settings = (
            block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
        )  # fmt: skip
        self._locked: dict[int, AlignedBuffer] = {}

    def get_block_size(self) -> int:
        return int(self._settings[0])

    def get_queue_depth(self) -> int:
        return int(self._settings[1])

    def get_single_submit(self) -> bool:
        return bool(self._settings[2])

    def get_overlap_events(self) -> bool:
        return bool(self._settings[3])

    def get_intra_op_parallelism(self) -> int:
        return int(self._settings[4])

    get_thread_count = get_intra_op_parallelism

    def get_alignment(self) -> int:
        return _GRAIN * self.get_intra_op_parallelism()

    def read(self, buffer: Any, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Read the whole buffer; every read is checked, so `validate` changes nothing."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: Any, filename: str, validate: bool, file_offset: int = 0) -> int:
        return self.sync_pwrite(buffer, filename, file_offset)

    def pread(
        self, buffer: Any, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        read = self.async_pread if asynchronous else self.sync_pread
        return read(buffer, filename, file_offset)

    def pwrite(
        self, buffer: Any, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        write = self.async_pwrite if asynchronous else self.sync_pwrite
        return write(buffer, filename, file_offset)

    def sync_pread(self, buffer: Any, filename: str, file_offset: int = 0) -> int:
        self.handle.pread(buffer, filename, file_offset)
        return 1

    def sync_pwrite(self, buffer: Any, filename: str, file_offset: int = 0) -> int:
        self.handle.pwrite(buffer, filename, file_offset)
        return 1

    def async_pread(self, buffer: Any, filename: str, file_offset: int = 0) -> int:
        self.handle.async_pread(buffer, filename, file_offset)
        return 0

    def async_pwrite(self, buffer: Any, filename: str | int, file_offset: int = 0) -> int:
        """Begin a write; instead of a name, the descriptor of a file that is open for writing."""
        if isinstance(filename, int):
            # Opened anew: the caller may close the descriptor as soon as the write has begun.
            filename = f"/proc/self/fd/{filename}"
        self.handle.async_pwrite(buffer, filename, file_offset)
        return 0

    def wait(self) -> int:
        """Wait for all requests; returns how many, or raises the first one's error."""
        return self.handle.wait()

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """A page-locked tensor of `num_elem` elements of the example's dtype."""
        buffer = alloc(num_elem * example_tensor.element_size())
        tensor = buffer.tensor().view(example_tensor.dtype)
        self._locked[tensor.data_ptr()] = buffer
        return tensor

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Give a locked tensor's memory up; False where it is not one of this handle's."""
        buffer = self._locked.pop(tensor.data_ptr(), None)
        if buffer is None:
            return False
        buffer.close()
        return True


class AsyncIOBuilder:
    """What DeepSpeed's builder is used for: `AsyncIOBuilder().load().aio_handle(...)`."""

    def load(self, verbose: bool = True) -> Any:
        return sys.modules[__name__]

    def is_compatible(self, verbose: bool = False) -> bool:
        return True


__all__ = ["AsyncIOBuilder", "aio_handle"]
