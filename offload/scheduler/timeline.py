"""When each layer of a pass is loaded and computed, if every piece takes the time it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PASSES = 3  # by the third the start no longer shows: no load waits for more than one pass


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds that one layer of a pass takes of each resource."""

    compute: float
    link: float = 0.0  # its weights, coming up the link; 0 for a resident layer
    disk: float = 0.0  # the same bytes from files, where they rest there
    rising: float = 0.0  # keys and values, coming up the link for attention in the middle of it


def pass_seconds(layers: Sequence[LayerTime], depth: int) -> float:
    """Seconds of one pass of many: loads of the next pass begin while this one computes.

    A load begins when the layer `depth + 1` loads before it has been computed, and goes the way of
    `scheduler.stream`: the link serves one load after the other, a disk works ahead of it only as
    far as slots are free. With depth 0 the layer in use holds the only slot. Keys and values have a
    place of their own, which is free when those of the layer before have been attended to.
    """
    if not any(layer.link or layer.rising for layer in layers):
        return sum(layer.compute for layer in layers)
    return _walk(list(layers) * _PASSES, depth, 0, len(layers) * (_PASSES - 1))


def first_pass_seconds(layers: Sequence[LayerTime], depth: int) -> float:
    """The same of a pass that nothing was computed before: its first loads are in their slots."""
    return _walk(layers, depth, depth + 1, 0)


def _walk(layers: Sequence[LayerTime], depth: int, there: int, start: int) -> float:
    """Seconds from the layer of number `start` to the end; the first loads, `there` of them, are
    done beforehand.

    A search walks thousands of settings: the larger of two is taken without a call of max().
    """
    # Points in time: when each has done all that it was given so far, when the latest keys and
    # values had been attended to, and when the layer `start` began.
    disk = link = compute = risen = begin = 0.0
    freed = [0.0] * (depth + 1)  # when the layers loaded latest had been computed, in a ring
    at = 0
    for number, layer in enumerate(layers):
        if number == start:
            begin = compute
        ready = compute
        if layer.link:
            if there:
                there -= 1
            else:
                slot = freed[at]
                link = (link if link > slot else slot) + layer.link
                arrived = link
                if layer.disk:
                    # Chunks cross the link as they come, and other layers' copies between them.
                    disk = (disk if disk > slot else slot) + layer.disk
                    arrived = link if link > disk else disk
                ready = compute if compute > arrived else arrived
        compute = ready + layer.compute
        if layer.rising:
            link = (link if link > risen else risen) + layer.rising
            risen = compute = compute if compute > link else link
        if layer.link:
            freed[at] = compute
            at = at + 1 if at < depth else 0
    return compute - begin
