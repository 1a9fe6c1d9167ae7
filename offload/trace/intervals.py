"""Sets of points in time, as sorted intervals that do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Intervals = Sequence[tuple[float, float]]  # (start, stop), seconds


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every point that one of the spans holds."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def both(a: Intervals, b: Intervals) -> list[tuple[float, float]]:
    """Every point that both hold."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: Intervals, b: Intervals) -> list[tuple[float, float]]:
    """Every point of `a` that `b` does not hold."""
    if not a:
        return []
    low, high = a[0][0], a[-1][1]
    edges = [low, *(edge for span in b for edge in span), high]
    return both(a, union(zip(edges[::2], edges[1::2], strict=True)))


def length(a: Intervals) -> float:
    """Seconds in all."""
    return sum(stop - start for start, stop in a)
