"""A trace as JSON for chrome://tracing and Perfetto: one track a resource."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

from offload.trace.recorder import Span, Track


def write_chrome(spans: Iterable[Span], file: IO[str]) -> None:
    """Write complete events, in microseconds since the trace began."""
    # One event a line: a million of them are never held as text at once.
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    file.write(",\n".join(json.dumps(event) for event in _events(spans)))
    file.write("\n]}\n")


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
