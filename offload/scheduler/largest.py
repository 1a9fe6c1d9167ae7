"""The largest number that a limit allows."""

from __future__ import annotations

from collections.abc import Callable


def largest(need: Callable[[int], int], limit: int, low: int, high: int) -> int:
    """The largest number from `low` to `high` whose `need` is no more than `limit`.

    `need` rises, nearly on a line, and that of `low` is within the limit.
    """
    at_low, at_high = need(low), need(high)
    if at_high <= limit:
        return high
    step = 0
    while high - low > 1:
        step += 1
        guess = low + (limit - at_low) * (high - low) // (at_high - at_low)
        middle = (low + high) // 2 if step % 4 == 0 else min(max(guess, low + 1), high - 1)
        found = need(middle)
        if found <= limit:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    return low
