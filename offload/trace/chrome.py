"""A trace as JSON for chrome://tracing and Perfetto: one track a resource."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import IO, Any

from offload.trace.recorder import Span, Track


def write_chrome(spans: Iterable[Span], file: IO[str]) -> None:
    """Write complete events, in microseconds since the trace began. `file` was opened by its whole
    path: what ends this early removes it, and an OSError names it.
    """
    try:
        # One event a line: a million of them are never held as text at once.
        between = '{"displayTimeUnit": "ms", "traceEvents": [\n'
        for event in _events(spans):
            file.write(between + json.dumps(event))
            between = ",\n"
        file.write("\n]}\n")
        file.flush()
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails again
            file.close()
        if os.path.isfile(file.name):
            os.unlink(file.name)
        if isinstance(error, OSError):
            what = f"the trace cannot be written: {error.strerror}"
            raise OSError(error.errno, what, file.name) from error
        raise


def _events(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    numbers = {track: number for number, track in enumerate(Track, 1)}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "offload"}}
    for track, number in numbers.items():
        thread = {"ph": "M", "pid": 1, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": track.value}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}
    read = 0.0  # until when a disk has been at work
    for span in spans:
        # Requests overlap in a drive, and a viewer draws one thing at a time on a track.
        start = max(span.start, read) if span.track is Track.DISK else span.start
        if span.track is Track.DISK:
            read = max(read, span.stop)
        facts: dict[str, Any] = {}
        if span.nbytes:
            facts["bytes"] = span.nbytes
        if span.asked is not None:
            facts["issued at us"] = round(span.asked * 1e6, 1)
        yield {
            "ph": "X",
            "pid": 1,
            "tid": numbers[span.track],
            "name": span.name,
            "cat": "wait" if span.waits_for else "work",
            "ts": round(start * 1e6, 3),
            "dur": round(max(0.0, span.stop - start) * 1e6, 3),
            "args": facts,
        }
