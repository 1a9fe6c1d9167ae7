"""The time of a layer's exchange with CPU cores, and of launches by a host that has waited for
them.
"""

from __future__ import annotations

import statistics
import time

import torch

from offload.device import compute_device
from offload.kernels.call import current_stream
from offload.kernels.host_attention import HostAttention
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.scores import Scores
from offload.row_copies import row_copies

BYTES = 256 << 20  # that cores attend to first, some milliseconds
TURNS = 30
PRODUCTS, OWN = 4, 8  # calls of torch's and of own kernels, as in a layer
DTYPE = torch.bfloat16


def exchange_seconds(device: torch.device) -> tuple[float, float]:
    """Medians of two times that attention on CPU cores adds to a step.

    First, the launch of a kernel by a host that has waited while cores attended: they have evicted
    its caches, and it may have slept. Second, the time from a query on the compute device to the
    cores' result back there, with next to nothing to attend to: copies, waits, and threads that
    wake up.
    """
    before = _Attention(BYTES // _Attention.COLUMN, device)
    calls = _Calls(device)
    way = _Way(device)
    found = []
    for _ in range(TURNS):
        before.attend()
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
    """Small calls, made before."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.zeros(16, 1024, dtype=DTYPE, device=device)
        self._weight = torch.zeros(64, 1024, dtype=DTYPE, device=device)
        self._out = torch.empty(16, 64, dtype=DTYPE, device=device)
        self._own = ResidualNorm(residual=self._rows, branch=self._rows, sum_out=self._rows)
        self._device = device

    def issue(self) -> None:
        """Issue the calls of a layer."""
        stream = current_stream(self._device)
        for _ in range(PRODUCTS):
            torch.mm(self._rows, self._weight.T, out=self._out)
            for _ in range(OWN // PRODUCTS):
                self._own.launch(stream)


class _Attention:
    """Attention of one row to so many columns, as in a step."""

    HEADS, WIDTH = 16, 128
    COLUMN = 2 * HEADS * WIDTH * DTYPE.itemsize  # bytes

    def __init__(self, columns: int, device: torch.device) -> None:
        self.copies = row_copies(compute_device(device))
        shape = 1, self.HEADS, self.WIDTH
        query, result = (self.copies.buffer(shape, DTYPE) for _ in range(2))
        self.query, self.mapped = query.flatten(1), self.copies.mapped(result).flatten(1)
        cache = torch.zeros(2, 1, self.HEADS, columns, self.WIDTH, dtype=DTYPE)
        self._call = HostAttention(
            query,
            cache[0],
            cache[1],
            result,
            length=torch.full((1,), columns, dtype=torch.int32),
            scores=Scores(1.0),
            beside_stream=True,
        )

    def attend(self) -> None:
        """Attend, and return when it is done."""
        self._call.start()
        self._call.poll()
        self._call.wait()


class _Way:
    """The exchange of one row: down, attention, up."""

    def __init__(self, device: torch.device) -> None:
        self._attention = _Attention(1, device)
        self._there = torch.zeros_like(self._attention.query, device=device)

    def go(self) -> None:
        """One exchange."""
        attention, there = self._attention, self._there
        there.add_(1.0)  # what makes the query
        attention.copies.synchronize(attention.copies.down(attention.query, there))
        attention.attend()
        torch.mul(attention.mapped, 1, out=there)
