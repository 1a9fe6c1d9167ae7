"""How much host memory this process may use: the machine's, under every cgroup limit above it."""

import operator
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MOST_BYTES = (1 << 63) - 1
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str) -> int:
    """Bytes from an int or text; as in accelerate, "20GiB" is 20 * 2**30 and "24GB" 24 * 10**9.

    Raises ValueError.
    """
    size = _bytes(value)
    if size > MOST_BYTES:
        raise ValueError(f"the size {value!r} is more than any machine has")
    return int(size)


def _bytes(value: int | str) -> int | float:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match:
            number, unit = match.groups()
            if unit.endswith("b") and "i" not in unit.lower() and len(unit) == 2:
                raise ValueError(
                    f"the size {value!r} is ambiguous: {unit!r} reads as bits; "
                    f"write {unit.upper()!r} for bytes"
                )
            factor = _UNITS.get(unit.upper())
            if factor is not None:
                return int(number) * factor if number.isdigit() else float(number) * factor
        raise ValueError(
            f"the size {value!r} is not understood; give bytes as an int, or text like "
            '"20GiB", "24GB" or "500MB"'
        )
    try:
        size = operator.index(value)
    except TypeError:
        size = -1
    if size < 0 or isinstance(value, bool):
        raise ValueError(
            f'the size {value!r} is not understood; give bytes as an int >= 0, or text like "20GiB"'
        )
    return size


def host_memory_available(root: str | os.PathLike[str] = "/") -> int:
    """Bytes this process can still allocate without swapping or being killed.

    `root` is where /proc and the cgroup mounts are looked up.
    """
    left = [level.limit - level.used for level in _levels(Path(root))]
    return max(0, min([_machine(Path(root), "MemAvailable"), *left]))


def host_memory_total(root: str | os.PathLike[str] = "/") -> int:
    """Bytes of memory this process may use in all: the machine's, or its tightest cgroup limit."""
    return min([_machine(Path(root), "MemTotal"), *(level.limit for level in _levels(Path(root)))])


class _Level(NamedTuple):
    """One cgroup with a limit; `used` leaves out the file cache that the kernel drops on demand."""

    limit: int
    used: int


def _machine(root: Path, key: str) -> int:
    """A line of /proc/meminfo in bytes; psutil answers where there is no such file."""
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    memory = psutil.virtual_memory()
    return int(memory.total if key == "MemTotal" else memory.available)


def _levels(root: Path) -> Iterator[_Level]:
    """Every limited cgroup from this process's own up to the highest that is visible.

    A host may mount both versions; the memory controller is then on one of them, and the other
    has no files that could mislead.
    """
    for version, folder, top in _groups(root):
        while True:
            level = _level_v1(folder) if version == 1 else _level_v2(folder)
            if level is not None:
                yield level
            if folder == top:
                break
            folder = folder.parent


def _groups(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, this process's cgroup folder, top folder of that mount) per hierarchy."""
    own: dict[int, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version = 2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            version = 1
        else:
            continue
        if version in own:
            mounted, point = _unescape(fields[3]), _unescape(fields[4])
            top = root / point.lstrip("/")
            yield version, _inside(top, mounted, own[version]), top


def _inside(top: Path, mounted: str, path: str) -> Path:
    """The folder of cgroup `path` where `mounted`, a part of the hierarchy, is visible at `top`.

    In a container the mount often shows the own cgroup as its root, under whatever name the
    host has for it.
    """
    prefix = mounted.rstrip("/")
    if path == prefix or path.startswith(prefix + "/"):
        folder = top / path[len(prefix) :].lstrip("/")
        if ".." not in folder.parts:
            return folder
    return top


def _level_v1(folder: Path) -> _Level | None:
    stat = _stat(folder)
    # The second one also tells of ancestors that a container cannot see.
    limits = [_number(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
    usage = _number(folder / "memory.usage_in_bytes")
    cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    return _level(limits, usage, cache)


def _level_v2(folder: Path) -> _Level | None:
    limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
    return _level(limits, _number(folder / "memory.current"), _stat(folder).get("inactive_file", 0))


def _level(limits: list[int | None], usage: int | None, cache: int) -> _Level | None:
    limit = min((limit for limit in limits if limit is not None), default=None)
    return None if limit is None else _Level(limit, max(0, (usage or 0) - cache))


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    """The number in a cgroup file; None where the file is missing or says "max"."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape")
    except OSError:
        return ""


def _unescape(text: str) -> str:
    """A path of mountinfo, where blanks and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
