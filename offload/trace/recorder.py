"""Records what every resource does while passes run: spans of time on one clock."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from offload.trace.intervals import union, without

MOST_SPANS = 1_000_000  # then nothing more is recorded: a viewer would not open it
WEIGHTS = "its weights"  # of a layer
KEYS_AND_VALUES = "keys and values"  # that come up the link for attention, in the middle of a layer
PROMPT = 50e-6  # a GPU that reaches a point so soon after the host made it had been waiting for it


class Track(str, enum.Enum):
    """The resources, in the order in which bytes meet them."""

    DISK = "disk"
    LINK_UP = "link up"
    LINK_DOWN = "link down"
    COMPUTE = "compute"
    CPU_ATTENTION = "CPU attention"
    HOST = "host"
    PASS = "passes"


class Clock(Protocol):
    """What a compute device gives of time: points, and the seconds between two of them."""

    late: bool  # whether it may reach a point long after the host has made it

    def timed_mark(self) -> Any: ...
    def synchronize(self, point: Any) -> None: ...
    def elapsed(self, start: Any, stop: Any) -> float | None: ...


class Span(NamedTuple):
    """Seconds since the trace began. A span waits for `waits_for`, or works where that is empty."""

    track: Track
    name: str
    start: float
    stop: float
    nbytes: int = 0  # that it moved
    asked: float | None = None  # when the host issued it; of a pass its end
    waits_for: str = ""


class _Marked(NamedTuple):
    """A span between two points of the device, whose times are not known yet."""

    track: Track
    name: str
    start: Any
    stop: Any
    nbytes: int
    asked: float
    waits_for: str


@dataclass(slots=True)
class _Open:
    start: Any
    asked: float


class Trace:
    """Spans of the passes between `__init__` and `end`. Any thread may record.

    The device's points and the host's clock are put on one clock by a point that both reach at the
    start, to some 20 microseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._host: list[Span] = []
        self._marked: list[_Marked] = []
        self._open: dict[tuple[str, int | None], list[_Open]] = defaultdict(list)
        self._ended: list[Span] | None = None
        self._thread: int | None = None  # that runs passes
        self._origin = clock.timed_mark()
        clock.synchronize(self._origin)
        self._zero = time.perf_counter()

    @property
    def full(self) -> bool:
        """Whether there was more than is recorded."""
        return len(self._host) + len(self._marked) >= MOST_SPANS

    def host(
        self,
        track: Track,
        name: str,
        start: float,
        nbytes: int = 0,
        waits_for: str = "",
        stop: float | None = None,
    ) -> None:
        """Something that began at `start` (time.perf_counter) and ended at `stop`, or now."""
        if self._ended is None and not self.full:
            stop = time.perf_counter() if stop is None else stop
            span = start - self._zero, stop - self._zero
            self._host.append(Span(track, name, *span, nbytes, waits_for=waits_for))
            # Where the CPU computes, a copy that its own thread makes is time that it does not.
            if track is Track.LINK_UP and threading.get_ident() == self._thread:
                self._host.append(Span(Track.COMPUTE, name, *span, waits_for="the link"))

    def device(
        self,
        track: Track,
        name: str,
        start: Any,
        stop: Any,
        nbytes: int = 0,
        asked: float | None = None,
        waits_for: str = "",
    ) -> None:
        """Something between two timed points of the device, issued at `asked` or now."""
        if self._ended is None and not self.full:
            asked = (time.perf_counter() if asked is None else asked) - self._zero
            self._marked.append(_Marked(track, name, start, stop, nbytes, asked, waits_for))

    # What the stream tells, in the order of these calls.

    def waits(self, layer: int) -> None:
        """What is computed from now on needs `layer`, which may be on its way."""
        self._begin("waits for layer", layer)

    def computes(self, layer: int) -> None:
        """It has been waited for, and its work is issued from now on."""
        self._end("waits for layer", layer, waits_for=WEIGHTS)
        self._begin("layer", layer)

    def computed(self, layer: int) -> None:
        """All of its work has been issued."""
        self._end("layer", layer)

    @contextlib.contextmanager
    def layers(self, first: int, last: int) -> Iterator[None]:
        """The work of resident layers is issued within the block."""
        what = f"layer {first}" if first == last else f"layers {first} to {last}"
        self._begin(what)
        try:
            yield
        finally:
            self._end(what)

    def joins(self) -> None:
        """What is computed from now on needs what CPU cores are at work on."""
        self._begin("waits for CPU attention")

    def joined(self) -> None:
        """That is done."""
        self._end("waits for CPU attention", waits_for=Track.CPU_ATTENTION.value)

    def rises(self) -> None:
        """What is computed from now on needs keys and values that may be on their way up."""
        self._begin("waits for keys and values")

    def risen(self) -> None:
        """They have been waited for."""
        self._end("waits for keys and values", waits_for=KEYS_AND_VALUES)

    def pass_begins(self) -> None:
        """A pass of the model begins."""
        self._open["pass", None].clear()  # of a pass that did not end
        self._thread = threading.get_ident()
        self._begin("pass")

    def pass_ends(self) -> None:
        """All of its work has been issued."""
        self._end("pass", None, Track.PASS)

    def _begin(self, what: str, number: int | None = None) -> None:
        if self._ended is None:
            self._open[what, number].append(_Open(self._clock.timed_mark(), time.perf_counter()))

    def _end(
        self,
        what: str,
        number: int | None = None,
        track: Track = Track.COMPUTE,
        waits_for: str = "",
    ) -> None:
        begun = self._open[what, number]
        if self._ended is not None or not begun:
            return  # it began before the trace
        start, now = begun.pop(), time.perf_counter()
        name = what if number is None else f"{what} {number}"
        asked = now if track is Track.PASS else start.asked
        self.device(track, name, start.start, self._clock.timed_mark(), 0, asked, waits_for)
        if waits_for:
            self.host(Track.HOST, name, start.asked, waits_for=waits_for)
        elif now > start.asked:
            self.host(Track.HOST, f"issues {name}", start.asked)

    def end(self) -> list[Span]:
        """Record no more; all spans, by track and start, once the device has reached them."""
        if self._ended is None:
            last = self._clock.timed_mark()
            self._clock.synchronize(last)
            found = [*self._host, *map(self._resolved, list(self._marked))]
            passes = [span for span in found if span.track is Track.PASS]
            found += _between_layers(found, passes, self._clock.late)
            order = list(Track)
            self._ended = sorted(found, key=lambda s: (order.index(s.track), s.start))
            self._marked.clear()
            self._open.clear()
        return self._ended

    def _resolved(self, marked: _Marked) -> Span:
        self._clock.synchronize(marked.stop)
        start = self._clock.elapsed(self._origin, marked.start)
        stop = self._clock.elapsed(self._origin, marked.stop)
        assert start is not None and stop is not None
        _, name, _, _, nbytes, asked, waits_for = marked
        return Span(marked.track, name, start, stop, nbytes, asked, waits_for)


def _between_layers(found: list[Span], passes: list[Span], late: bool) -> list[Span]:
    """What is computed in a pass beside its streamed layers: resident ones, embeddings, the head.

    Where the GPU reached the end of such a stretch as soon as the host had made it, the host was
    what it waited for.
    """
    compute = [span for span in found if span.track is Track.COMPUTE]
    known = union((span.start, span.stop) for span in compute)
    ends = {span.start: span.asked for span in compute}
    ends |= {span.stop: span.asked for span in passes}
    stretches = []
    for one in passes:
        for start, stop in without([(one.start, one.stop)], known):
            asked = ends.get(stop)
            host = late and asked is not None and stop - asked < PROMPT
            stretches.append(
                Span(
                    Track.COMPUTE,
                    "waits for the host" if host else "resident layers and the rest",
                    start,
                    stop,
                    waits_for="the host" if host else "",
                )
            )
    return stretches
