"""Decode attention beside SDPA: from one short sequence to many long ones, even and ragged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, copies, launches, seconds
from offload.kernels.attention import DecodeAttention
from offload.kernels.scores import Scores
from offload.kernels.workspace import Workspace

OP = "decode_attention"
DTYPE = torch.bfloat16
MOST_BYTES = 20_000_000_000  # of all caches of a case
LARGE = 4_000_000_000  # of one copy: alone it is far more than L2
SWEEP_BYTES = 300_000_000  # what a sweep goes round: also far more
SHARES = 1  # the variant in which CTAs take equal shares of all columns

Options = dict[str, int]


@dataclass(frozen=True)
class Shape:
    """One model's heads on one batch; `ragged`: lengths of a lognormal with `length` as mean."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int = 128
    ragged: bool = False

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"B{self.batch} {heads} {'ragged ' if self.ragged else ''}{self.length}"

    def lengths(self) -> list[int]:
        """Columns of every row; as many in all whether ragged or not."""
        total = self.batch * self.length
        if not self.ragged:
            return [self.length] * self.batch
        generator = torch.Generator().manual_seed(self.batch)
        drawn = torch.randn(self.batch, generator=generator).mul(0.8).exp()
        ends = (drawn.cumsum(0) / drawn.sum() * total).round().long()
        ends[-1] = total
        return ends.diff(prepend=ends.new_zeros(1)).tolist()

    def bytes_of(self, columns: int) -> int:
        """Of the keys and values of so many columns."""
        return 2 * columns * self.kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def bytes_allocated(self) -> int:
        return self.bytes_of(self.batch * max(self.lengths()))


ANCHORS = (
    Shape(1, 40, 40, 2048),
    Shape(32, 40, 40, 2048),
    Shape(1, 64, 8, 32768),
    Shape(32, 64, 8, 4096),
    Shape(64, 32, 8, 8192),
)
GRID = tuple(
    Shape(batch, heads, kv_heads, length)
    for heads, kv_heads in ((32, 32), (64, 8), (32, 8))
    for batch in (1, 8, 64)
    for length in (512, 2048, 8192, 32768)
)
# Llama-3.2-1B, Falcon-7B, Gemma-2-9B, Phi-2 and their kind.
OTHERS = (
    Shape(8, 32, 8, 2048, head_dim=64),
    Shape(8, 71, 1, 2048, head_dim=64),
    Shape(8, 16, 8, 4096, head_dim=256),
    Shape(8, 32, 32, 2048, head_dim=80),
    Shape(64, 32, 32, 2048, head_dim=80),
    Shape(4, 71, 1, 8192, head_dim=64),
)
RAGGED = (
    *(
        Shape(batch, heads, kv_heads, length, ragged=True)
        for heads, kv_heads in ((32, 32), (64, 8))
        for batch, length in ((8, 512), (8, 2048), (64, 512), (64, 2048), (64, 4096))
    ),
    *(Shape(32, 32, 8, 2048, head_dim=d, ragged=True) for d in (128, 64)),
    *(Shape(batch, 32, 32, 2048, head_dim=80, ragged=True) for batch in (8, 16, 32)),
    Shape(16, 32, 32, 1024, head_dim=96, ragged=True),
)
# What is bound by how long a launch and its steps take rather than by HBM, one of a kind.
SHORT = (
    Shape(1, 32, 32, 512),
    Shape(1, 32, 8, 512),
    Shape(1, 32, 8, 2048),
    Shape(1, 64, 8, 8192),
    Shape(1, 64, 8, 32768),
    Shape(8, 64, 8, 512),
    Shape(8, 32, 32, 512),
    Shape(64, 64, 8, 512),
    *OTHERS[:2],
    OTHERS[3],
    Shape(8, 64, 8, 512, ragged=True),
)
SWEPT = (
    Shape(1, 32, 4, 1024),
    Shape(8, 64, 8, 2048),
    Shape(8, 64, 8, 2048, ragged=True),
    Shape(8, 32, 32, 2048),
    Shape(1, 40, 40, 2048),
)
TINY = (Shape(2, 4, 2, 33, head_dim=16), Shape(3, 4, 2, 33, head_dim=16, ragged=True))


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The anchors first; quick: the short ones alone."""
    if device.type != "cuda":
        shapes: tuple[Shape, ...] = TINY
    elif quick:
        shapes = SHORT
    else:
        shapes = (*ANCHORS, *(s for s in GRID if s not in ANCHORS), *OTHERS, *RAGGED)
    for shape in shapes:
        if shape.bytes_allocated <= MOST_BYTES:
            yield case(shape, device)


def case(shape: Shape, device: torch.device, ways: Mapping[str, Options] | None = None) -> Case:
    """Ours launched as in a model, before the kernel ahead of it has ended, and by itself.

    `ways`: options of DecodeAttention other than the library's choice, as more peers.
    """
    lengths = shape.lengths()
    visible = shape.bytes_of(sum(lengths))
    count = 1 if shape.bytes_allocated > LARGE else copies(visible, device)
    if ways is not None:
        count = min(count, max(3, SWEEP_BYTES // visible))
    count = max(1, min(count, MOST_BYTES // shape.bytes_allocated))
    like: dict[str, Any] = {"dtype": DTYPE, "device": device}
    caches = torch.empty(
        count, 2, shape.batch, shape.kv_heads, max(lengths), shape.head_dim, **like
    )
    for copy in caches:
        copy.normal_()
    query = torch.randn(shape.batch, shape.heads, shape.head_dim, **like)
    out = torch.empty_like(query)
    workspace = Workspace(device)

    def calls(columns: list[int], **options: Any) -> Callable[[int], None]:
        length = torch.tensor(columns, dtype=torch.int32, device=device)
        return launches(
            [
                DecodeAttention(
                    query,
                    pair[0],
                    pair[1],
                    out,
                    length=length,
                    scores=Scores(shape.head_dim**-0.5),
                    workspace=workspace,
                    even=len(set(columns)) == 1,
                    **options,
                )
                for pair in caches
            ]
        )

    early = device.type == "cuda"
    peers: dict[str, Callable[[int], Any]] = {}
    if early:
        peers["not early"] = calls(lengths, early=False)
    if shape.ragged:
        peers["uniform"] = calls([shape.length] * shape.batch, early=early)
    peers["SDPA"] = sdpa(query, caches, lengths if shape.ragged else None)
    for name, options in (ways or {}).items():
        try:
            peers[name] = calls(lengths, early=early, **options)
        except RuntimeError:  # not for this shape or this GPU
            continue
    return Case(
        op=OP,
        shape=shape.name,
        bytes=visible + 2 * query.nbytes,
        flop=4.0 * shape.heads * shape.head_dim * sum(lengths),
        ours=calls(lengths, early=early),
        peers=peers,
        copies=count,
        hbm="read",
    )


def sdpa(
    query: torch.Tensor, caches: torch.Tensor, lengths: list[int] | None
) -> Callable[[int], torch.Tensor]:
    """PyTorch's attention on copy i, by a mask where the lengths differ."""
    mask = None
    if lengths is not None:
        end = torch.tensor(lengths, device=query.device)
        mask = (torch.arange(caches.shape[-2], device=query.device) < end[:, None])[:, None, None]
    grouped = query.shape[1] != caches.shape[3]

    def run(i: int) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query[:, :, None], caches[i, 0], caches[i, 1], attn_mask=mask, enable_gqa=grouped
        )

    return run


def ways_for(shape: Shape) -> dict[str, Options]:
    """Shares of all columns, then clusters: CTAs x warps x strips in flight, how many of them.

    Left out is what would have more strips in flight than a warp has, or far more or fewer CTAs
    than a GPU. Without a count, an item has several clusters where each warp keeps four strips.
    """
    ways: dict[str, Options] = {"shares": {"variant": SHARES}}
    items = shape.batch * shape.kv_heads * -(-(shape.heads // shape.kv_heads) // 16)
    strips = -(-shape.length // 16)
    for cluster, warps, stages in itertools.product((1, 2, 4, 8, 16), (4, 8), (1, 2, 3, 4)):
        a_warp, ctas = -(-strips // (cluster * warps)), items * cluster
        if not min(a_warp, 2) <= stages <= a_warp or warps * stages * shape.head_dim > 3072:
            continue
        long = a_warp >= 32  # what small clusters would serve by many of them
        if ctas > 600 or (cluster < 8 and ctas < 128 and not long):
            continue
        name, way = f"{cluster}x{warps}x{stages}", cluster + 100 * warps + 10000 * stages
        if ctas >= 64 or cluster >= 8:
            ways[name] = {"variant": way}
        if a_warp > 1 and ctas <= 132 and stages < 4:
            for clusters in {items, 132 // cluster, 264 // cluster}:
                if clusters >= items and (not long or clusters > items):
                    ways[f"{name} /{clusters}"] = {"variant": way, "splits": clusters}
    return ways


def sweep(device: torch.device) -> None:
    """Print the microseconds of each shape's ways, the library's first, then the fastest."""
    for shape in (*SHORT, *SWEPT):
        tried = case(shape, device, ways_for(shape))
        ways = {"ours": tried.ours, **tried.peers}
        for name in list(ways):
            try:
                ways[name](0)
            except RuntimeError as error:  # the others' times still count
                del ways[name]
                print(f"{shape.name}, {name}: {error}")
        passes = max(2, -(-64 // tried.copies))  # the graph's own launch must not count
        found = seconds(list(ways.values()), device, tried.copies, 5, passes, settle=5e-3)
        times = dict(zip(ways, found, strict=True))
        fixed = [n for n in ("ours", "not early", "uniform", "SDPA", "shares") if n in times]
        rest = sorted(times.keys() - fixed, key=times.__getitem__)[:14]
        text = ", ".join(f"{n} {times[n] * 1e6:.4g}" for n in (*fixed, *rest))
        print(f"{shape.name}, {tried.bytes / 1e6:.3g} MB: {text}", flush=True)


if __name__ == "__main__":
    sweep(torch.device("cuda"))
