"""`offload bench nvme`: rates of a drive by block, depth, threads, backend and direction."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .. import tuning
from ..backends import BACKENDS, candidates, try_out
from ..buffer import alloc
from ..probe import probe
from . import hugepages, peers, plot, table, testfile
from .rounds import Summary, interleave
from .sizes import show
from .work import Trial, Work, run

_COMPARED = ("uring-fixed", "libaio", "threads", "ctypes-libaio")
_TUNED_BLOCKS = (1 << 20, 4 << 20, 8 << 20, 16 << 20)
_TUNED_DEPTHS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Cell:
    """One setting, at which all contestants meet."""

    block: int
    depth: int
    threads: int
    direction: str
    pattern: str

    def __str__(self) -> str:
        threads = f", {self.threads} I/O threads" if self.threads > 1 else ""
        layers = ", layer-like" if self.pattern == "layers" else ""
        return f"{self.direction}, {show(self.block)} x {self.depth}{threads}{layers}"


def measure(args: argparse.Namespace) -> int:
    """Run the benchmark that the arguments describe; prints a table, or JSON."""
    for peer in args.compare:
        peers.check(peer)
    if args.plot:
        plot.check()
    if args.write and args.file:
        raise ValueError("--file is only read; leave --write out, or name a folder instead")
    progress = _progress if sys.stderr.isatty() and not args.json else lambda text: None
    backends = _backends(args)
    source = (
        testfile.existing(args.file, args.max_size)
        if args.file
        else testfile.made(args.folder, args.max_size, progress)
    )
    rows: list[dict[str, Any]] = []
    with source as (path, nbytes):
        found = probe(path)
        if not args.json:
            print(_describe(found, nbytes))
        for cell in _cells(args):
            summaries, reference, note = _meet(args, cell, backends, path, nbytes, progress)
            rows += [{**asdict(cell), **asdict(summary)} for summary in summaries]
            if not args.json:
                progress("")
                print("\n" + table.show(str(cell), summaries, reference), flush=True)
                if note:
                    print(note)
        if args.tune:
            _remember(args, path, rows)
    if args.json:
        print(json.dumps({"probe": found, "bytes": nbytes, "rows": rows}, indent=1))
    if args.plot:
        plot.draw(args.plot, rows, f"{found['file']['path']}")
    return 0


def _backends(args: argparse.Namespace) -> list[str]:
    wanted = list(args.backend or (_COMPARED if args.compare else ["auto"]))
    if wanted == ["all"]:
        wanted = list(BACKENDS)
    if wanted == ["auto"]:
        tried = (try_out(name) for name in candidates("auto"))
        for entry in tried:
            if entry["ok"]:
                return [entry["backend"]]
        raise ValueError(f"backend {entry['backend']!r} cannot run here: {entry['reason']}")
    usable = []
    for name in wanted:
        entry = try_out(name)
        if entry["ok"]:
            usable.append(name)
        elif args.backend and args.backend != ["all"]:
            raise ValueError(f"backend {name!r} cannot run here: {entry['reason']}")
        else:
            print(f"without {name}: {entry['reason']}", file=sys.stderr)
    return usable


def _cells(args: argparse.Namespace) -> Iterator[Cell]:
    blocks, depths, threads = args.block, args.depth, args.threads
    if args.tune:
        blocks, depths = blocks or _TUNED_BLOCKS, depths or _TUNED_DEPTHS
    elif args.compare:
        blocks, depths = blocks or (16 << 20,), depths or (16,)
    else:
        blocks, depths = blocks or (128 << 10, 1 << 20, 8 << 20), depths or (4, 16)
    for direction in ("read", "write") if args.write else ("read",):
        for block, depth, count in itertools.product(blocks, depths, threads or (1,)):
            yield Cell(block, depth, count, direction, args.pattern)


def _meet(
    args: argparse.Namespace,
    cell: Cell,
    backends: list[str],
    path: str,
    nbytes: int,
    progress: Callable[[str], None],
) -> tuple[list[Summary], str | None, str]:
    """All contestants at one setting; the ratios' reference, and a note where there is none."""
    work = Work(
        path, nbytes, cell.block, cell.depth, cell.threads, cell.direction == "write", cell.pattern
    )
    with contextlib.ExitStack() as stack:
        if args.compare:
            # For fio's memory and for ours: both on huge pages, or the ratio says nothing.
            stack.enter_context(hugepages.reserved(2 * work.pool + (16 << 20)))
        pool = stack.enter_context(alloc(work.pool, lock=False))
        contestants: dict[str, Callable[[], Trial]] = {
            peer: functools.partial(peers.run, peer, work) for peer in args.compare
        }
        for name in backends:
            contestants[name] = functools.partial(run, work, name, pool)
        reference = args.compare[0] if args.compare else None
        summaries = interleave(contestants, args.rounds, reference, progress)
    if "fio" in args.compare and summaries[0].pages == "4K":
        note = "fio: 4K pages, so no ratio; it takes huge pages where root may reserve them"
        return summaries, None, note
    return summaries, reference, ""


def _remember(args: argparse.Namespace, path: str, rows: list[dict[str, Any]]) -> None:
    reads = [row for row in rows if row["direction"] == "read" and row["name"] in BACKENDS]
    fastest = max(row["gbps"] for row in reads)
    # Of settings that tie, the one that takes the least memory.
    near = [row for row in reads if row["gbps"] >= 0.98 * fastest]
    best = min(near, key=lambda row: (row["block"] * row["depth"] * row["threads"], -row["gbps"]))
    settings = {
        "block_size": best["block"],
        "queue_depth": best["depth"],
        "intra_op_parallelism": best["threads"],
    }
    if args.backend:
        settings["backend"] = best["name"]
    where = tuning.remember(path, settings, best["gbps"])
    if not args.json:
        print(
            f"\nbest: {show(best['block'])} x {best['depth']}, {best['gbps']:.2f} GB/s; "
            f"kept in {where} for {tuning.drive_of(path)}"
        )


def _describe(found: dict[str, Any], nbytes: int) -> str:
    file = found["file"]
    lines = [f"{file['path']}: {show(nbytes)}, {file['direct_reason']}"]
    lines.append(f"kernel {found['kernel']}, auto takes {found['selected'] or 'none'}")
    if not file["direct"]:
        lines.append("warning: not read past the page cache; rates are those of memory")
    return "\n".join(lines)


def _progress(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
