"""Byte counts as people read them."""


def format_size(n: int) -> str:
    """`n` bytes with four significant digits and a binary unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"
