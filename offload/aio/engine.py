"""What every engine does: take requests, move their bytes, tell when each has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .file import Descriptors


@dataclass(frozen=True)
class Shape:
    """How an engine cuts and queues: the arguments of `AioHandle`."""

    block_size: int  # bytes of one transfer
    queue_depth: int  # transfers in flight for each I/O thread
    parallelism: int  # I/O threads, each with a queue of its own
    single_submit: bool  # one system call for each transfer
    overlap_events: bool  # submit while others complete, not batch by batch


class Ticket(Protocol):
    """An engine's side of one request."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None) -> bool: ...
    def cancel(self) -> bool: ...
    def outcome(self) -> Any: ...  # errno, kind, offset, transferred


class Engine(Protocol):
    """One backend at work; it calls `on_done(token, ticket)` once for each request it was given.

    `submit` and `poll` are called by one thread at a time.
    """

    name: str

    def submit(
        self, token: int, write: bool, files: Descriptors, address: int, offset: int, nbytes: int
    ) -> Ticket: ...

    def poll(self) -> None:
        """Report requests that have ended, where the engine's threads cannot do so themselves."""

    def describe(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, int]: ...

    def owns_this_thread(self) -> bool:
        """Whether the caller is one of the engine's own threads, which cannot wait for itself."""

    def close(self) -> None:
        """End the threads; every request has ended before."""

    def abandon(self) -> None:
        """In a forked child: let go without touching what the parent still uses."""
