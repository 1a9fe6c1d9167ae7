"""Byte counts, and numbers of things, as people read them."""


def format_size(n: int) -> str:
    """`n` bytes with four significant digits and a binary unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"


def format_count(n: int, noun: str) -> str:
    """`n` with its noun, which takes an s for all but one."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
