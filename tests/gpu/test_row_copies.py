"""Rows between a GPU and pinned CPU memory: pitched copies, and kernels that read that memory."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import aio
from offload.aio.cudart import Cudart
from offload.device import compute_device
from offload.row_copies import CudaCopies, RowCopies, row_copies

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def copies() -> RowCopies:
    return row_copies(compute_device(torch.device(DEVICE)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "first", "last"), [(1, 0, 7), (5, 3, 11), (64, 0, 512), (3, 4, 4)]
)
def test_columns_go_down_and_up(
    copies: RowCopies, rows: int, first: int, last: int, dtype: torch.dtype
) -> None:
    buffer = aio.alloc(rows * 640 * dtype.itemsize, lock="auto" if DEVICE != "cpu" else False)
    host = buffer.tensor().view(dtype).view(rows, 640)
    host.fill_(7)
    there = torch.randn(rows, 520, device=DEVICE).to(dtype)
    point = copies.down(host[:, first:last], there[:, first:last])
    there = there.clone()  # behind the copy, so what it reads stays
    copies.synchronize(point)
    want = torch.full_like(host, 7)
    want[:, first:last] = there[:, first:last].cpu()
    assert torch.equal(host, want)
    back = torch.zeros_like(there)
    copies.up(back[:, first:last], host[:, first:last])
    assert torch.equal(back[:, first:last], there[:, first:last])
    assert back[:, last:].eq(0).all() and back[:, :first].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_kernel_reads_and_writes_host_memory(copies: RowCopies, dtype: torch.dtype) -> None:
    memory = copies.buffer((64, 1024), dtype)
    memory.copy_(torch.randn(64, 1024))
    seen = copies.mapped(memory)
    assert (
        seen.device == torch.device(DEVICE) and seen.shape == memory.shape and seen.dtype == dtype
    )
    assert seen.data_ptr() == memory.data_ptr()
    out = torch.empty(70, 1024, device=DEVICE, dtype=dtype)
    torch.mul(seen, 1, out=out[6:])
    assert torch.equal(out[6:].cpu(), memory)
    want = memory * 2
    seen.mul_(2)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(memory, want)


@pytest.mark.parametrize(("rows", "first", "last"), [(1, 0, 7), (5, 3, 11), (3, 4, 4), (0, 0, 4)])
def test_what_cuda_is_asked_for(rows: int, first: int, last: int) -> None:
    """Without a GPU: cudaMemcpy2DAsync as it is documented, on CPU memory."""
    calls: list[Any] = []

    def copy(
        to: int, to_pitch: int, at: int, pitch: int, width: int, height: int, kind: int, stream: int
    ) -> int:
        calls.append((kind, stream))
        if width > min(to_pitch, pitch):
            return 12  # cudaErrorInvalidPitchValue
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, at + row * pitch, width)
        return 0

    runtime = object.__new__(Cudart)
    runtime._lib = SimpleNamespace(
        cudaMemcpy2DAsync=copy,
        cudaGetLastError=lambda: 12,
        cudaGetErrorString=lambda code: b"invalid pitch argument",
    )
    copies = object.__new__(CudaCopies)
    copies._runtime = runtime
    source, target = torch.randn(rows, 20), torch.zeros(rows, 16)
    stream: Any = SimpleNamespace(cuda_stream=77)
    copies._copy(target[:, first:last], source[:, first:last], stream)
    want = torch.zeros(rows, 16)
    want[:, first:last] = source[:, first:last]
    assert torch.equal(target, want)
    assert calls == ([(4, 77)] if rows and last > first else [])  # cudaMemcpyDefault
    with pytest.raises(OSError, match="2 rows of 9 bytes: invalid pitch argument"):
        runtime.copy_rows((1, 8), (1, 9), 9, 2, 0)
