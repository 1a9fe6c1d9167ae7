"""The errors of asynchronous I/O: errno, file, offset, length, bytes moved, backend."""

from __future__ import annotations

import errno as errno_codes
import operator
import os
from typing import Any


class AioError(OSError):
    """A read or write that did not move all its bytes, or a request that cannot be served."""

    def __init__(
        self,
        errno: int,
        message: str,
        *,
        filename: str | None = None,
        offset: int | None = None,
        length: int | None = None,
        transferred: int = 0,
        backend: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(errno, message)
        if filename is not None:
            self.filename = filename
        self.message = message
        self.offset = offset
        self.length = length
        self.transferred = transferred
        self.backend = backend
        self.hint = hint
        #: Errors of other requests that failed in the same `AioHandle.wait`.
        self.others: list[AioError] = []

    def __str__(self) -> str:
        text = self.message
        if self.filename is not None:
            text += f": {self.filename!r}"
        where = []
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        if self.length is not None:
            where.append(f"{self.transferred} of {self.length} bytes moved")
        if self.backend is not None:
            where.append(f"backend {self.backend}")
        if where:
            text += f" ({', '.join(where)})"
        if self.hint:
            text += f"; {self.hint}"
        if self.others:
            text += f" [and {len(self.others)} more failed requests, see .others]"
        return f"[Errno {self.errno}] {text}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), dict(self.__dict__), self.errno, self.filename))


class ShortReadError(AioError, EOFError):
    """The file ended before the requested range did."""


class AlignmentError(AioError, ValueError):
    """A file opened with `direct=True` was asked for a range or memory that O_DIRECT refuses."""


class AioClosedError(AioError):
    """The handle or file was closed, or belongs to the process this one was forked from."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(fields.pop("errno", errno_codes.EBADF), message, **fields)


class BackendUnavailable(AioError):
    """The backend that was named cannot run here; `tried` says what was tried and why it failed."""

    def __init__(self, message: str, tried: list[dict[str, Any]], **fields: Any) -> None:
        failures = [entry["errno"] for entry in tried if entry.get("errno")]
        code = fields.pop("errno", failures[-1] if failures else errno_codes.ENOSYS)
        super().__init__(code, message, **fields)
        self.tried = tried


def _rebuild(
    kind: type[AioError], state: dict[str, Any], errno: int, filename: str | None
) -> AioError:
    error = kind.__new__(kind)
    OSError.__init__(error, errno, state.get("message"))
    error.__dict__.update(state)
    if filename is not None:
        error.filename = filename
    return error


def message_for(errno: int, write: bool) -> str:
    """What an errno means for a read or a write, in the system's own words."""
    return f"{'write' if write else 'read'} failed: {os.strerror(errno)}"


def whole(name: str, value: Any) -> int:
    """An argument that counts bytes, of whatever type of integer; raises TypeError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number of bytes, not {value!r}") from None
