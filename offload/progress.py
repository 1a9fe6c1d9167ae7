"""How far something long is, told not too often."""

from __future__ import annotations

import logging
import time

from offload.sizes import format_size

SAY_EVERY = 5.0  # seconds between two lines of a log


class Pace:
    """Whether it is time to say something again: `seconds` after it last was."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def due(self) -> bool:
        """True once for each time that it is."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


class LoggedProgress:
    """Bytes done, of all, as lines of a log: "packed 3 GiB of 7 GiB"."""

    def __init__(self, log: logging.Logger, done: str) -> None:
        """`done`: what became of the bytes, such as "packed"."""
        self._log = log
        self._done = done
        self._pace = Pace(SAY_EVERY)

    def __call__(self, done: int, total: int) -> None:
        if self._pace.due():
            self._log.info("%s %s of %s", self._done, format_size(done), format_size(total))
