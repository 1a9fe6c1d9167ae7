"""Results as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from .rounds import Summary

_HEAD = ("", "GB/s", "min..max", "CPU ms/GiB", "pages", "ratio", "min..max")


def show(title: str, rows: Sequence[Summary], reference: str | None = None) -> str:
    """A title and one line for each row; `reference` names what ratios are taken to."""
    head = [*_HEAD[:5]]
    if reference is not None:
        head += [f"of {reference}", "min..max"]
    lines = [head]
    for row in rows:
        line = [
            row.name, f"{row.gbps:.2f}", f"{row.least:.2f}..{row.most:.2f}",
            f"{row.cpu:.1f}", row.pages,
        ]  # fmt: skip
        if reference is not None and row.ratio is not None:
            line += [f"{row.ratio:.2f}", f"{row.ratio_least:.2f}..{row.ratio_most:.2f}"]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(head))]
    text = [title]
    for line in lines:
        cells = [
            cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
            for i, cell in enumerate(line)
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)
