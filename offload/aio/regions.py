"""Which memory stays put and may be registered with the kernel, and who hears that it is going."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

from .extension import _aio


class Listener(Protocol):
    """An engine that may hold the kernel's references to files and memory."""

    def file_closed(self, serial: int) -> None: ...
    def region_removed(self, serial: int) -> None: ...


# No lock: the functions below run in finalizers, which the garbage collector may start in a thread
# that stands in any of them; each step is one atomic operation of a dict.
_serials = itertools.count(1)
_listeners: dict[int, weakref.ref[Any]] = {}


def add(address: int, nbytes: int) -> int:
    """Announce populated memory; returns the serial to remove it by."""
    serial = next(_serials)
    if _aio is not None:
        _aio.add_region(serial, address, nbytes)
    return serial


def remove(serial: int) -> None:
    """Take a region back before its memory goes."""
    if _aio is not None:
        _aio.remove_region(serial)
    for listener in _listening():
        listener.region_removed(serial)


def file_closed(serial: int) -> None:
    """A file's descriptors are closed; the kernel keeps it open while a ring refers to it."""
    for listener in _listening():
        listener.file_closed(serial)


def listen(listener: Listener) -> None:
    _listeners[id(listener)] = weakref.ref(listener)


def forget(listener: Listener) -> None:
    _listeners.pop(id(listener), None)


def forget_listeners() -> None:
    """In a forked child: the engines that listened are the parent's."""
    _listeners.clear()


def _listening() -> list[Listener]:
    return [found for each in list(_listeners.values()) if (found := each()) is not None]
