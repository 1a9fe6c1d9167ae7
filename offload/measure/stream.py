"""Link and disk, as a stream of weights uses them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Literal

import torch

from offload import aio
from offload.device import ComputeDevice
from offload.measure.link import COPY_BYTES
from offload.scheduler.cost import Rates

LINK_ROUNDS = 5
DISK_BYTES = 512 << 20  # read at most
BLOCK = 8 << 20
DEPTH = 16


def measure_rates(device: ComputeDevice, files: Sequence[str], *, small: bool = False) -> Rates:
    """Link rate to `device`, and the rate of plain reads of `files` (None without files).

    `small`: an eighth of the bytes, for models that are small themselves.
    """
    scale = 8 if small else 1
    return Rates(
        link=measure_link(device, COPY_BYTES // scale),
        disk=measure_disk(files, DISK_BYTES // scale) if files else None,
    )


def measure_link(device: ComputeDevice, nbytes: int = COPY_BYTES) -> float:
    """Bytes per second of pinned copies of `nbytes` to the device: the median of some rounds.

    A round is four copies one after the other, so that its start and end weigh little.
    """
    copies = 4
    lock: Literal["auto", False] = "auto" if device.torch_device.type == "cuda" else False
    with aio.alloc(nbytes, lock=lock) as buffer, torch.inference_mode(False):
        source = buffer.tensor()
        target = device.allocate(nbytes)
        seconds = []
        for _ in range(LINK_ROUNDS + 1):
            device.synchronize(device.copied())
            start = time.perf_counter()
            for _ in range(copies):
                device.copy(target, source)
            device.synchronize(device.copied())
            seconds.append(time.perf_counter() - start)
        del source
    return copies * nbytes / statistics.median(seconds[1:])  # the first round warms up


def measure_disk(files: Sequence[str], nbytes: int = DISK_BYTES) -> float:
    """Bytes per second of large direct reads, from the start of each file on, at most `nbytes` in
    all.
    """
    with (
        aio.AioHandle(block_size=BLOCK, queue_depth=DEPTH) as handle,
        aio.alloc(BLOCK * DEPTH, lock=False) as buffer,
    ):
        memory = buffer.tensor()
        slots = [memory[i * BLOCK : (i + 1) * BLOCK] for i in range(DEPTH)]
        futures: list[aio.IOFuture | None] = [None] * DEPTH
        done = at = 0
        start = time.perf_counter()
        for path in files:
            with aio.open(path) as file:
                for offset in range(0, min(file.size, nbytes - done), BLOCK):
                    count = min(BLOCK, file.size - offset)
                    busy = futures[at]
                    if busy is not None:
                        busy.result()
                    futures[at] = handle.async_pread(slots[at][:count], file, offset, count)
                    at = (at + 1) % DEPTH
                    done += count
                for future in futures:
                    if future is not None:
                        future.result()
            if done >= nbytes:
                break
        seconds = time.perf_counter() - start
    return done / seconds
