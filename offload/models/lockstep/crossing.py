"""Calls of another model from within a lock step: which thread waits for which model's passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from offload.errors import UnsupportedError


class Owner(Protocol):
    """Who lets one thread at a time run passes of a model (`PassOwner`)."""

    awaits: Owner | None  # whose model a job of its lock step has called


_thread = threading.local()  # `steps`: the owners whose lock steps run in this thread


class _Crossing:
    """A job in lock step on the model of `own` calls that of `other`.

    Raises UnsupportedError where the thread of `other`'s lock step waits for this one: neither
    would ever go on. Each tells what it waits for before it looks, so that one of them sees it.
    """

    def __init__(self, own: Owner, other: Owner) -> None:
        self._own, self._other, self._before = own, other, own.awaits

    def __enter__(self) -> None:
        self._own.awaits = self._other
        at, seen = self._other.awaits, {self._other}
        while at is not None and at not in seen:
            if at in _thread.steps:
                self._own.awaits = self._before
                raise UnsupportedError(
                    "two threads run calls of two models in lock step, and these call each other's "
                    "model: both would wait for ever; run one after the other"
                )
            seen.add(at)
            at = at.awaits

    def __exit__(self, *error: object) -> None:
        self._own.awaits = self._before


_NO_CROSSING = contextlib.nullcontext()


def crossing(owner: Owner) -> contextlib.AbstractContextManager[None]:
    """To be entered ahead of the lock of `owner`."""
    steps = getattr(_thread, "steps", None)
    return _Crossing(steps[-1], owner) if steps and owner not in steps else _NO_CROSSING


@contextlib.contextmanager
def stepping(owner: Owner) -> Iterator[None]:
    """This thread runs calls in lock step on the model of `owner`, whose lock it holds."""
    before = getattr(_thread, "steps", ())
    _thread.steps = (*before, owner)
    try:
        yield
    finally:
        _thread.steps = before
