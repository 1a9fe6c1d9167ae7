"""Which engine a handle gets: what was asked for, what was tried, what was taken and why."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

from . import native, regions
from .engine import Engine, Shape, Ticket
from .errors import BackendUnavailable
from .extension import WHY_NOT
from .file import Descriptors
from .hints import setup_hint
from .libaio import LibaioEngine
from .mapping import Mapping
from .threads import ThreadEngine

#: In the order in which "auto" tries them.
BACKENDS: tuple[str, ...] = (*native.BACKENDS, "ctypes-libaio", "python-threads")
ENVIRONMENT = "OFFLOAD_AIO_BACKEND"

_log = logging.getLogger("offload.aio")
_warned: set[str] = set()

OnDone = Callable[[int, Ticket], None]


def make(name: str, shape: Shape, on_done: OnDone, named: bool) -> Engine:
    """The engine of a backend; raises OSError where the system refuses it."""
    if name == "python-threads":
        return ThreadEngine(shape, on_done)
    if name == "ctypes-libaio":
        return LibaioEngine(shape, on_done)
    # A ring that was asked for by name serves everything; native AIO would block on the cache.
    return native.NativeEngine(
        name, shape, on_done, cache_threads=not (named and name.startswith("uring"))
    )


def candidates(requested: str) -> tuple[str, ...]:
    """The backends that are tried, in this order; one that was named has no stand-in. Raises
    ValueError for what is none.
    """
    if requested not in (*BACKENDS, "auto"):
        raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, not {requested!r}")
    if requested != "auto":
        return (requested,)
    named = os.environ.get(ENVIRONMENT, "auto")
    if named == "auto":
        return BACKENDS
    if named not in BACKENDS:
        raise ValueError(f"{ENVIRONMENT} must be one of {BACKENDS}, not {named!r}")
    return (named,)


def select(requested: str, shape: Shape, on_done: OnDone) -> tuple[Engine, list[dict[str, Any]]]:
    """The engine and the list of what was tried."""
    tried: list[dict[str, Any]] = []
    names = candidates(requested)
    for name in names:
        entry = try_out(name)
        tried.append(entry)
        if entry["ok"]:
            try:
                engine = make(name, shape, on_done, named=names == (name,))
            except OSError as error:  # one queue was granted, but not as many or as deep
                entry.update(_refusal(name, error))
                continue
            _warn_of_downgrade(tried)
            return engine, tried
    last = tried[-1]
    raise BackendUnavailable(
        f"backend {last['backend']!r} cannot run here: {last['reason']}", tried
    )


def try_out(name: str) -> dict[str, Any]:
    """Set a small queue up and do one real read; says whether that went well, or why not."""
    shape = Shape(4096, 1, 1, single_submit=False, overlap_events=True)
    try:
        engine = make(name, shape, lambda token, ticket: None, named=True)
        try:
            _read_once(engine, fixed=name == "uring-fixed")
        finally:
            engine.close()
    except OSError as error:
        return _refusal(name, error)
    return {"backend": name, "ok": True, "errno": 0, "reason": "one real read done"}


def _read_once(engine: Engine, fixed: bool) -> None:
    expected = bytes(range(256)) * 16
    with tempfile.TemporaryFile() as file, Mapping(4096) as page:
        file.write(expected)
        file.flush()
        # Named as a direct descriptor, so that the backend itself reads and not its helpers.
        files = Descriptors("a trial file", os.dup(file.fileno()), os.dup(file.fileno()), 1, 1)
        region = regions.add(page.address, 4096)
        try:
            ticket = engine.submit(0, False, files, page.address, 0, 4096)
            ticket.wait(None)
            engine.poll()
        finally:
            regions.remove(region)
        outcome = ticket.outcome()
        if outcome.errno:
            raise OSError(outcome.errno, f"a trial read failed: {os.strerror(outcome.errno)}")
        if page.read(4096) != expected:
            raise OSError(errno.EIO, "a trial read returned other bytes than the file has")
        if fixed:
            found = engine.describe()
            if not found["registered"]:
                raise OSError(errno.ENOMEM, found["registered_reason"])


def _refusal(name: str, error: OSError) -> dict[str, Any]:
    code = error.errno or errno.ENOSYS
    reason = error.strerror or os.strerror(code)
    hint = setup_hint(name, code)
    if hint is not None and hint not in reason and reason != WHY_NOT:
        reason = f"{reason}; {hint}"
    return {"backend": name, "ok": False, "errno": code, "reason": reason}


def _warn_of_downgrade(tried: list[dict[str, Any]]) -> None:
    for entry in tried:
        # Once for each reason: backends that share one were not lost separately.
        if not entry["ok"] and entry["reason"] not in _warned:
            _warned.add(entry["reason"])
            _log.warning("%s is not in use: %s", entry["backend"], entry["reason"])
