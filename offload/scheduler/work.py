"""What a pass asks of each resource of a machine, and how two that work at once slow each other."""

from __future__ import annotations

from dataclasses import dataclass

from offload.scheduler.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Work:
    """One pass: seconds, of all layers where not said otherwise."""

    # Of one layer of each kind, where it stays and where it streams: GPU and CPU attention, as they
    # join.
    layers: tuple[tuple[float, float], ...]
    compute: float  # the same of all layers, and what is around them
    before: float  # what the host does before the first layer
    after: float  # the head, and what the host does before the next pass
    link: float  # weights, at the rate that holds while they move
    rising: float  # keys and values that come up the link, likewise
    disk: float
    down: float
    hbm: float
    matrix: float
    launch: float
    cpu: float

    @property
    def least(self) -> float:
        """No order of loads makes the pass shorter."""
        return max(self.compute, self.link + self.rising, self.disk, self.down)


def beside_cpu(
    hardware: Hardware, group: int, dtype: str, up: float, attended: float
) -> tuple[float, float]:
    """Seconds of so many bytes up the link, and of attention on the CPU that takes `attended` of
    them alone, of `group` queries a KV head to keys and values of `dtype`: each slowed by the other
    for as long as both work.
    """
    alone = up / hardware.needed("link_up") if up else 0.0
    if not attended or not up:
        return alone, attended
    attends, moves = hardware.beside(group, dtype)
    return _together((alone, alone / moves), (attended, attended / attends))


def both_ways(hardware: Hardware, up: float, down: float) -> tuple[float, float]:
    """Seconds of bytes up and bytes down the link, each slowed while both move."""
    up_rate = hardware.needed("link_up") if up else 1.0
    down_rate = hardware.needed("link_down") if down else 1.0
    if not up or not down:
        return up / up_rate, down / down_rate
    return _together(
        (up / up_rate, up / min(up_rate, hardware.link_up_both or up_rate)),
        (down / down_rate, down / min(down_rate, hardware.link_down_both or down_rate)),
    )


def _together(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Seconds of two works that begin at once, each given as (alone, beside the other): the longer
    one goes on alone.
    """
    (a_alone, a_beside), (b_alone, b_beside) = a, b
    if a_beside <= b_beside:
        return a_beside, a_beside + b_alone * (1 - a_beside / b_beside)
    return b_beside + a_alone * (1 - b_beside / a_beside), b_beside
