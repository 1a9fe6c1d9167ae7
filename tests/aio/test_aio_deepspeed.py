"""Scripts for DeepSpeed's handle run after an import changes, and errors become visible."""

import pytest
import torch

from offload import aio
from offload.aio.deepspeed import AsyncIOBuilder, aio_handle


def test_a_script_for_its_handle(tmp_path):
    handle = AsyncIOBuilder().load().aio_handle(128 << 10, 32, False, True, 2)
    assert handle.get_block_size() == 128 << 10
    assert handle.get_queue_depth() == 32
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 2
    assert handle.get_alignment() == 1024

    path = str(tmp_path / "swap.pt")
    tensor = handle.new_cpu_locked_tensor(300_000, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (300_000,))
    tensor.copy_(torch.arange(300_000))
    assert handle.async_pwrite(tensor, path) == 0
    assert handle.wait() == 1
    assert handle.sync_pwrite(tensor, path) == 1
    back = torch.empty_like(tensor)
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(back, tensor)

    parts = [torch.empty(1000, dtype=torch.bfloat16) for _ in range(3)]
    for i, part in enumerate(parts):
        assert handle.async_pread(part, path, 2000 * i) == 0
    assert handle.wait() == 3
    assert torch.equal(torch.cat(parts), tensor[:3000])

    assert handle.pread(back, path, True, False, 0) == 1
    assert handle.pread(back, path, False, True) == 0
    assert handle.wait() == 1
    assert handle.pwrite(tensor, path, True, True, 600_000) == 0
    assert handle.wait() == 1
    assert handle.read(back, path, True, 600_000) == 1
    assert torch.equal(back, tensor)
    assert handle.write(back, path, False) == 1

    with open(path, "r+b") as file:
        assert handle.async_pwrite(tensor, file.fileno(), 1_200_000) == 0
    assert handle.wait() == 1
    assert handle.sync_pread(back, path, 1_200_000) == 1
    assert torch.equal(back, tensor)
    with pytest.raises(aio.AioError, match="cannot open"):
        handle.async_pwrite(tensor, 1_000_000)

    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(back) is False


def test_what_it_reports_as_success_is_an_error(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    handle = aio_handle()
    assert handle.async_pread(torch.empty(2000, dtype=torch.uint8), str(path)) == 0
    with pytest.raises(aio.ShortReadError):
        handle.wait()
    assert handle.sync_pread(torch.empty(1000, dtype=torch.uint8), str(path)) == 1
