"""Rows between a GPU and pinned CPU memory: pitched copies, and kernels that read that memory."""

import pytest
import torch

from offload import aio
from offload.device import compute_device
from offload.row_copies import RowCopies, row_copies

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
