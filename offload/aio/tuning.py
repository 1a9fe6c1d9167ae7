"""The best settings that `offload bench nvme --tune` found for a drive, in the user's cache."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from offload.home import expanded, home_folder

from .handle import LIMITS, within_limits


def cache_path() -> str:
    """The file that holds the settings of all drives of this user."""
    return str(expanded(home_folder() / "aio.json"))


def drive_of(path: str | os.PathLike[str]) -> str:
    """What tells the drive of a file or folder from others: file system, source, model."""
    found = os.stat(path)
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    parts = [device]
    try:
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                if left.split()[2] == device:
                    parts = right.split()[:2]  # file system type, source
                    break
    except OSError:
        pass  # the device number alone then has to do
    for name in ("device/model", "../device/model", "device/serial", "../device/serial"):
        try:
            with open(f"/sys/dev/block/{device}/{name}") as file:
                parts.append(file.read().strip())
        except OSError:
            continue
    return " ".join(parts)


def tuned(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments of AioHandle for the drive of `path`; empty where it was never tuned."""
    try:
        entry = _read().get(drive_of(path))
    except OSError:
        return {}
    if not isinstance(entry, dict):
        return {}
    # A file that somebody has edited must not stop a run: what AioHandle would refuse is left out.
    found = {name: entry[name] for name in LIMITS if within_limits(name, entry.get(name))}
    if isinstance(entry.get("backend"), str):
        found["backend"] = entry["backend"]
    return found


def remember(path: str | os.PathLike[str], settings: dict[str, Any], gbps: float) -> str:
    """Keep a drive's settings; returns the file they are in."""
    target = cache_path()
    os.makedirs(os.path.dirname(target), exist_ok=True)
    entries = _read()
    entries[drive_of(path)] = {**settings, "gbps": round(gbps, 3)}
    # Written beside and renamed: another run may be reading it.
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target))
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(entries, file, indent=1, sort_keys=True)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def _read() -> dict[str, Any]:
    try:
        with open(cache_path()) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
