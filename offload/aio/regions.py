"""Which memory is populated and stays put: what an engine may register with the kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable

# Plain dicts and no lock: `remove` runs in finalizers, which the garbage collector may start in a
# thread that stands in any of these functions; each step is one atomic dict operation.
_serial = itertools.count(1)
_live: dict[int, tuple[int, int]] = {}
_listeners: dict[int, Callable[[], None]] = {}


def add(address: int, nbytes: int) -> int:
    """Announce a range; returns the serial to remove it by."""
    serial = next(_serial)
    _live[serial] = (address, nbytes)
    return serial


def remove(serial: int) -> None:
    """Take a range back before its memory goes."""
    _live.pop(serial, None)
    changed()


def changed() -> None:
    """Tell the engines that a file or a buffer has gone, so that the kernel lets go of it too."""
    for listener in list(_listeners.values()):
        listener()


def forget_listeners() -> None:
    """In a forked child: the engines that listened are the parent's."""
    _listeners.clear()
