"""The link to a GPU in both directions, alone and at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

COPY_BYTES = 256 << 20  # of one copy: long enough that a link shows its full rate
SECONDS = 0.4  # of copies that are timed together


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second of pinned copies; `both`: while the other direction is as busy."""

    up: float
    down: float
    up_both: float
    down_both: float


class Copies:
    """Copies between pinned memory and the device in one direction, on a stream of their own."""

    def __init__(self, device: torch.device, *, up: bool) -> None:
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        self._target, self._source = (there, host) if up else (host, there)
        self._stream = torch.cuda.Stream(device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.nbytes, self._count = COPY_BYTES, 0

    def issue(self, count: int) -> None:
        """Enqueue so many, timed."""
        self._count = count
        with torch.cuda.stream(self._stream):
            self._start.record()
            for _ in range(count):
                self._target.copy_(self._source, non_blocking=True)
            self._end.record()

    @property
    def done(self) -> bool:
        """Whether those issued last are."""
        return self._end.query()

    def rate(self) -> float:
        """Bytes per second of those issued last, once they are done."""
        self._end.synchronize()
        return self._count * self.nbytes / (self._start.elapsed_time(self._end) / 1e3)


def link_rates(device: torch.device) -> LinkRates:
    """All four rates of the link to `device`.

    While both directions are timed, each has enough copies to outlast the other's by little.
    """
    up, down = Copies(device, up=True), Copies(device, up=False)
    alone = [_alone(copies) for copies in (up, down)]
    counts = [max(4, round(SECONDS * rate / up.nbytes)) for rate in alone]
    torch.cuda.synchronize(device)
    up.issue(counts[0])
    down.issue(counts[1])
    return LinkRates(alone[0], alone[1], up.rate(), down.rate())


def _alone(copies: Copies) -> float:
    copies.issue(2)
    count = max(4, round(SECONDS * copies.rate() / copies.nbytes))
    copies.issue(count)
    return copies.rate()


def stream_up(device: torch.device, rate: float, seconds: float) -> float:
    """Bytes per second of copies up the link for about `seconds`, `rate` being what to expect.

    The host waits without spinning, so that no core is taken from whoever reads memory beside it.
    """
    copies = Copies(device, up=True)
    copies.issue(max(4, round(seconds * rate / copies.nbytes)))
    while not copies.done:
        time.sleep(0.002)
    return copies.rate()
