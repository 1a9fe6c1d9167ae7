"""A sweep as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .sizes import show


def check() -> None:
    """Raise where no picture can be drawn, before anything is measured."""
    try:
        import matplotlib  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib; `pip install matplotlib`") from None


def draw(path: str, rows: Sequence[dict[str, Any]], title: str) -> None:
    """GB/s over block size, one line for each backend, depth and direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = f"{row['name']} {row['direction']} x{row['depth']}"
        if row["threads"] > 1:
            name += f" x{row['threads']} threads"
        lines.setdefault(name, []).append((row["block"], row["gbps"]))
    for name, points in lines.items():
        points.sort()
        axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=name)
    blocks = sorted({row["block"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [show(block) for block in blocks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("block size")
    axes.set_ylabel("GB/s")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
