"""When each layer of a pass is loaded and computed, if every piece takes the time it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds that one layer of a pass takes of each resource."""

    compute: float
    link: float = 0.0  # bytes that come up the link, 0 for a resident layer
    disk: float = 0.0  # the same bytes from files, where they rest there


def pass_seconds(layers: Sequence[LayerTime], depth: int) -> float:
    """Seconds of one pass of many: loads of the next pass begin while this one computes.

    A load begins when the layer `depth + 1` loads before it has been computed, and goes the way of
    `scheduler.stream`: the link serves one load after the other, a disk works ahead of it only as
    far as slots are free. With depth 0 the layer in use holds the only slot.
    """
    if not any(layer.link for layer in layers):
        return sum(layer.compute for layer in layers)
    ends = [0.0]
    disk = link = compute = 0.0
    freed = [0.0] * (depth + 1)  # when the layers loaded latest had been computed, in a ring
    at = 0
    for _ in range(_PASSES):
        for layer in layers:
            if layer.link:
                slot = freed[at]
                link = (link if link > slot else slot) + layer.link
                there = link
                if layer.disk:
                    # Chunks cross the link as they come, and other layers' copies between them.
                    disk = max(disk, slot) + layer.disk
                    there = max(link, disk)
                compute = (compute if compute > there else there) + layer.compute
                freed[at] = compute
                at = at + 1 if at < depth else 0
            else:
                compute += layer.compute
        ends.append(compute)
    return ends[-1] - ends[-2]


_PASSES = 3  # by the third the start no longer shows: no load waits for more than one pass
