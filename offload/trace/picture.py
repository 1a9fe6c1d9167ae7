"""One pass on one page: what each resource did, and what it waited for meanwhile."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.trace.intervals import Intervals, both, length, union, without
from offload.trace.recorder import KEYS_AND_VALUES, WEIGHTS, Span, Track

COLUMNS = 64
_SHADES = " .-=#"  # by the share of a column in which the resource works
_DRAWN = (
    Track.DISK,
    Track.LINK_UP,
    Track.LINK_DOWN,
    Track.CPU_ATTENTION,
    Track.COMPUTE,
)


@dataclass(frozen=True)
class Picture:
    """One pass. Seconds and bytes by resource; `compute` and `link` say where all of the pass's
    seconds went for these two, by what they did or waited for.
    """

    number: int  # of the pass, in the trace, from 1
    passes: int
    seconds: float
    busy: Mapping[Track, float]
    moved: Mapping[Track, int]
    compute: Mapping[str, float]
    link: Mapping[str, float]
    shares: Mapping[Track, Sequence[float]] = field(repr=False)  # busy, of each column

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "pass": self.number,
            "passes": self.passes,
            "seconds": self.seconds,
            "busy_seconds": {track.value: value for track, value in self.busy.items()},
            "moved_bytes": {track.value: value for track, value in self.moved.items()},
            "compute_seconds": dict(self.compute),
            "link_seconds": dict(self.link),
        }

    def lines(self, predicted: Mapping[str, float]) -> list[str]:
        """The page; `predicted` has seconds of a pass by resource, and "pass" for all of it."""
        whole = predicted.get("pass")
        foretold = f", predicted {whole * 1e3:.2f} ms" if whole is not None else ""
        lines = [
            f"pass {self.number} of {self.passes} traced: {self.seconds * 1e3:.2f} ms{foretold}",
            f"  {'':<14}{'works':>12}{'of the pass':>13}{'predicted':>14}{'moved':>12}{'rate':>13}",
        ]
        for track in _DRAWN:
            busy, guess = self.busy.get(track, 0.0), predicted.get(track.value)
            if not busy and guess is None:
                continue
            moved = self.moved.get(track, 0)
            rate = f"{moved / busy / 1e9:.2f} GB/s" if moved and busy else "-"
            lines.append(
                f"  {track.value:<14}{busy * 1e3:>9.2f} ms{busy / self.seconds:>12.1%} "
                + (f"{guess * 1e3:>11.2f} ms" if guess is not None else f"{'-':>14}")
                + (f"{moved / 1e6:>9.0f} MB" if moved else f"{'-':>12}")
                + f"{rate:>13}"
            )
        lines.append(f"  compute: {_told(self.compute)}")
        if self.busy.get(Track.LINK_UP):
            lines.append(f"  link up: {_told(self.link)}")
        lines += [
            f"  {track.value:<14}|{''.join(_shade(share) for share in self.shares[track])}|"
            for track in _DRAWN
            if self.busy.get(track)
        ]
        return lines


def picture(spans: Sequence[Span]) -> Picture | None:
    """Of the pass whose time is the median; None where no whole pass is among the spans."""
    passes = [span for span in spans if span.track is Track.PASS]
    if not passes:
        return None
    middle = statistics.median_low([span.stop - span.start for span in passes])
    chosen = next(i for i, s in enumerate(passes) if s.stop - s.start == middle)
    window = [(passes[chosen].start, passes[chosen].stop)]
    work = {track: _of(spans, track, window) for track in _DRAWN}
    joins = _of(spans, Track.COMPUTE, window, waits_for=Track.CPU_ATTENTION.value)
    rises = _of(spans, Track.COMPUTE, window, waits_for=KEYS_AND_VALUES)
    loads = _of(spans, Track.COMPUTE, window, waits_for=WEIGHTS)
    for held in (joins, rises, loads):  # in the middle of a layer, the last of one still in use
        work[Track.COMPUTE] = without(work[Track.COMPUTE], held)
    return Picture(
        number=chosen + 1,
        passes=len(passes),
        seconds=middle,
        busy={track: length(found) for track, found in work.items()},
        moved={track: _moved(spans, track, window) for track in _DRAWN},
        compute=_compute(window, work, joins),
        link=_link(spans, window, work),
        shares={track: _shares(found, window[0]) for track, found in work.items()},
    )


def _compute(
    window: Intervals, work: Mapping[Track, Intervals], joins: Intervals
) -> dict[str, float]:
    """What the compute device did. While it waits for weights, the link has the blame if it works,
    else a disk that works, else whoever has not asked for them.
    """
    left = without(window, work[Track.COMPUTE])
    found = {"works": length(work[Track.COMPUTE])}
    for cause, held in (
        ("waits for CPU attention", joins),
        ("waits for the link", work[Track.LINK_UP]),
        ("waits for the disk", work[Track.DISK]),
    ):
        found[cause] = length(both(left, held))
        left = without(left, held)
    found["waits for the host"] = length(left)
    return found


def _link(
    spans: Sequence[Span], window: Intervals, work: Mapping[Track, Intervals]
) -> dict[str, float]:
    """What the way up did. Idle, it waits for a free slot from when a copy was issued until it
    began; else for a disk that reads; else nothing was asked of it.
    """
    left = without(window, work[Track.LINK_UP])
    issued = union(
        (span.asked, span.start)
        for span in spans
        if span.track is Track.LINK_UP and span.asked is not None
    )
    found = {"works": length(work[Track.LINK_UP])}
    for cause, held in (
        ("waits for a free slot", issued),
        ("waits for the disk", work[Track.DISK]),
    ):
        found[cause] = length(both(left, held))
        left = without(left, held)
    found["has nothing to do"] = length(left)
    return found


def _of(
    spans: Sequence[Span], track: Track, window: Intervals, waits_for: str = ""
) -> list[tuple[float, float]]:
    return both(
        union((s.start, s.stop) for s in spans if s.track is track and s.waits_for == waits_for),
        window,
    )


def _moved(spans: Sequence[Span], track: Track, window: Intervals) -> int:
    """Bytes, of a span that reaches out of the window in proportion."""
    (low, high), moved = window[0], 0.0
    for span in spans:
        if span.track is track and span.nbytes and span.start < high and span.stop > low:
            inside = min(span.stop, high) - max(span.start, low)
            whole = span.stop - span.start
            moved += span.nbytes * (inside / whole if whole > 0 else 1.0)
    return round(moved)


def _shares(found: Intervals, window: tuple[float, float]) -> list[float]:
    low, high = window
    width = (high - low) / COLUMNS
    edges = [low + i * width for i in range(COLUMNS + 1)]
    return [
        length(both(found, [(a, b)])) / width if width else 0.0
        for a, b in itertools.pairwise(edges)
    ]


def _shade(share: float) -> str:
    return _SHADES[min(len(_SHADES) - 1, round(share * (len(_SHADES) - 1)))]


def _told(parts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value * 1e3:.2f} ms" for name, value in parts.items() if value >= 5e-6
    )
