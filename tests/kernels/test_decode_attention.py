"""Decode attention: what is seen, every kind of score, odd sizes, splits, and bad arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import attention_machine
import pytest
import torch
from accuracy import DTYPES, assert_accurate, assert_untouched, poisoned, widened
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from machines import MACHINES, device_of, needs_gpu
from scored import scored
from torch.nn import functional

from offload.kernels import reference
from offload.kernels.attention import DecodeAttention
from offload.kernels.rotary import QkvLayout, RotaryAppend
from offload.kernels.scores import Scores
from offload.kernels.workspace import Workspace

EXAMPLES = {"reference": 20, "host": 20, "cuda": 400}
KERNELS = MACHINES[1:]


def make(
    machine: str,
    *,
    lengths: Sequence[int],
    capacity: int,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    kv_heads: int = 1,
    group: int = 1,
    starts: Sequence[int] | None = None,
    slopes: bool = False,
    sinks: bool = False,
    query_pad: int = 0,
    offset: int = 0,
    spare: int = 0,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of DecodeAttention, its output aside; every column that is not seen is NaN.

    `query_pad`: elements between a head's query and the next; `offset`: of the caches from an
    aligned address; `spare`: NaN columns between a head's last column and the next head.
    """
    torch.manual_seed(seed)
    device = device_of(machine)
    batch, heads = len(lengths), kv_heads * group

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    query = (random(batch, heads, head_dim + query_pad) * 1.5)[..., :head_dim]
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    start = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    options = {"length": length, "start": start, "scale": head_dim**-0.5, **options}
    if slopes:
        options["slopes"] = torch.rand(heads, device=device) * 0.5
    if sinks:
        options["sinks"] = torch.randn(heads, device=device) * 3
    caches = []
    for _ in range(2):
        size = batch * kv_heads * (capacity + spare) * head_dim
        buffer = random(size + offset)[offset:].view(batch, kv_heads, capacity + spare, head_dim)
        hidden = ~seen(options, capacity + spare)
        buffer.masked_fill_(hidden[:, None, :, None], math.nan)
        caches.append(buffer[:, :, :capacity])
    return {"query": query, "key_cache": caches[0], "value_cache": caches[1], **options}


def seen(options: dict[str, Any], columns: int) -> torch.Tensor:
    """Which columns each row sees, [batch, columns], said in another way than the reference's."""
    length = options["length"]
    starts = [0] * len(length) if options.get("start") is None else options["start"].tolist()
    visible = torch.zeros(len(length), columns, dtype=torch.bool)
    for row, first, end in zip(visible, starts, length.tolist(), strict=True):
        end = min(end, options.get("max_length") or columns)
        if options.get("window"):
            first = max(first, end - options["window"])
        row[max(first, 0) : max(end, 0)] = True
    return visible.to(length.device)


def exactly(arguments: dict[str, Any]) -> torch.Tensor:
    """The formula in float64, row by row, over the seen columns alone."""
    a = widened(arguments)
    query, key, value = a["query"], a["key_cache"], a["value_cache"]
    group = query.shape[1] // key.shape[1]
    visible = seen(a, key.shape[2])
    out = torch.zeros_like(query)
    for b in range(query.shape[0]):
        columns = visible[b].nonzero()[:, 0]
        if not len(columns):
            continue
        k = key[b, :, columns].repeat_interleave(group, 0)
        v = value[b, :, columns].repeat_interleave(group, 0)
        score = torch.einsum("hd,hcd->hc", query[b], k) * a["scale"]
        if a.get("softcap"):
            score = torch.tanh(score / a["softcap"]) * a["softcap"]
        if a.get("slopes") is not None:
            score = score + a["slopes"][:, None] * columns
        if a.get("sinks") is not None:
            score = torch.cat((score, a["sinks"][:, None]), 1)
        weights = torch.softmax(score, 1)[:, : len(columns)]
        out[b] = torch.einsum("hc,hcd->hd", weights, v)
    return out


def as_torch_rounds(arguments: dict[str, Any], exact: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention, the least accurate of a few that add in other orders.

    Products of the dtype with float32 sums, weights rounded to it. One order alone may happen to
    round well where there are few results.
    """
    visible = seen(arguments, arguments["key_cache"].shape[2])[:, None, None]
    few = arguments["query"].dtype == torch.float32 and exact.numel() < 4096
    return max(
        (_in_some_order(arguments, visible, seed) for seed in range(16 if few else 1)),
        key=lambda peer: (peer.double() - exact).abs().max().item() if peer.numel() else 0.0,
    )


def _in_some_order(arguments: dict[str, Any], visible: torch.Tensor, seed: int) -> torch.Tensor:
    dtype = arguments["query"].dtype
    a = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    query, key, value = a["query"], a["key_cache"], a["value_cache"]
    batch, kv_heads, capacity, head_dim = key.shape
    generator = torch.Generator().manual_seed(seed)
    element = torch.randperm(head_dim, generator=generator).to(query.device)
    column = torch.randperm(capacity, generator=generator).to(query.device)
    visible = visible[..., column]
    key, value = (torch.where(visible.mT, x[:, :, column], 0) for x in (key, value))
    query = query.view(batch, kv_heads, -1, head_dim)
    score = query[..., element] @ key[..., element].mT * a["scale"]
    if a.get("softcap"):
        score = torch.tanh(score / a["softcap"]) * a["softcap"]
    if a.get("slopes") is not None:
        score = score + a["slopes"].view(1, kv_heads, -1, 1) * column
    score = score.masked_fill(~visible, -math.inf)
    if a.get("sinks") is not None:
        sinks = a["sinks"].view(1, kv_heads, -1, 1).expand(batch, -1, -1, 1)
        score = torch.cat((score, sinks), -1)
    weights = torch.softmax(score, -1)[..., :capacity]
    weights = torch.where(visible, weights, 0).to(dtype).float()
    return (weights @ value).view(arguments["query"].shape).to(dtype)


def outputs(arguments: dict[str, Any], machine: str, **where: Any) -> torch.Tensor:
    """The call's output, of which nothing was left as it was and beside which nothing changed."""
    query = arguments["query"]
    out, buffer = poisoned(*query.shape, dtype=query.dtype, device=query.device.type)
    attention_machine.run({**arguments, "out": out}, machine, **where)
    assert_untouched(out, buffer)
    return out


def check(machine: str, arguments: dict[str, Any], what: str = "", **where: Any) -> None:
    out = outputs(arguments, machine, **where)
    exact = exactly(arguments)
    peer = as_torch_rounds(arguments, exact)
    assert_accurate(out, peer, exact, what, exponents=exponents(arguments))


def exponents(arguments: dict[str, Any]) -> float:
    """The largest sink, or score without its slope, that a weight is the exponential of.

    Of a score, the sum of its terms' sizes: that is what the error of summing them is relative to.
    """
    a = widened(arguments)
    key = torch.where(seen(a, a["key_cache"].shape[2])[:, None, :, None], a["key_cache"], 0)
    key = key.repeat_interleave(a["query"].shape[1] // key.shape[1], 1)
    score = torch.einsum("bhd,bhcd->bhc", a["query"].abs(), key.abs()) * abs(a["scale"])
    sizes = [x.abs().max().item() for x in (score, a.get("sinks")) if x is not None and x.numel()]
    return max(sizes, default=0.0)


CLUSTERS = (st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([4, 8]), st.integers(1, 4))


def clusters(cluster: int, warps: int, stages: int) -> int:
    """The variant of so many CTAs a cluster, warps a CTA and strips in flight a warp."""
    return cluster + 100 * warps + 10000 * stages


@st.composite
def settings(draw: st.DrawFn, machine: str) -> dict[str, Any]:
    large = machine == "cuda"
    flag = st.booleans()
    head_dim = draw(st.sampled_from([64, 128, 128, 80, 96, 256, 8, 112]) | st.integers(1, 512))
    if not large and head_dim > 128 and draw(flag):
        head_dim %= 100
        head_dim += 1
    groups = st.sampled_from([1, 1, 1, 2, 4, 7, 8, 9, 16, 17, 33, 48, 71])
    group = draw(groups | st.integers(1, 100))
    if not large:
        group = min(group, 3000 // head_dim + 1)
    kv_heads = draw(st.integers(1, 3))
    most = 2000 if large else 200
    capacity = draw(st.sampled_from([1, 63, 64, 65, 128, 129, most]) | st.integers(1, most))
    batch = draw(st.sampled_from([1, 1, 2, 3, 5] + ([40, 140] if large else [])))
    length = st.integers(0, capacity) | st.sampled_from([0, 1, capacity, capacity - 1])
    lengths = [draw(length) for _ in range(min(batch, 5))]
    starts = [draw(st.integers(0, n) | st.sampled_from([0, n, max(n - 1, 0)])) for n in lengths]
    lengths, starts = (list(itertools.islice(itertools.cycle(x), batch)) for x in (lengths, starts))
    dtype = draw(st.sampled_from(DTYPES))
    query_pad, offset = draw(st.sampled_from([0, 0, 8, 3])), draw(st.sampled_from([0, 0, 0, 1, 8]))
    variant = draw(st.sampled_from([0, 0, 0, 1]) | st.builds(clusters, *CLUSTERS))
    warps, stages = variant // 100 % 100, variant // 10000
    small = warps * stages * 64 * max(head_dim, 64) < 64 << 10  # for all GPUs that HOSTS are
    small &= large or warps * (variant % 100) <= 32
    if dtype == torch.float32 or head_dim % 8 or query_pad == 3 or offset == 1 or not small:
        variant = min(variant, 1)
    return {
        "lengths": lengths,
        "starts": draw(st.sampled_from([None, starts])),
        "capacity": capacity,
        "dtype": dtype,
        "head_dim": head_dim,
        "kv_heads": kv_heads,
        "group": group,
        "slopes": draw(flag),
        "sinks": draw(flag),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0, 50.0])),
        "window": draw(st.sampled_from([0, 0, 0, 1, 5, 64, 100, 5000])),
        "max_length": draw(st.sampled_from([None, None, max(capacity // 2, 1)])),
        "query_pad": query_pad,
        "offset": offset,
        "spare": draw(st.sampled_from([0, 8, 3])),
        "splits": draw(st.sampled_from([0, 0, 1, 2, 3, 7, 20, 1000])),
        "variant": variant,
        "even": draw(flag),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_any_combination(machine: str) -> None:
    @hypothesis_settings(max_examples=EXAMPLES[machine])
    @given(s=settings(machine))
    def one(s: dict[str, Any]) -> None:
        check(machine, make(machine, **s), str(s))

    one()


NAMED: dict[str, dict[str, Any]] = {
    "nothing to see": {"lengths": [0, 0], "capacity": 70, "sinks": True},
    "one column": {"lengths": [1, 1], "capacity": 1},
    "tile borders": {"lengths": [63, 64, 65, 127, 128, 129], "capacity": 129},
    "start is length": {"lengths": [90, 64, 0], "starts": [90, 64, 0], "capacity": 90},
    "start beyond length": {"lengths": [5, 64], "starts": [6, 2**31 - 1], "capacity": 90},
    "negative": {"lengths": [-5, -(2**31)], "starts": [-1, -(2**31)], "capacity": 66, "window": 7},
    "start within": {"lengths": [90, 70, 65], "starts": [1, 69, 64], "capacity": 90},
    "window below a tile": {"lengths": [130, 64, 5, 0], "capacity": 130, "window": 9},
    "window of one": {"lengths": [130, 64, 5, 0], "capacity": 130, "window": 1},
    "window above length": {"lengths": [130, 64, 5], "capacity": 130, "window": 2**31 - 1},
    "window and start": {"lengths": [130, 100], "starts": [125, 3], "capacity": 130, "window": 64},
    "length beyond capacity": {"lengths": [1000, 2**31 - 1], "capacity": 100, "window": 30},
    "large slopes": {"lengths": [200], "capacity": 200, "group": 8, "slopes": True, "sinks": True},
    "odd head": {"lengths": [70, 3], "capacity": 70, "head_dim": 33, "group": 3},
    "even head": {"lengths": [70, 3], "capacity": 70, "head_dim": 50, "group": 3},
    "one element": {"lengths": [70, 3], "capacity": 70, "head_dim": 1},
    "head of 512": {"lengths": [40], "capacity": 40, "head_dim": 512, "group": 2},
    "head of 256": {"lengths": [70], "capacity": 70, "head_dim": 256, "group": 5},
    "uncommon multiple of 8": {"lengths": [70, 64], "capacity": 70, "head_dim": 72, "group": 2},
    "Falcon's 71 queries": {"lengths": [70, 100], "capacity": 100, "group": 71},
    "130 queries": {"lengths": [70], "capacity": 70, "group": 130, "splits": 3},
    "even rows": {"lengths": [64] * 9, "capacity": 64, "kv_heads": 2, "head_dim": 48, "even": True},
    "rows thought even": {"lengths": [300, 0, 7, 64, 299], "capacity": 300, "even": True},
    "long items": {"lengths": [3100, 50], "capacity": 3100, "head_dim": 16, "group": 2},
    "whole items": {"lengths": [64] * 9, "capacity": 64, "kv_heads": 2, "splits": 6},
    "many parts": {"lengths": [700], "capacity": 700, "group": 48, "splits": 11},
    "large parts": {
        "lengths": [700],
        "capacity": 700,
        "group": 64,
        "head_dim": 128,
        "splits": 11,
    },
    "more parts": {"lengths": [0, 2400, 0], "capacity": 2400, "head_dim": 8, "splits": 39},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("machine", MACHINES)
def test_named(machine: str, name: str, dtype: torch.dtype) -> None:
    check(machine, make(machine, dtype=dtype, **NAMED[name]))


@pytest.mark.parametrize("machine", KERNELS)
def test_more_rows_than_threads(machine: str) -> None:
    """The shares of a batch in which a thread of a CTA looks at several rows."""
    lengths = [i * 7 % 40 if i % 3 else 0 for i in range(131)]
    check(machine, make(machine, lengths=lengths, capacity=40, kv_heads=2, head_dim=16, splits=3))


@pytest.mark.parametrize("name", ["tile borders", "start within", "negative", "odd head", "split"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_begins_before_the_query_and_the_last_columns_are_there(
    name: str, dtype: torch.dtype
) -> None:
    """They are NaN until the kernel has waited for the one ahead; all else may be read before."""
    named = {**NAMED, "split": {"lengths": [150, 64, 0, 300], "capacity": 300, "group": 20}}[name]
    ways = [(0, 0, 0), (0, 0, 1), (3, 0, 0), (0, 65, 0)]
    if dtype != torch.float32 and name != "odd head":
        ways += [(0, 0, clusters(2, 4, 1)), (9, 65, clusters(1, 4, 2))]
    for splits, window, variant in ways:
        options = {"splits": splits, "window": window, "variant": variant}
        a = make("host", dtype=dtype, **{**named, **options})
        out, buffer = poisoned(*a["query"].shape, dtype=dtype, device="cpu")
        exact = exactly(a)
        peer = as_torch_rounds(a, exact)
        terms, visible = exponents(a), seen(a, a["key_cache"].shape[2])
        late = [a["query"]]
        for b, row in enumerate(visible):
            if row.any():
                last = row.nonzero()[-1, 0]
                late += [x for c in ("key_cache", "value_cache") for x in a[c][b, :, last]]
        with attention_machine.written_late(late):
            for _ in range(2):  # copies that come at once, and late ones
                attention_machine.run({**a, "out": out, "early": True}, "host")
                assert_untouched(out, buffer)
                assert_accurate(out, peer, exact, str(options), exponents=terms)


# Uniform lengths, and how many CTAs there are at most: cut at items, inside them, or both.
@pytest.mark.parametrize("ctas", [1, 5, 7, 12, 18, 100])
@pytest.mark.parametrize("rows", [1, 3, 6, 66])
def test_even_shares(rows: int, ctas: int) -> None:
    length = 64 * 5 + 1 if rows < 66 else 70
    check("host", make("host", lengths=[length] * rows, capacity=330, head_dim=8, splits=ctas))


@pytest.mark.parametrize("group", [1, 5, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("machine", KERNELS)
def test_repeats_and_splits(machine: str, dtype: torch.dtype, group: int) -> None:
    """Bit for bit the same again, whichever CTA comes last, and nearly so with any split."""
    sizes: dict[str, Any] = {"lengths": [150, 7, 90], "capacity": 150, "dtype": dtype}
    arguments = make(machine, group=group, **sizes)
    exact = exactly(arguments)
    peer = as_torch_rounds(arguments, exact)
    for splits in (1, 5) if machine == "host" else (1, 2, 5, 8, 100):
        first, again = (outputs({**arguments, "splits": splits}, machine) for _ in range(2))
        assert torch.equal(first, again)
        assert_accurate(first, peer, exact, f"{splits} splits")


# Lengths, queries a KV head, clusters at most, and how they are made up: an item a cluster, several
# clusters an item, fewer parts than clusters, rows of very different lengths.
CLUSTERED: dict[str, tuple[list[int], int, int, int]] = {
    "one warp has a strip": ([5], 8, 0, clusters(4, 4, 1)),
    "more strips than are in flight": ([700, 690], 3, 1, clusters(2, 4, 2)),
    "slices of parts of heads": ([300], 7, 0, clusters(16, 4, 1)),
    "more CTAs than fours": ([40], 1, 4, clusters(16, 4, 1)),
    "clusters of one item": ([1100], 12, 6, clusters(2, 4, 1)),
    "uneven rows": ([900, 3, 0, 250, 17], 8, 19, clusters(1, 4, 1)),
    "many parts": ([2000], 8, 1000, clusters(1, 4, 1)),
    "more rows than lanes": ([70 - i for i in range(35)], 2, 100, clusters(1, 4, 1)),
    "groups of heads": ([200, 90], 35, 12, clusters(2, 4, 1)),
}


@pytest.mark.parametrize("name", CLUSTERED)
@pytest.mark.parametrize("machine", KERNELS)
def test_clusters(machine: str, name: str) -> None:
    """Right, and bit for bit the same whichever CTA comes last."""
    # On the host either dtype in turns: nothing that these cases are about depends on it.
    dtypes = (torch.float16, torch.bfloat16)
    turn = list(CLUSTERED).index(name) % 2
    for dtype in dtypes if machine == "cuda" else dtypes[turn : turn + 1]:
        check_cluster(machine, dtype, name)


def check_cluster(machine: str, dtype: torch.dtype, name: str) -> None:
    lengths, group, splits, variant = CLUSTERED[name]
    sizes: dict[str, Any] = {"lengths": lengths, "capacity": max(lengths), "group": group}
    sizes |= {"head_dim": 80, "kv_heads": 2, "splits": splits, "variant": variant}
    a = make(machine, dtype=dtype, **sizes)
    check(machine, a, name)
    assert torch.equal(*(outputs(a, machine) for _ in range(2)))


SHARES = 1
# Batch, query and KV heads, head size, capacity of rows of very different lengths; which way was
# the quickest of those measured on an H200, or next to it, and how many clusters at most.
RAGGED: list[tuple[tuple[int, int, int, int, int], int, int]] = [
    ((8, 32, 32, 80, 4635), clusters(1, 4, 2), 792),
    ((16, 32, 32, 96, 2194), clusters(1, 4, 2), 792),
    ((16, 16, 16, 80, 4388), clusters(1, 4, 2), 792),
    ((8, 32, 32, 128, 4635), clusters(1, 4, 2), 792),
    ((32, 32, 8, 128, 8484), clusters(1, 4, 2), 792),
    ((32, 64, 8, 128, 8484), clusters(1, 4, 2), 792),
    ((32, 32, 8, 64, 8484), clusters(1, 4, 3), 528),
    ((64, 32, 8, 64, 4200), clusters(1, 4, 3), 768),
    ((16, 64, 8, 128, 4220), clusters(1, 4, 2), 396),
    ((6, 32, 8, 128, 9000), clusters(1, 4, 2), 396),
    ((32, 71, 1, 64, 8192), clusters(2, 4, 2), 0),
    ((20, 16, 8, 256, 6585), clusters(1, 4, 2), 264),
    ((32, 32, 32, 80, 4242), clusters(2, 4, 2), 0),
    ((32, 32, 32, 128, 2121), clusters(2, 4, 2), 0),
    ((64, 32, 8, 128, 21589), clusters(1, 4, 2), 792),
    ((64, 64, 8, 128, 5397), clusters(1, 4, 2), 792),
    ((64, 32, 32, 128, 5397), clusters(2, 4, 2), 0),
    ((65, 32, 8, 128, 21589), SHARES, 0),
]


@pytest.mark.parametrize(("sizes", "variant", "splits"), RAGGED)
def test_ragged_rows_take_what_was_measured(
    sizes: tuple[int, int, int, int, int], variant: int, splits: int
) -> None:
    names = ("batch", "heads", "kv_heads", "head_dim", "max_length")
    fields = dict(zip(names, sizes, strict=True)) | {"dtype": 1}
    wanted = attention_machine.workspace_bytes(132, **fields, variant=variant, splits=splits)
    assert attention_machine.workspace_bytes(132, **fields) == wanted
    assert attention_machine.workspace_bytes(132, **fields, even=1) != wanted


# A GPU of four multiprocessors, and rows whose items it cuts, into parts that are not equal.
FOUR = (4, attention_machine.H200, 1, 1)
UNEVEN = [710, 1, 0, 550, 17, 2090]
# One with CTAs for more parts than 64 items.
MANY = (30, attention_machine.H200, 1, 1)


@pytest.mark.parametrize("seen", ["all", "window", "padded", "scores"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 4), (128, 8), (256, 2), (8, 5)])
def test_ragged_rows(head_dim: int, group: int, seen: str) -> None:
    """Rows of very different lengths, some cut; with what is hidden left, right or by a window."""
    rows = UNEVEN[-5:] if head_dim == 256 else UNEVEN
    options: dict[str, dict[str, Any]] = {
        "all": {},
        "window": {"window": 585},
        "padded": {"starts": [max(n - 1180, n // 40) for n in rows], "capacity": 2500},
        "scores": {"slopes": True, "sinks": True, "softcap": 30.0},
    }
    sizes: dict[str, Any] = {"lengths": rows, "capacity": max(rows), "group": group}
    dtype = torch.float16 if group % 2 else torch.bfloat16
    a = make("host", head_dim=head_dim, dtype=dtype, **{**sizes, **options[seen]})
    if seen == "scores":
        a["slopes"] /= 500  # else the last part alone counts
    call = attention_machine.run({**a, "out": torch.empty_like(a["query"])}, "host", FOUR)
    assert call.arguments.workspace_bytes > len(rows) * bytes_of_a_part(a), "nothing is cut"
    check("host", a, host=FOUR)
    assert torch.equal(*(outputs(a, "host", host=FOUR) for _ in range(2)))


@pytest.mark.parametrize("count", [33, 64])
def test_ragged_rows_of_more_than_a_warp(count: int) -> None:
    """Two sequences a lane: cut ones, and whole ones of all lengths, wherever they stand."""
    rows = [(n * 7919) % 97 for n in range(count)]
    rows[1], rows[31], rows[32], rows[-1] = 1900, 700, 800, 1500
    rows[0], rows[2], rows[30], rows[-3] = 400, 200, 180, 500
    a = make("host", lengths=rows, capacity=1900, kv_heads=1, head_dim=64, group=2)
    call = attention_machine.run({**a, "out": torch.empty_like(a["query"])}, "host", MANY)
    assert call.arguments.workspace_bytes > count * bytes_of_a_part(a), "nothing is cut"
    check("host", a, host=MANY)


def bytes_of_a_part(arguments: dict[str, Any]) -> int:
    """In the workspace, of a CTA that is no cluster."""
    heads, head_dim = arguments["query"].shape[1:]
    one = {"batch": 1, "heads": heads, "kv_heads": 1, "head_dim": head_dim, "max_length": 1}
    return attention_machine.workspace_bytes(4, **one, dtype=1, variant=clusters(1, 4, 2))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_ragged_rows_of_more_items_than_are_cut(head_dim: int) -> None:
    """Two CTAs an item, also of rows of 0 and 1 columns, and of one much longer than the others."""
    lengths = [90, 0, 1, 1300, 16, 17, 64, 250] * 2
    sizes: dict[str, Any] = {"lengths": lengths, "capacity": 1400, "head_dim": head_dim}
    a = make("host", kv_heads=3, group=2, starts=[n // 5 for n in lengths], sinks=True, **sizes)
    fields = {"batch": 16, "heads": 6, "kv_heads": 3, "head_dim": head_dim, "max_length": 1400}
    wanted = attention_machine.workspace_bytes(4, **fields, dtype=1, variant=clusters(2, 4, 2))
    assert attention_machine.workspace_bytes(4, **fields, dtype=1) == wanted
    check("host", a, host=FOUR)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        (2, {}),
        (clusters(3, 4, 1), {}),
        (clusters(32, 4, 1), {}),
        (clusters(8, 5, 1), {}),
        (clusters(8, 4, 5), {}),
        (clusters(8, 8, 4), {"head_dim": 256}),
        (clusters(8, 4, 1), {"head_dim": 20}),
        (clusters(8, 4, 1), {"dtype": torch.float32}),
    ],
)
def test_no_such_variant(variant: int, changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"lengths": [40], "capacity": 40, "variant": variant, **changes}
    a = make("host", **sizes)
    with pytest.raises(AssertionError, match=f"variant {variant} "):
        outputs(a, "host")


@pytest.mark.parametrize("machine", KERNELS)
def test_queries_between_others(machine: str) -> None:
    """A view of QKV products, and caches whose rows and heads are swapped in memory."""
    a = make(machine, lengths=[40, 33, 65], capacity=65, head_dim=40, kv_heads=2, group=3)
    rows = torch.randn(3, 5, 14, 40, device=a["query"].device).to(torch.bfloat16)
    a["query"] = rows[:, 2, 1:7]
    for name in ("key_cache", "value_cache"):
        a[name] = a[name].transpose(0, 1).contiguous().transpose(0, 1)
    check(machine, a)


@pytest.mark.parametrize("machine", MACHINES)
def test_nan_and_infinity_that_are_seen(machine: str) -> None:
    """They reach the heads that see them, and no others."""
    a = make(machine, lengths=[20, 20, 20], capacity=20, kv_heads=2, group=2)
    a["key_cache"][0, 1, 5] = math.nan
    a["value_cache"][1, 0, 19, 3] = math.inf
    out = outputs_with_nan(a, machine)
    assert torch.isnan(out[0, 2:]).all() and torch.isfinite(out[0, :2]).all()
    assert (out[1, :2, 3] == math.inf).all() and torch.isfinite(out[1, 2:]).all()
    assert torch.isfinite(out[2]).all()


def outputs_with_nan(arguments: dict[str, Any], machine: str) -> torch.Tensor:
    out = torch.full_like(arguments["query"], 7.0)
    attention_machine.run({**arguments, "out": out}, machine)
    return out


@pytest.mark.parametrize("machine", MACHINES)
def test_no_rows(machine: str) -> None:
    assert outputs(make(machine, lengths=[], capacity=5), machine).shape == (0, 1, 64)


@pytest.mark.parametrize("causal_start", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_is_sdpa(dtype: torch.dtype, causal_start: bool) -> None:
    """What transformers models compute: SDPA with a mask, the groups' keys and values repeated."""
    starts = [3, 0, 60] if causal_start else None
    a = make("reference", lengths=[50, 1, 61], starts=starts, capacity=61, kv_heads=2, group=3)
    query, key, value = (
        torch.nan_to_num(a[name].to(dtype)) for name in ("query", "key_cache", "value_cache")
    )
    mask = seen(a, 61)[:, None, None]
    theirs = functional.scaled_dot_product_attention(
        query[:, :, None], key, value, attn_mask=mask, enable_gqa=True
    )[:, :, 0]
    options = {name: a[name] for name in ("length", "start", "scale")}
    ours = reference.decode_attention(query, key, value, **scored(options))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_reference_is_the_formula(slopes: bool, sinks: bool, softcap: float) -> None:
    a = make(
        "reference",
        lengths=[50, 0, 61],
        starts=[7, 0, 0],
        capacity=61,
        group=3,
        slopes=slopes,
        sinks=sinks,
        softcap=softcap,
        window=40,
    )
    ours = reference.decode_attention(**scored(widened(a)))
    torch.testing.assert_close(ours, exactly(a), rtol=1e-12, atol=1e-12)


def test_reference_keeps_its_digits_far_out() -> None:
    """ALiBi's terms of thousands cancel before they are rounded."""
    a = make("reference", lengths=[30000], capacity=30000, dtype=torch.float32, slopes=True)
    a["slopes"] += 0.25
    ours = reference.decode_attention(**scored(a))
    torch.testing.assert_close(ours.double(), exactly(a), rtol=1e-4, atol=1e-5)


class TestOnTheGpu:
    """What only a GPU can show."""

    pytestmark = needs_gpu

    @pytest.mark.parametrize("heads", [(32, 32), (32, 8), (71, 1), (9, 3)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_long(self, dtype: torch.dtype, heads: tuple[int, int]) -> None:
        sizes: dict[str, Any] = {"capacity": 32768, "dtype": dtype, "kv_heads": heads[1]}
        sizes |= {"group": heads[0] // heads[1], "head_dim": 64 if heads[1] < 8 else 128}
        check("cuda", make("cuda", lengths=[32768], **sizes))
        check("cuda", make("cuda", lengths=[32767, 0, 5], starts=[9, 0, 1], slopes=True, **sizes))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_many_rows(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(0, 97, (4096,), generator=generator).tolist()
        check("cuda", make("cuda", lengths=lengths, capacity=96, dtype=dtype, kv_heads=2, group=4))

    def test_repeats(self) -> None:
        """Many times over, with parts of an item in many CTAs: the last one varies."""
        a = make("cuda", lengths=[9000, 30, 4000], capacity=9000, kv_heads=2, group=8, head_dim=128)
        out = torch.empty_like(a["query"])
        call = DecodeAttention(**scored(a), out=out)
        stream = torch.cuda.current_stream().cuda_stream
        call.launch(stream)
        first = out.clone()
        for _ in range(300):
            out.fill_(math.nan)
            call.launch(stream)
            assert torch.equal(out, first)
        exact = exactly(a)
        assert_accurate(first, as_torch_rounds(a, exact), exact)

    @pytest.mark.parametrize("times", [2, 6])  # 20 rows, and more than a warp has lanes
    @pytest.mark.parametrize(
        ("head_dim", "kv_heads", "group"),
        [(64, 8, 4), (80, 9, 1), (128, 8, 8), (256, 8, 2), (80, 40, 2), (128, 40, 1)],
    )
    def test_ragged_rows(self, head_dim: int, kv_heads: int, group: int, times: int) -> None:
        """More items than multiprocessors: cut, or of two CTAs each; the same every time."""
        lengths = [2900, 0, 1, 1300, 17, 512, 513, 90, 16, 700] * times
        starts = [n // 40 for n in lengths]
        sizes: dict[str, Any] = {"head_dim": head_dim, "kv_heads": kv_heads, "group": group}
        a = make("cuda", lengths=lengths, starts=starts, capacity=3000, sinks=True, **sizes)
        check("cuda", a)
        first = outputs(a, "cuda")
        assert all(torch.equal(outputs(a, "cuda"), first) for _ in range(20))

    @pytest.mark.parametrize("kv_heads", [4, 50])
    @pytest.mark.parametrize("group", [1, 8])
    def test_graph_follows_lengths(self, group: int, kv_heads: int) -> None:
        capacity = 1500
        a = make("cuda", lengths=[capacity] * 4, capacity=capacity, kv_heads=kv_heads, group=group)
        a["start"] = torch.zeros_like(a["length"])
        out = torch.empty_like(a["query"])
        call = DecodeAttention(**scored(a), out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.launch(torch.cuda.current_stream().cuda_stream)
        for lengths, starts in (
            ([1, 2, 3, 4], [0, 0, 0, 0]),
            ([1500, 0, 700, 64], [3, 0, 699, 0]),
            ([1500, 1500, 1500, 1500], [0, 1, 2, 3]),
            ([0, 0, 0, 0], [0, 0, 0, 0]),
            ([0, 0, 1499, 0], [0, 0, 0, 0]),
        ):
            a["length"].copy_(torch.tensor(lengths))
            a["start"].copy_(torch.tensor(starts))
            out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            exact = exactly(a)
            assert_accurate(out, as_torch_rounds(a, exact), exact, f"{lengths} from {starts}")

    def test_launched_early(self) -> None:
        """Each reads what the one before wrote, in one workspace."""
        a = make("cuda", lengths=[2000, 3, 900], capacity=2000, kv_heads=2, group=4)
        workspace = Workspace("cuda")
        stream = torch.cuda.current_stream().cuda_stream
        results = []
        for early in (False, True):
            queries = [a["query"], *(torch.empty_like(a["query"]) for _ in range(8))]
            calls = [
                DecodeAttention(
                    **scored({**a, "query": before}),
                    out=after,
                    workspace=workspace,
                    early=early and i > 0,
                )
                for i, (before, after) in enumerate(itertools.pairwise(queries))
            ]
            for _ in range(20):
                for call in calls:
                    call.launch(stream)
            torch.cuda.synchronize()
            results.append(queries[-1])
        assert torch.equal(*results)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("group", [1, 7, 40])
    def test_early_behind_the_last_columns(self, dtype: torch.dtype, group: int) -> None:
        """Queries and last columns that the kernel ahead writes are seen, round after round."""
        lengths = [700, 64, 65, 1, 130]
        a = make(
            "cuda", lengths=lengths, capacity=700, dtype=dtype, kv_heads=2, group=group, head_dim=64
        )
        layout = QkvLayout.apart(2 * group, 2, 64)
        qkv = torch.empty(len(lengths), 1, layout.width, dtype=dtype, device="cuda")
        out = torch.empty(a["query"].shape, dtype=dtype, device="cuda")
        a["query"] = torch.empty_like(out)
        column = a["length"] - 1
        append = RotaryAppend(
            qkv,
            layout=layout,
            query=a["query"][:, None],
            key_cache=a["key_cache"],
            value_cache=a["value_cache"],
            column=column,
        )
        attend = DecodeAttention(**scored(a), out=out, early=True)
        stream = torch.cuda.current_stream().cuda_stream
        for turn in range(20):
            qkv.normal_()
            for cache in (a["key_cache"], a["value_cache"]):
                cache[torch.arange(len(lengths)), :, column.long()] = math.nan
            a["query"].fill_(math.nan)
            out.fill_(math.nan)
            append.launch(stream)
            attend.launch(stream)
            torch.cuda.synchronize()
            exact = exactly(a)
            peer = as_torch_rounds(a, exact)
            assert_accurate(out, peer, exact, f"turn {turn}", exponents=exponents(a))

    def test_caches_beyond_two_to_the_31(self) -> None:
        """The last rows of caches of more elements than an int32 counts."""
        batch, kv_heads, capacity, head_dim = 9, 16, 131072, 128
        if torch.cuda.mem_get_info()[0] < 14e9:
            pytest.skip("needs 14 GB of GPU memory")
        shape = (batch, kv_heads, capacity, head_dim)
        both = torch.empty(2, *shape, dtype=torch.bfloat16, device="cuda")
        both[:, -1, :, -700:] = torch.randn(2, kv_heads, 700, head_dim).to(both)
        length = torch.zeros(batch, dtype=torch.int32, device="cuda")
        length[-1] = capacity
        query = torch.randn(batch, 2 * kv_heads, head_dim).to(both)
        out = torch.full_like(query, math.nan)
        options: dict[str, Any] = {"scale": 0.1, "window": 700}
        call = DecodeAttention(query, both[0], both[1], out, length=length, **scored(options))
        call.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert not out[:-1].any()
        end = {"key_cache": both[0, -1:, :, -700:], "value_cache": both[1, -1:, :, -700:]}
        a = {"query": query[-1:], **end, "length": length[-1:] * 0 + 700, **options}
        exact = exactly(a)
        assert_accurate(out[-1:], as_torch_rounds(a, exact), exact)


def good() -> dict[str, Any]:
    return {
        "query": torch.zeros(2, 4, 8),
        "key_cache": torch.zeros(2, 2, 6, 8),
        "value_cache": torch.zeros(2, 2, 6, 8),
        "out": torch.zeros(2, 4, 8),
        "length": torch.zeros(2, dtype=torch.int32),
        "scale": 1.0,
    }


CACHE = torch.zeros(2, 2, 6, 8)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "query": ({"query": None}, "query must be a tensor, not NoneType"),
    "query shape": ({"query": torch.zeros(2, 4)}, r"\[batch, heads, head_dim\], not \[2, 4\]"),
    "dtype": ({"query": torch.zeros(2, 4, 8).double()}, "float64 is not supported"),
    "mixed": ({"key_cache": CACHE.half()}, "key_cache must be torch.float32, not torch.float16"),
    "no cache": ({"key_cache": None}, "key_cache must be a tensor .* not None"),
    "cache rows": ({"key_cache": CACHE[:1]}, r"key_cache must have shape \[2, 2, 6, 8\]"),
    "value": ({"value_cache": CACHE[:, :, :5]}, r"value_cache must have shape \[2, 2, 6, 8\]"),
    "columns": ({"key_cache": torch.zeros(2, 2, 8, 6).mT}, "must be contiguous"),
    "gaps": ({"key_cache": torch.zeros(2, 2, 12, 8)[:, :, ::2]}, "columns of key_cache must lie"),
    "strides": ({"value_cache": torch.zeros(2, 2, 9, 8)[:, :, :6]}, "must have equal strides"),
    "no columns": (
        {"key_cache": CACHE[:, :, :0], "value_cache": CACHE[:, :, :0]},
        "key_cache has no columns",
    ),
    "groups": (
        dict.fromkeys(("key_cache", "value_cache"), torch.zeros(2, 3, 6, 8)),
        "4 query heads .* multiple of 3 KV heads",
    ),
    "out": ({"out": torch.zeros(2, 8, 4).mT}, "out must be contiguous"),
    "out shape": ({"out": torch.zeros(2, 4, 9)}, r"out must have shape \[2, 4, 8\]"),
    "length dtype": ({"length": torch.zeros(2, dtype=torch.int64)}, "length must be torch.int32"),
    "length shape": (
        {"length": torch.zeros(1, dtype=torch.int32)},
        r"length must have shape \[2\]",
    ),
    "start": ({"start": torch.zeros(3, dtype=torch.int32)}, r"start must have shape \[2\]"),
    "slopes": ({"slopes": torch.zeros(2)}, r"slopes must have shape \[4\]"),
    "slopes dtype": ({"slopes": torch.zeros(4).half()}, "slopes must be torch.float32"),
    "sinks": ({"sinks": torch.zeros(4, 1)}, r"sinks must have shape \[4\]"),
    "softcap": ({"softcap": -1.0}, "softcap must be 0 .* or more, not -1.0"),
    "softcap NaN": ({"softcap": math.nan}, "softcap must be 0 .* or more, not nan"),
    "window": ({"window": -1}, "window must be 0 .* or more, not -1"),
    "max_length": ({"max_length": 7}, "max_length must be 1 to the caches' capacity of 6, not 7"),
    "max_length 0": ({"max_length": 0}, "max_length must be 1 to .* not 0"),
    "splits": ({"splits": 1025}, "splits must be 0 to 1024, not 1025"),
    "variant": ({"variant": -1}, "variant must be 0 or more, not -1"),
    "workspace": ({"workspace": Workspace("meta")}, "workspace must be on cpu, not on meta"),
    "device": (
        {"length": torch.zeros(2, dtype=torch.int32, device="meta")},
        "length must be on cpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, message = WRONG[name]
    DecodeAttention(**scored(good()))
    with pytest.raises((ValueError, TypeError), match=message):
        DecodeAttention(**scored(good() | changes))


def test_head_too_large() -> None:
    large = torch.zeros(1, 1, 513)
    cache = torch.zeros(1, 1, 2, 513)
    length = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="head_dim must be at most 512, not 513"):
        DecodeAttention(large, cache, cache, large.clone(), length=length, scores=Scores(1.0))
