"""All figures of the I/O engine on one machine, each beside what it is measured against.

    python -m offload.aio.bench.figures [--folder DIR] [--size 8GiB] [--arena 16GiB] [--rounds 5]

Reads from the drive under DIR into pinned memory and on to the GPU, pins an arena, writes a file,
and copies over the link. Without a GPU the lines that need one say so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from ..backends import BACKENDS, try_out
from ..buffer import AlignedBuffer, alloc
from ..cudart import cuda_state
from ..file import AioFile
from ..handle import AioHandle
from ..probe import probe
from . import hugepages, link, peers, table, testfile
from .rounds import interleave
from .sizes import parse, show
from .work import GIB, Trial, Work, run

_PLAIN = ((4 << 20, 8), (8 << 20, 16), (16 << 20, 16))  # what the best plain rate is looked for at
_COPYING = 4  # slots whose copy to the GPU may be under way


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="offload.aio.bench.figures", description=__doc__)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--size", type=parse, default=8 << 30)
    parser.add_argument("--arena", type=parse, default=16 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  (with it, memory is pinned where there is a GPU)
    cuda = cuda_state()[0] is not None
    with testfile.made(args.folder, args.size) as (path, nbytes):
        _say_where(path, nbytes)
        _read(path, nbytes, args.rounds, cuda)
        _write(path, nbytes, args.rounds)
    if cuda:
        _arena(args.arena)
        _link()
    else:
        print("\nno GPU: nothing is pinned, so no arena and no link")
    return 0


def _say_where(path: str, nbytes: int) -> None:
    found = probe(path)
    print(f"{show(nbytes)} on: {found['file']['direct_reason']}; kernel {found['kernel']}")
    for entry in found["backends"]:
        print(f"  {entry['backend']:15} {'yes' if entry['ok'] else 'no: ' + entry['reason']}")
    print(
        f"  memlock {found['memlock']}, aio {found['aio_nr']} of {found['aio_max_nr']}", flush=True
    )


def _has_fio() -> bool:
    try:
        peers.check("fio")
    except peers.PeerMissing:
        return False
    return True


def _read(path: str, nbytes: int, rounds: int, cuda: bool) -> None:
    """Every backend and fio into plain memory; then pinned memory, and through it to the GPU."""
    usable = [name for name in BACKENDS if try_out(name)["ok"]]
    engine = usable[0]
    best: tuple[float, Work] | None = None
    for block, depth in _PLAIN:
        work = Work(path, nbytes, block, depth)
        with (
            hugepages.reserved(2 * work.pool + (16 << 20)),
            alloc(work.pool, lock=False) as plain,
        ):
            contestants: dict[str, Callable[[], Trial]] = {}
            if _has_fio():
                contestants["fio"] = functools.partial(peers.run, "fio", work)
            for name in usable:
                contestants[name] = functools.partial(run, work, name, plain)
            reference = next(iter(contestants))
            rows = interleave(contestants, rounds, reference)
        title = f"\nread into plain memory, {show(block)} x {depth}"
        print(table.show(title, rows, reference), flush=True)
        fastest = max(row.gbps for row in rows)
        if best is None or fastest > best[0]:
            best = fastest, work
    assert best is not None
    rate, work = best
    print(f"\nbest plain O_DIRECT rate: {rate:.2f} GB/s at {show(work.block)} x {work.depth}")
    if not cuda:
        return
    # Slots beyond the depth: as many reads in flight as before while copies are under way.
    ring = work.pool + _COPYING * work.block
    with alloc(work.pool, lock=False) as plain, alloc(ring) as pinned:
        print(f"ring of {show(ring)}: pinned {pinned.registered} ({pinned.lock_reason})")
        contestants = {
            "plain memory": functools.partial(run, work, engine, plain),
            "pinned memory": functools.partial(run, work, engine, pinned),
            "to the GPU": functools.partial(_to_device, work, engine, pinned),
        }
        rows = interleave(contestants, rounds, "plain memory")
    print(table.show(f"\nread by {engine} into a ring", rows, "plain memory"))
    print(f"more time with the copy to the GPU: {rows[1].gbps / rows[2].gbps - 1:+.1%}", flush=True)


def _to_device(work: Work, backend: str, ring: AlignedBuffer) -> Trial:
    """The same reads, each block copied on to the GPU; a slot is free when its copy is done."""
    import torch

    slots = ring.tensor().split(work.block)
    stream = torch.cuda.Stream()
    target = torch.empty(ring.nbytes, dtype=torch.uint8, device="cuda").split(work.block)
    copied = [torch.cuda.Event() for _ in slots]
    with AioFile(work.path) as file, AioHandle(work.block, work.depth, backend) as handle:
        handle.pread(ring.view(0, 4096), file)
        torch.cuda.synchronize()
        in_flight: list[Any] = []

        def deliver() -> None:
            at, future = in_flight.pop(0)
            future.result()
            with torch.cuda.stream(stream):
                target[at].copy_(slots[at], non_blocking=True)
                copied[at].record(stream)

        start = time.perf_counter()
        for number, offset in enumerate(range(0, work.nbytes, work.block)):
            if len(in_flight) == work.depth:
                deliver()
            at = number % len(slots)
            copied[at].synchronize()
            in_flight.append((at, handle.async_pread(slots[at], file, offset)))
        while in_flight:
            deliver()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return Trial(work.nbytes / seconds / 1e9, float("nan"), ring.page_kind)


def _write(path: str, nbytes: int, rounds: int) -> None:
    work = Work(path, nbytes, 16 << 20, 8, write=True)
    engine = next(name for name in BACKENDS if try_out(name)["ok"])
    with hugepages.reserved(2 * work.pool + (16 << 20)), alloc(work.pool, lock=False) as pool:
        contestants: dict[str, Callable[[], Trial]] = {}
        if _has_fio():
            contestants["fio"] = functools.partial(peers.run, "fio", work)
        for name in dict.fromkeys((engine, "threads", "python-threads")):
            if try_out(name)["ok"]:
                contestants[name] = functools.partial(run, work, name, pool)
        reference = next(iter(contestants))
        rows = interleave(contestants, max(2, rounds // 2), reference)
    print(
        table.show(f"\nwrite of {show(nbytes)} with fsync, 16 MiB x 8", rows, reference), flush=True
    )


def _arena(nbytes: int) -> None:
    """Pin an arena, touching included, against torch; both orders, on memory touched before."""
    import torch

    torch.cuda.init()
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_cache is None:
        empty_cache = torch._C._accelerator_emptyHostCache

    def ours() -> float:
        start = time.perf_counter()
        buffer = alloc(nbytes)
        seconds = time.perf_counter() - start
        if not buffer.registered:
            raise OSError(0, f"the arena could not be pinned: {buffer.lock_reason}")
        buffer.close()
        return nbytes / seconds / 1e9

    def theirs() -> float:
        start = time.perf_counter()
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        seconds = time.perf_counter() - start
        del tensor
        empty_cache()  # or the next one would be had for nothing
        return nbytes / seconds / 1e9

    # The first touch of memory in a fresh machine costs what no later one does.
    alloc(nbytes, lock=False).close()
    found: dict[str, list[float]] = {"offload": [], "torch": []}
    for order in (("torch", "offload"), ("offload", "torch")):
        for name in order:
            found[name].append(ours() if name == "offload" else theirs())
    print(f"\npinned arena of {nbytes / GIB:g} GiB, GB/s, torch first then offload first")
    for name, rates in found.items():
        print(f"  {name:8} {rates[0]:.2f} {rates[1]:.2f}")
    ratios = [a / b for a, b in zip(found["offload"], found["torch"], strict=True)]
    print(f"  ratio    {ratios[0]:.2f} {ratios[1]:.2f}", flush=True)


def _link() -> None:
    import torch

    device = torch.device("cuda", 0)
    print(f"\nhost to {torch.cuda.get_device_name(device)}, GB/s")
    for row in link.rates(device, [64 << 10, 1 << 20, 16 << 20, 256 << 20], 5):
        text = "  ".join(f"{kind} {rate:.2f}" for kind, rate in row["gbps"].items())
        print(f"  {show(row['size']):>8}  {text}")


if __name__ == "__main__":
    raise SystemExit(main())
