"""Decode attention beside SDPA: from one short sequence to many long ones, even and ragged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, copies, launches, seconds
from offload.kernels.attention import MOST_SPLITS, DecodeAttention
from offload.kernels.workspace import Workspace

OP = "decode_attention"
DTYPE = torch.bfloat16
MOST_BYTES = 20_000_000_000  # of all caches of a case
LARGE = 4_000_000_000  # of one copy: alone it is far more than L2


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
# Llama-3.2-1B, Falcon-7B, Gemma-2-9B, Phi-2.
OTHERS = (
    Shape(8, 32, 8, 2048, head_dim=64),
    Shape(8, 71, 1, 2048, head_dim=64),
    Shape(8, 16, 8, 4096, head_dim=256),
    Shape(8, 32, 32, 2048, head_dim=80),
)
RAGGED = tuple(
    Shape(batch, heads, kv_heads, length, ragged=True)
    for heads, kv_heads in ((32, 32), (64, 8))
    for batch, length in ((8, 512), (8, 2048), (64, 512), (64, 2048), (64, 4096))
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


def case(shape: Shape, device: torch.device, splits: Sequence[int] = ()) -> Case:
    """Ours launched as in a model, before the kernel ahead of it has ended, and by itself.

    `splits`: other shares than the library chooses (see DecodeAttention), as the only peers.
    """
    lengths = shape.lengths()
    visible = shape.bytes_of(sum(lengths))
    count = 1 if shape.bytes_allocated > LARGE else copies(visible, device)
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

    def calls(columns: list[int], early: bool, splits: int = 0) -> Callable[[int], None]:
        length = torch.tensor(columns, dtype=torch.int32, device=device)
        return launches(
            [
                DecodeAttention(
                    query,
                    pair[0],
                    pair[1],
                    out,
                    length=length,
                    scale=shape.head_dim**-0.5,
                    workspace=workspace,
                    splits=splits,
                    early=early,
                )
                for pair in caches
            ]
        )

    on_gpu = device.type == "cuda"
    peers: dict[str, Callable[[int], Any]] = {}
    if splits:
        peers |= {f"{n} shares": calls(lengths, on_gpu, n) for n in splits}
    elif on_gpu:
        peers["not early"] = calls(lengths, early=False)
    if shape.ragged and not splits:
        peers["uniform"] = calls([shape.length] * shape.batch, early=on_gpu)
    if not splits:
        peers["SDPA"] = sdpa(query, caches, lengths if shape.ragged else None)
    return Case(
        op=OP,
        shape=shape.name,
        bytes=visible + 2 * query.nbytes,
        flop=4.0 * shape.heads * shape.head_dim * sum(lengths),
        ours=calls(lengths, early=on_gpu),
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


def sweep(device: torch.device, shapes: Sequence[Shape] = SHORT) -> None:
    """Print the microseconds of each shape with other numbers of shares than the library's."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    shares = (sms // 2, sms, sms * 3 // 2, sms * 2, sms * 3, sms * 4)
    for shape in shapes:
        tried = case(shape, device, [n for n in shares if n <= MOST_SPLITS])
        ways = {"ours": tried.ours, **tried.peers}
        found = seconds(list(ways.values()), device, tried.copies, rounds=5)
        times = ", ".join(f"{n} {t * 1e6:.4g}" for n, t in zip(ways, found, strict=True))
        print(f"{shape.name}: {times}", flush=True)


if __name__ == "__main__":
    sweep(torch.device("cuda"))
