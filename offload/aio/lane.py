"""The queue of one group of I/O threads: segments go in, transfers of one block come out."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from .request import BUFFERED, DIRECT, Segment, Transfer


class Lane:
    """First come, first served; a failed or cancelled request's remainder is dropped on the way."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._segments: deque[Segment] = deque()
        self._retries: deque[Transfer] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, segment: Segment) -> None:
        with self._changed:
            self._segments.append(segment)
            self._changed.notify()

    def put_back(self, transfer: Transfer) -> None:
        """Queue what a short or interrupted transfer left over, before anything newer."""
        with self._changed:
            self._retries.append(transfer)
            self._changed.notify()

    def close(self) -> None:
        """Let `take` return None once the queue is empty."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drained(self) -> bool:
        """Whether the lane is closed and nothing is left in it."""
        with self._changed:
            return self._closed and not (self._segments or self._retries)

    def take(self, block: bool) -> Transfer | None:
        """The next transfer; None when there is none (with `block`: and the lane is closed)."""
        while True:
            found, dropped = self._next(block)
            if found is None or not dropped:
                return found
            # Outside the lock: this may end the request and run its owner's callback.
            found.request.settle(dropped, moved=False)
            del found  # or a thread that waits would keep a file open

    def _next(self, block: bool) -> tuple[Any, int]:
        """A transfer and 0; or what is to be dropped, and its bytes."""
        with self._changed:
            while block and not (self._segments or self._retries or self._closed):
                self._changed.wait()
            if self._retries:
                transfer = self._retries.popleft()
                return transfer, transfer.nbytes if transfer.request.failed else 0
            if not self._segments:
                return None, 0
            segment = self._segments[0]
            if not segment.request.failed:
                return self._cut(segment), 0
            self._segments.popleft()
            return segment, segment.stop - segment.at

    def _cut(self, segment: Segment) -> Transfer:
        size = self._block_size
        if segment.path == DIRECT:
            size = max(size // segment.request.align * segment.request.align, segment.request.align)
        elif segment.path == BUFFERED:
            size = min(size, 8 << 20)
        size = min(size, segment.stop - segment.at)
        transfer = Transfer(segment.request, segment.path, segment.at, size)
        segment.at += size
        if segment.at == segment.stop:
            self._segments.popleft()
        elif len(self._segments) == 1:
            self._changed.notify()  # there is more for the next thread
        return transfer
