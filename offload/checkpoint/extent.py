"""Where one tensor's bytes lie in a file, and the read that turns them into a tensor."""

import math
import os
from dataclasses import dataclass

import torch

from offload.errors import CheckpointError

# One read call moves at most 2**31 - 4096 bytes on Linux; smaller steps also let Ctrl-C in.
_MAX_READ = 1 << 28


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes `[offset, offset + nbytes)` of `file`, which hold a tensor of `dtype` and `shape`.

    `stride` (in elements) is None for a contiguous tensor; otherwise the bytes are the span that
    the strided view covers, from its first to its last element.
    """

    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The tensor, in CPU memory of its own.

        It is read, never mapped: a file that shrinks or fails under a map kills the process.
        """
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        read_into(self.file, self.offset, data.numpy().data)
        flat = data.view(self.dtype)
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride).contiguous()


def read_into(file: str, offset: int, target: memoryview) -> None:
    """Fill `target` with the bytes of `file` from `offset` on; ending early is an error."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(target):  # a read may be short; Python itself retries EINTR
            count = os.preadv(descriptor, [target[done : done + _MAX_READ]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{file} ends at byte {offset + done}, but its header promises data up to byte "
                    f"{offset + len(target)}; was it changed while in use? Download it again"
                )
            done += count
    finally:
        os.close(descriptor)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride, in elements, of a contiguous tensor of `shape`."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a view is contiguous; the stride of a dimension of size 1 does not matter."""
    if 0 in shape:
        return True
    wanted = contiguous_stride(shape)
    return all(
        size == 1 or have == want for size, have, want in zip(shape, stride, wanted, strict=True)
    )
