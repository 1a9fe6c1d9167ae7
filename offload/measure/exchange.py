"""A layer's way to CPU cores and back, and what calls take the host that has waited for those."""

from __future__ import annotations

import statistics
import time

import torch

from offload.device import compute_device
from offload.kernels.call import current_stream
from offload.kernels.host_attention import HostAttention
from offload.kernels.residual_norm import ResidualNorm
from offload.measure.host import HostMemory
from offload.row_copies import row_copies

BYTES = 256 << 20  # that cores attend to first, some milliseconds
TURNS = 30
PRODUCTS, OWN = 4, 8  # calls of torch's and of own kernels, as in a layer
DTYPE = torch.bfloat16


def exchange_seconds(device: torch.device) -> tuple[float, float]:
    """Two times that a step with attention on CPU cores takes beside it, medians.

    First what the launch of a kernel takes the host when cores have attended and it has waited for
    them: it has slept, and finds its caches cold. Then the way from a query on the compute device
    to what cores make of it back there, where there is next to nothing to attend to: copies, waits
    and threads that wake up.
    """
    before = HostMemory(BYTES).attention(1)
    calls = _Calls(device)
    way = _Way(device)
    found = []
    for _ in range(TURNS):
        before.read()
        start = time.perf_counter()
        calls.issue()
        issued = time.perf_counter()
        torch.cuda.synchronize(device)
        left = time.perf_counter()
        way.go()
        found.append(((issued - start) / (PRODUCTS + OWN), time.perf_counter() - left))
    torch.cuda.synchronize(device)
    launches, ways = zip(*found, strict=True)
    return statistics.median(launches), statistics.median(ways)


class _Calls:
    """Small ones, made before."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.zeros(16, 1024, dtype=DTYPE, device=device)
        self._weight = torch.zeros(64, 1024, dtype=DTYPE, device=device)
        self._out = torch.empty(16, 64, dtype=DTYPE, device=device)
        self._own = ResidualNorm(residual=self._rows, branch=self._rows, sum_out=self._rows)
        self._device = device

    def issue(self) -> None:
        """All of a layer."""
        stream = current_stream(self._device)
        for _ in range(PRODUCTS):
            torch.mm(self._rows, self._weight.T, out=self._out)
            for _ in range(OWN // PRODUCTS):
                self._own.launch(stream)


class _Way:
    """Of one row, down and up."""

    def __init__(self, device: torch.device) -> None:
        heads, width = 16, 128
        self._copies = row_copies(compute_device(device))
        self._there = torch.zeros(1, heads * width, dtype=DTYPE, device=device)
        query, result = (self._copies.buffer((1, heads, width), DTYPE) for _ in range(2))
        self._query, self._mapped = query.flatten(1), self._copies.mapped(result).flatten(1)
        cache = torch.zeros(2, 1, heads, 1, width, dtype=DTYPE)
        self._attend = HostAttention(
            query,
            cache[0],
            cache[1],
            result,
            length=torch.ones(1, dtype=torch.int32),
            scale=1.0,
            beside_stream=True,
        )

    def go(self) -> None:
        """There and back."""
        self._there.add_(1.0)  # what makes the query
        self._copies.synchronize(self._copies.down(self._query, self._there))
        self._attend.start()
        self._attend.wait()
        torch.mul(self._mapped, 1, out=self._there)
