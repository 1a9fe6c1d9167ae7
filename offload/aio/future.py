"""The result of one asynchronous read or write."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from .errors import AioClosedError, AioError, ShortReadError, message_for
from .hints import transfer_hint

if TYPE_CHECKING:
    from .engine import Ticket
    from .file import Descriptors
    from .span import Span


class IOFuture:
    """A read or write under way; it keeps its memory and its file until the kernel has let go."""

    def __init__(
        self,
        claim: Callable[[IOFuture], None],
        backend: str,
        write: bool,
        span: Span,
        files: Descriptors,
        offset: int,
    ) -> None:
        self._claim = claim
        self._backend = backend
        self.write = write
        self.path = files.path
        self.offset = offset
        self.nbytes = span.nbytes
        self._hold: tuple[Span, Descriptors] | None = (span, files)
        self._ticket: Ticket | None = None
        self._outcome: Any = None
        self._pid = os.getpid()
        self._claimed = False
        self._wait_number = -1  # how many waits the handle had done when this ended

    def done(self) -> bool:
        """Whether the request has ended: well, with an error, or cancelled."""
        ticket = self._ticket
        return self._outcome is not None or (ticket is not None and ticket.done())

    def cancel(self) -> bool:
        """Drop what has not reached the kernel; True where the request will end as cancelled.

        The future still ends only when what is in flight has ended: the drive may be writing
        into the buffer until then.
        """
        ticket = self._ticket
        return ticket is not None and ticket.cancel()

    def result(self, timeout: float | None = None) -> int:
        """Wait for the request and return its bytes, which are all that were asked for.

        Raises AioError (ShortReadError where the file ended first), CancelledError after
        `cancel`, or TimeoutError if `timeout` seconds pass; the request then goes on.
        """
        if os.getpid() != self._pid:
            raise AioClosedError(f"{self!r} belongs to the process this one was forked from")
        ticket = self._ticket
        if ticket is not None and not ticket.wait(timeout):
            raise TimeoutError(f"{self!r} has not ended after {timeout} s")
        del ticket  # the error's traceback keeps this frame, and would keep the file open
        self._claim(self)
        error = self.error()
        if error is not None:
            raise error
        return self.nbytes

    def error(self) -> AioError | CancelledError | None:
        """The error of a request that has ended, or None if it succeeded."""
        outcome, ticket = self._outcome, self._ticket
        if outcome is None and ticket is not None and ticket.done():
            outcome = ticket.outcome()  # Ctrl-C kept the handle from telling it
        if outcome is None or outcome.kind == "ok":
            return None
        if outcome.kind == "cancelled":
            return CancelledError(f"{self!r} was cancelled")
        return failure(outcome, self._backend, self.write, self.path, self.nbytes)

    def _begun(self, ticket: Ticket) -> None:
        if self._outcome is None:
            self._ticket = ticket

    def _let_go(self) -> None:
        # A caller may keep the future, or the traceback of its error, for long.
        self._hold = self._ticket = None

    def __repr__(self) -> str:
        kind = "write" if self.write else "read"
        return f"<{kind} of {self.nbytes} bytes at {self.offset} of {self.path!r}>"


def failure(outcome: Any, backend: str, write: bool, path: str, nbytes: int) -> AioError:
    """The error of a request of `nbytes` that neither succeeded nor was cancelled."""
    fields: dict[str, Any] = {
        "filename": path,
        "offset": outcome.offset,
        "length": nbytes,
        "transferred": outcome.transferred,
        "backend": backend,
    }
    if outcome.kind == "short":
        return ShortReadError(outcome.errno, "the file ends before the range does", **fields)
    return AioError(
        outcome.errno,
        message_for(outcome.errno, write),
        hint=transfer_hint(outcome.errno, write, path),
        **fields,
    )
