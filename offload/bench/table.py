"""A benchmark's result as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from offload.bench.result import Result, Row
from offload.sizes import format_size

_HEAD = (
    "peer",
    "weights",
    "prefill s",
    "TFLOP/s",
    "step s",
    "decode tok/s",
    "total tok/s",
    "GB/s",
    "of bound",
    "GPU GiB",
    "reserved",
    "host GiB",
    "load s",
)


def format_result(result: Result) -> str:
    """The table of rows, under what they were measured with and the bound of the same run."""
    work, sizes, m = result.work, result.sizes, result.machine
    where = m["gpu"] or f"{m['cpu_count']} CPU cores"
    cap = f", GPU memory capped at {format_size(result.gpu_memory)}" if result.gpu_memory else ""
    lines = [
        f"{result.model}, {result.dtype}, batch {work.batch}, prompt {work.prompt}, {work.gen} new "
        f"tokens{cap}; {where}, torch {m['torch']}, transformers {m['transformers']}",
        f"{sizes.layers} layers of {format_size(sizes.layer_bytes)} in all, the whole model "
        f"{format_size(sizes.total_bytes)}",
        f"bound: {'pinned copies' if m['gpu'] else 'copies'} {result.link_rate / 1e9:.2f} GB/s"
        + (f", direct reads {result.disk_rate / 1e9:.2f} GB/s" if result.disk_rate else ""),
        "",
        *format_table([_HEAD, *map(_cells, result.rows)]),
    ]
    lines += [f"{row.peer}: {row.equal}" for row in result.rows if row.equal not in ("", "itself")]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join(lines)


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; the first column is text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    share = row.share_of_bound
    return (
        row.peer,
        row.where,
        _number(row.prefill_seconds),
        _number(row.prefill_flops / 1e12),
        _number(row.step_seconds),
        _number(row.decode_tokens),
        _number(row.total_tokens),
        _number(row.streamed_rate, 1e9),
        "-" if share is None else f"{share:.1%}",
        _number(row.gpu_allocated, 1 << 30),
        _number(row.gpu_reserved, 1 << 30),
        _number(row.host_peak, 1 << 30),
        _number(row.load_seconds),
    )


def _number(value: float | None, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.4g}"
