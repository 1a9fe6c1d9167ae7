"""The rates that no streaming can pass, measured by programs that share nothing with it."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

COPY_BYTES = 256 << 20
DISK_BYTES = 4 << 30  # read at most
BLOCK = 8 << 20
READERS = 16


def copy_rates(device: torch.device, nbytes: int = COPY_BYTES, repeats: int = 10) -> list[float]:
    """Bytes per second of each of `repeats` copies from pinned CPU memory to the device."""
    if device.type == "cpu":
        nbytes //= 4  # an ordinary copy in memory, and slower than any link
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.empty_like(source)
        rates = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            target.copy_(source)
            rates.append(nbytes / (time.perf_counter() - start))
        return rates[1:]
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]
    with torch.cuda.device(device):
        for event in events:
            target.copy_(source, non_blocking=True)
            event.record()
        torch.cuda.synchronize()
    return [nbytes / (a.elapsed_time(b) / 1e3) for a, b in itertools.pairwise(events[1:])]


def read_rate(files: Sequence[str | os.PathLike[str]], nbytes: int = DISK_BYTES) -> float:
    """Bytes per second of plain O_DIRECT reads by threads, spread over the files."""
    share = max(BLOCK, nbytes // len(files) // BLOCK * BLOCK)
    blocks: list[tuple[int, int]] = []
    descriptors: list[int] = []
    try:
        for file in files:
            descriptors.append(_open_direct(file))
            whole = os.fstat(descriptors[-1]).st_size // 4096 * 4096
            blocks += [(descriptors[-1], at) for at in range(0, min(whole, share), BLOCK)]
        chunks = [blocks[i::READERS] for i in range(READERS)]
        start = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            done = sum(pool.map(_read_blocks, chunks))
        return done / (time.perf_counter() - start)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _open_direct(file: str | os.PathLike[str]) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot read past the page cache here ({error.strerror})", str(file)
        ) from error


def _read_blocks(blocks: Sequence[tuple[int, int]]) -> int:
    with mmap.mmap(-1, BLOCK) as memory:  # page-aligned, as O_DIRECT wants it
        return sum(os.preadv(descriptor, [memory], at) for descriptor, at in blocks)
