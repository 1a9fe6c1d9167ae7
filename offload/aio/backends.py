"""Which engine a handle gets: what was asked for, what was tried, what was taken and why."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Any

from .engine import Engine, Shape, Ticket
from .errors import BackendUnavailable
from .hints import setup_hint
from .threads import ThreadEngine

BACKENDS = ("python-threads",)
ENVIRONMENT = "OFFLOAD_AIO_BACKEND"

_log = logging.getLogger("offload.aio")
_warned: set[str] = set()

OnDone = Callable[[int, Ticket], None]


def _make(name: str, shape: Shape, on_done: OnDone) -> Engine:
    return ThreadEngine(shape, on_done)


def select(requested: str, shape: Shape, on_done: OnDone) -> tuple[Engine, list[dict[str, Any]]]:
    """The engine and the list of what was tried; a backend that was named has no stand-in."""
    if requested not in (*BACKENDS, "auto"):
        raise ValueError(f"backend must be one of 'auto', {BACKENDS}, not {requested!r}")
    named = requested
    if requested == "auto" and os.environ.get(ENVIRONMENT, "auto") != "auto":
        named = os.environ[ENVIRONMENT]
        if named not in BACKENDS:
            raise ValueError(f"{ENVIRONMENT} must be one of {BACKENDS}, not {named!r}")
    tried: list[dict[str, Any]] = []
    for name in BACKENDS if named == "auto" else (named,):
        try:
            engine = _make(name, shape, on_done)
        except OSError as error:
            code = error.errno or errno.ENOSYS
            reason = error.strerror or os.strerror(code)
            hint = setup_hint(name, code)
            tried.append(
                {"backend": name, "ok": False, "errno": code,
                 "reason": f"{reason}; {hint}" if hint else reason}
            )  # fmt: skip
            continue
        tried.append({"backend": name, "ok": True, "errno": 0, "reason": "one real read done"})
        _warn_of_downgrade(tried)
        return engine, tried
    last = tried[-1]
    raise BackendUnavailable(
        f"backend {last['backend']!r} cannot run here: {last['reason']}", tried
    )


def _warn_of_downgrade(tried: list[dict[str, Any]]) -> None:
    for entry in tried:
        text = f"{entry['backend']} is not in use: {entry['reason']}"
        if not entry["ok"] and text not in _warned:
            _warned.add(text)
            _log.warning("%s", text)
