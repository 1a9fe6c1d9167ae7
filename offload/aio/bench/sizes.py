"""Sizes as people write them: 128KiB, 8GiB, 4096."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse(text: str) -> int:
    """Bytes of "128KiB" or "8GB"; raises ValueError with an example."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    unit = {**_UNITS, **_BINARY}.get(found.group(2)) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write for example 128KiB, 1MiB or 8GiB")
    return int(float(found.group(1)) * unit)


def show(nbytes: int) -> str:
    """The shortest exact form in binary units."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % (size // 4 if size > 1 << 10 else size) == 0:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"
