"""Figures in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; the first column is text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return lines


def number(value: float | None, unit: float = 1) -> str:
    """Four significant digits of `value` in `unit`; a dash for None."""
    return "-" if value is None else f"{value / unit:.4g}"
