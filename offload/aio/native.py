"""The compiled engine: io_uring, native AIO and threads, where the extension was built."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from . import regions
from .engine import Shape, Ticket
from .extension import WHY_NOT, _aio
from .file import Descriptors
from .hints import memlock_hint
from .pieces import Course, NativePieces

BACKENDS: tuple[str, ...] = ("uring-fixed", "uring", "libaio", "threads")


class NativeEngine:
    """A compiled backend; its I/O threads never take the GIL, so ended requests are collected."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        on_done: Callable[[int, Ticket], None],
        *,
        cache_threads: bool = True,
        **script: Any,
    ) -> None:
        if _aio is None:
            raise OSError(errno.ENOSYS, WHY_NOT)
        self.name = name
        self._on_done = on_done
        self._tickets: dict[int, Ticket] = {}
        self._cache_threads = cache_threads and name in BACKENDS[:3]
        self._engine = _aio.Engine(
            name, shape.block_size, shape.queue_depth, shape.parallelism,
            shape.single_submit, shape.overlap_events, self._cache_threads, **script,
        )  # fmt: skip
        regions.listen(self)

    def submit(
        self, token: int, write: bool, files: Descriptors, address: int, offset: int, nbytes: int
    ) -> Ticket:
        ticket = self._engine.submit(
            token, write, files.serial, files.direct, files.buffered, files.mem_align,
            files.offset_align, files.strict, address, offset, nbytes,
        )  # fmt: skip
        self._tickets[token] = ticket
        return ticket

    def stream(self, course: Course) -> NativePieces:
        """Read ahead along a course, without Python between its pieces."""
        files, span = course.files, course.span
        stream = _aio.Stream(
            self._engine, files.serial, files.direct, files.buffered, files.mem_align,
            files.offset_align, files.strict, span.address, course.chunk, course.slots,
            course.kept, course.ranges,
        )  # fmt: skip
        return NativePieces(stream, self.name, course)

    def poll(self) -> None:
        for token in self._engine.collect_ended():
            ticket = self._tickets.pop(token, None)
            if ticket is not None:  # else Ctrl-C came as it was begun, and nobody waits for it
                self._on_done(token, ticket)

    def owns_this_thread(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        counters = self._engine.counters()
        found = {"page_cache_transfers": "threads" if self._cache_threads else self.name}
        if self.name != "uring-fixed":
            return {**found, "registered": False, "registered_reason": "only uring-fixed does"}
        code = counters["register_error"]
        reason = "memory from offload.aio.alloc, as it is first used"
        if code:
            reason = f"some memory was refused: {os.strerror(code)}; {memlock_hint()}"
        return {**found, "registered": not code, "registered_reason": reason}

    def stats(self) -> dict[str, int]:
        counters = self._engine.counters()
        return {name: counters[name] for name in counters if name != "register_error"}

    def file_closed(self, serial: int) -> None:
        self._engine.drop_file(serial)

    def region_removed(self, serial: int) -> None:
        self._engine.drop_region(serial)

    def close(self) -> None:
        regions.forget(self)
        self._engine.close()

    def abandon(self) -> None:
        self._engine.abandon()
