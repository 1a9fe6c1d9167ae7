"""Interleaved rounds: every contestant once a round, so that a drive's moods hit all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .work import Trial


@dataclass(frozen=True)
class Summary:
    """Median and spread of one contestant over the rounds."""

    name: str
    gbps: float
    least: float
    most: float
    cpu: float
    pages: str
    ratio: float | None = None  # median of the rounds' own ratios to the reference
    ratio_least: float | None = None
    ratio_most: float | None = None


def interleave(
    contestants: Mapping[str, Callable[[], Trial]],
    rounds: int,
    reference: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Summary]:
    """Run each contestant once a round; ratios are taken within a round."""
    found: dict[str, list[Trial]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name, once in contestants.items():
            progress(f"round {turn + 1} of {rounds}: {name}")
            found[name].append(once())
    return [_summary(name, trials, found.get(reference or "")) for name, trials in found.items()]


def _summary(name: str, trials: list[Trial], reference: list[Trial] | None) -> Summary:
    rates = [trial.gbps for trial in trials]
    ratios: list[float] = []
    if reference is not None:
        ratios = [a.gbps / b.gbps for a, b in zip(trials, reference, strict=True)]
    return Summary(
        name,
        statistics.median(rates),
        min(rates),
        max(rates),
        statistics.median(trial.cpu for trial in trials),
        trials[-1].pages,
        statistics.median(ratios) if ratios else None,
        min(ratios) if ratios else None,
        max(ratios) if ratios else None,
    )
