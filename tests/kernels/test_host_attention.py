"""Attention on CPU cores: every path and dtype against float64, threads, forks, bad arguments."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import host_build
import pytest
import torch
from accuracy import DTYPES, assert_accurate, assert_untouched, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import scored

from offload.bench import host_attention as bench
from offload.device import compute_device
from offload.kernels import host_library as host_module
from offload.kernels import reference
from offload.kernels.host_attention import HostAttention
from offload.kernels.host_library import PATHS, PREFETCHES, HostLibrary, host_library
from offload.kernels.host_pool import HostPool, default_pool
from offload.kernels.library import KernelError
from offload.kernels.scores import Scores

CACHES = (*DTYPES, torch.int8)
CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The installed library, or one built now where the package runs from its sources."""
    with pytest.MonkeyPatch.context() as patch:
        if not host_module.FILE.exists():
            built = host_build.host_library()
            patch.setattr(host_module, "FILE", built)
        host_module._loaded.cache_clear()
        # torch's threads wait for each other at full speed, on the cores that the pools are on.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
    host_module._loaded.cache_clear()


@functools.cache
def pool(threads: int = 2) -> HostPool:
    return HostPool([CPUS[i % len(CPUS)] for i in range(threads)], spin_us=5)


@pytest.fixture(params=[p for p in PATHS if p != "auto"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param not in host_library().paths():
        pytest.skip(f"this CPU has no {request.param}")
    return request.param


def make(
    *,
    lengths: Sequence[int],
    query_dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    kv_heads: int = 1,
    group: int = 1,
    starts: Sequence[int] | None = None,
    slopes: bool = False,
    sinks: bool = False,
    append: bool = False,
    query_pad: int = 0,
    offset: int = 0,
    spare: int = 0,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of HostAttention, `out` aside; every column that is not seen is NaN (int8: so are
    its scales). Sequences have capacities of their own.

    `query_pad`: elements between a head's query and the next; `offset`: of the caches from an
    aligned address; `spare`: columns behind a head's last one.
    """
    torch.manual_seed(seed)
    batch, heads = len(lengths), kv_heads * group
    a: dict[str, Any] = {"scale": head_dim**-0.5, **options}
    a["query"] = torch.randn(batch, heads, head_dim + query_pad).mul(1.5).to(query_dtype)
    a["query"] = a["query"][..., :head_dim]
    a["length"] = torch.tensor(lengths, dtype=torch.int32)
    a["start"] = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    a["slopes"] = torch.rand(heads) * 0.5 if slopes else None
    a["sinks"] = torch.randn(heads) * 3 if sinks else None
    for name in ("new_key", "new_value"):
        new = torch.randn(batch, kv_heads * 2, head_dim).to(query_dtype)[:, :kv_heads]
        a[name] = new if append else None
    for name in ("keys", "values"):
        caches, scales = [], []
        for b, n in enumerate(lengths):
            capacity = n + (seed + b) % 3
            visible = torch.zeros(capacity, dtype=torch.bool)
            first = 0 if starts is None else max(starts[b], 0)
            if options.get("window"):
                first = max(first, n - options["window"])
            visible[first:n] = True
            x = torch.randn(kv_heads, capacity, head_dim)
            size = kv_heads * (capacity + spare) * head_dim
            buffer = torch.zeros(size + offset, dtype=cache_dtype)[offset:]
            cache = buffer.view(kv_heads, capacity + spare, head_dim)[:, :capacity]
            if cache_dtype == torch.int8:
                rows, scale = reference.int8_rows(x.float())
                cache.copy_(rows)
                scales.append(scale.masked_fill_(~visible, math.nan))
            else:
                cache.copy_(x).masked_fill_(~visible[:, None], math.nan)
            caches.append(cache)
        a[name] = caches
        a[f"{name[:-1]}_scales"] = scales if cache_dtype == torch.int8 else None
    return a


def outputs(a: dict[str, Any], **options: Any) -> torch.Tensor:
    """The call's output, of which nothing was left as it was and beside which nothing changed."""
    query = a["query"]
    out, buffer = poisoned(*query.shape, dtype=query.dtype, device="cpu")
    HostAttention(**scored({**a, "out": out, "pool": pool(), **options})).launch()
    assert_untouched(out, buffer)
    return out


def appended(a: dict[str, Any]) -> dict[str, Any]:
    """The arguments with copies of the caches to which the new columns were appended."""
    a = {**a, "keys": [x.clone() for x in a["keys"]], "values": [x.clone() for x in a["values"]]}
    for name in ("key_scales", "value_scales"):
        a[name] = None if a[name] is None else [x.clone() for x in a[name]]
    for name in ("key", "value"):
        new = a.pop(f"new_{name}")
        if new is not None:
            reference.append_columns(new, a[f"{name}s"], a[f"{name}_scales"], a["length"])
    return a


def known(a: dict[str, Any]) -> dict[str, Any]:
    """Those that are the reference's."""
    left = ("pool", "path", "chunk", "prefetch", "prefetch_distance", "new_key", "new_value")
    return scored({name: x for name, x in a.items() if name not in left})


def exactly(a: dict[str, Any]) -> torch.Tensor:
    """The reference in float64; what it stands on has tests of its own."""
    return reference.host_attention(**known({**a, "query": a["query"].double()}))


def as_torch_rounds(a: dict[str, Any], exact: torch.Tensor) -> torch.Tensor:
    """The reference in float32 on elements in other orders: the least accurate of a few."""
    dtype = a["query"].dtype
    peers = []
    for seed in range(8 if dtype == torch.float32 and exact.numel() < 4096 else 1):
        order = torch.randperm(exact.shape[2], generator=torch.Generator().manual_seed(seed))
        shuffled = {**a, "query": a["query"].float()[..., order]}
        shuffled["keys"] = [x[..., order] for x in a["keys"]]
        peers.append(reference.host_attention(**known(shuffled)).to(dtype))
    return max(peers, key=lambda peer: (peer.double() - exact).abs().max().item())


def exponents(a: dict[str, Any]) -> float:
    """The largest sink, or score without its slope, that a weight is the exponential of."""
    sizes = [0.0] if a["sinks"] is None else [a["sinks"].abs().max().item()]
    for b, key in enumerate(a["keys"]):
        key = key.float()
        if a["key_scales"] is not None:
            key = key * a["key_scales"][b][..., None]
        query = a["query"][b].float().view(key.shape[0], -1, key.shape[2])
        scores = (query @ key.nan_to_num().mT).abs() * a["scale"]
        sizes += [scores.max().item()] if scores.numel() else []
    return max(sizes)


def check(a: dict[str, Any], what: str = "", **options: Any) -> None:
    after = appended(a)
    out = outputs(a, **options)
    for name in ("keys", "values", "key_scales", "value_scales"):
        for ours, theirs in zip(a[name] or [], after[name] or [], strict=True):
            assert torch.equal(ours.nan_to_num(99), theirs.nan_to_num(99)), f"{what}: {name}"
    if not out.numel():
        return
    exact = exactly(after)
    assert_accurate(out, as_torch_rounds(after, exact), exact, what, exponents=exponents(after))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    flag = st.booleans()
    head_dim = draw(st.sampled_from([64, 80, 96, 128, 256]) | st.integers(1, 300))
    most = draw(st.sampled_from([5, 70, 300]))
    group = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 71]))
    lengths = draw(st.lists(st.sampled_from([0, 1, most]) | st.integers(0, most), max_size=4))
    starts = [draw(st.sampled_from([-3, 0, n - 1, n, n + 7]) | st.integers(0, n)) for n in lengths]
    return {
        "lengths": lengths,
        "starts": draw(st.sampled_from([None, starts])),
        "query_dtype": draw(st.sampled_from(DTYPES)),
        "cache_dtype": draw(st.sampled_from(CACHES)),
        "head_dim": head_dim,
        "kv_heads": draw(st.integers(1, 3)),
        "group": group,
        "slopes": draw(flag),
        "sinks": draw(flag),
        "append": draw(flag),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0, 50.0])),
        "window": draw(st.sampled_from([0, 0, 1, 5, 64, 5000])),
        "query_pad": draw(st.sampled_from([0, 0, 8, 3])),
        "offset": draw(st.sampled_from([0, 0, 1, 8])),
        "spare": draw(st.sampled_from([0, 3])),
        "chunk": draw(st.sampled_from([0, 0, 1, 7, 16, 33, 48, 1000])),
        "prefetch": draw(st.sampled_from(list(PREFETCHES))),
        "prefetch_distance": draw(st.sampled_from([0, 64, 1000, 100_000])),
        "seed": draw(st.integers(0, 99)),
    }


def test_any_combination(path: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(case=cases())
    def one(case: dict[str, Any]) -> None:
        check(make(**case), str(case), path=path)

    one()


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("query_dtype", DTYPES)
def test_dtypes(path: str, query_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for head_dim, group in ((128, 1), (80, 3), (33, 8)):
        a = make(
            lengths=[150, 0, 1, 77],
            head_dim=head_dim,
            group=group,
            kv_heads=2,
            query_dtype=query_dtype,
            cache_dtype=cache_dtype,
            append=True,
        )
        check(a, f"{head_dim}, {group}", path=path)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("query_dtype", [torch.float16, torch.bfloat16])
def test_groups(path: str, query_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Whole vectors, turns of several queries, tiles, and what is left of each."""
    for group in (1, 4, 19):
        for head_dim in (64, 192):
            a = make(
                lengths=[250, 64, 15],
                head_dim=head_dim,
                group=group,
                query_dtype=query_dtype,
                cache_dtype=cache_dtype,
            )
            check(a, f"{head_dim}, {group}", path=path)


def test_queries_of_nothing(path: str) -> None:
    """All columns have one weight."""
    for cache_dtype in (torch.bfloat16, torch.int8):
        for group in (1, 8):
            a = make(lengths=[40, 1, 0], group=group, cache_dtype=cache_dtype)
            a["query"].zero_()
            check(a, path=path)


def test_far_positions_with_slopes(path: str) -> None:
    """The bias of a column is near 10,000, and what counts is the difference to the next."""
    a = make(lengths=[20000], starts=[19800], query_dtype=torch.float32, slopes=True, sinks=True)
    check(a, path=path)


def test_large_scores(path: str) -> None:
    """Weights from 1 to nothing, and soft caps far beyond where tanh is 1."""
    a = make(lengths=[200, 3], query_dtype=torch.float32, cache_dtype=torch.float32)
    check({**a, "scale": 30.0}, path=path)
    check({**a, "scale": 30.0, "softcap": 2.0}, path=path)


def check_few_columns(path: str, made: HostPool) -> None:
    """Scores far from zero in fewer columns than are multiplied together: what stands for the rest
    is no score."""
    for cache_dtype in (torch.bfloat16, torch.int8):
        a = make(lengths=[1, 2, 3, 15] * 4, group=8, cache_dtype=cache_dtype, scale=60.0)
        check(a, path=path, pool=made)


def test_few_columns(path: str) -> None:
    check_few_columns(path, pool())


def check_growing_scores(path: str, made: HostPool) -> None:
    """Columns that outweigh all before them by far, as weights were made relative to those; and
    columns that are outweighed."""
    for dtype in (torch.float16, torch.bfloat16):
        for group, first, last in ((8, 0.1, 4.0), (7, 4.0, 0.1), (4, 0.1, 4.0)):
            a = make(
                lengths=[300, 64, 65],
                head_dim=128,
                group=group,
                query_dtype=dtype,
                cache_dtype=dtype,
                chunk=192,
            )
            for key in a["keys"]:
                key.mul_(torch.linspace(first, last, key.shape[1])[:, None])
            check(a, f"{path} {dtype} {group}", path=path, pool=made)


def test_growing_scores(path: str) -> None:
    check_growing_scores(path, pool())


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_not_a_number_stays_one(path: str, cache_dtype: torch.dtype) -> None:
    """Only in what reads it."""
    for group in (1, 8):
        for name in ("keys", "values"):
            a = make(lengths=[90, 90], kv_heads=2, group=group, cache_dtype=cache_dtype)
            a[name][1][0, 20] = math.nan
            broken = outputs(a, path=path).isnan().all(-1).view(2, 2, group).tolist()
            assert broken == [[[False] * group] * 2, [[True] * group, [False] * group]]


def test_special_float16(path: str) -> None:
    """Every float16 that is no NaN comes out of a cache as it went in."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    rows = torch.where(every.isnan(), 0, every).view(-1, 64)
    query = torch.zeros(len(rows), 1, 64)
    values = list(rows.view(-1, 1, 1, 64))
    keys = [torch.zeros_like(x) for x in values]
    out = torch.empty_like(query)
    length = torch.ones(len(rows), dtype=torch.int32)
    HostAttention(query, keys, values, out, length=length, scores=Scores(1.0), path=path).launch()
    assert torch.equal(out[:, 0], rows.float())
    halves = torch.empty_like(rows).view(-1, 1, 64)
    query = query.half()
    HostAttention(
        query, keys, values, halves, length=length, scores=Scores(1.0), path=path
    ).launch()
    assert torch.equal(halves[:, 0], rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_appended_rows_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    new = torch.randn(64, 1, 512) * torch.logspace(-9, 5, 64)[:, None, None]
    new.view(-1)[:8] = torch.tensor([0.0, -0.0, 65519.9, 65520, 2**-25, 2**-24, 1e-40, math.inf])
    new.view(-1)[8:11] = torch.tensor([math.nan, 3 * 2**-25, 65504])
    a = make(lengths=[1] * 64, head_dim=512, query_dtype=torch.float32, cache_dtype=dtype)
    a |= {"new_key": new, "new_value": -new}
    outputs_of = HostAttention(**scored(a), out=torch.empty_like(a["query"]), pool=pool())
    outputs_of.launch()
    for b in range(64):
        wanted = new[b].to(dtype).nan_to_num(99, 77, -77)
        assert torch.equal(a["keys"][b][:, 0].nan_to_num(99, 77, -77), wanted)


def test_lines_are_asked_for_ahead() -> None:
    """A compiler takes a function of nothing but prefetches for one without effect, and its calls
    away."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("looks for an instruction of x86")
    code = host_module.FILE.read_bytes()
    # 0f 18 with 2 in the second operand's place and a base register: prefetcht1
    assert len(re.findall(rb"\x0f\x18[\x10-\x17\x50-\x57\x90-\x97]", code)) > 50


def test_same_bits_whatever_the_threads() -> None:
    a = make(lengths=[700, 3, 90, 0], head_dim=128, kv_heads=2, group=4, slopes=True, sinks=True)
    first = outputs(a, pool=pool(1))
    assert not first.isnan().any()
    for threads in (1, 2, 3, 7):
        for _ in range(3):
            assert torch.equal(outputs(a, pool=pool(threads)), first)


def test_lengths_are_read_when_it_starts() -> None:
    a = make(lengths=[64, 64], append=True)
    out = torch.empty_like(a["query"])
    call = HostAttention(**scored(a), out=out, pool=pool())
    for n in (5, 6, 7):
        a["length"].fill_(n)
        call.start()
        a["length"].fill_(0)
        call.wait()
        a["length"].fill_(n)
        after = appended(a)
        exact = exactly(after)
        assert_accurate(out, as_torch_rounds(after, exact), exact, exponents=exponents(after))
        assert torch.equal(a["keys"][0][:, n - 1], a["new_key"][0])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", [128, 33])
def test_read_only_adds_up_what_is_seen(path: str, head_dim: int, cache_dtype: torch.dtype) -> None:
    a = make(
        lengths=[300, 40], starts=[7, 0], kv_heads=2, head_dim=head_dim, cache_dtype=cache_dtype
    )
    words, nbytes = 0, 0
    for caches in (a["keys"], a["values"]):
        for cache, first in zip(caches, (7, 0), strict=True):
            for head in cache[:, first:][:, : 300 if first else 40]:
                head = head[: (300 - 7) if first else 40]
                data = head.contiguous().view(torch.uint8).numpy().tobytes()
                nbytes += len(data) + (4 * len(head) if cache_dtype == torch.int8 else 0)
                data += bytes(-len(data) % 8)
                words += sum(
                    int.from_bytes(data[i : i + 8], sys.byteorder) for i in range(0, len(data), 8)
                )
    out = torch.full_like(a["query"], math.nan)
    for chunk in (1000,) if head_dim % 8 else (0, 16, 33, 96, 1000):  # words begin with items
        call = HostAttention(
            **scored(a), out=out, pool=pool(), path=path, read_only=True, chunk=chunk
        )
        call.launch()
        assert out.isnan().all()
        assert (call.checksum, call.bytes_read) == (words % 2**64, nbytes)
        assert 0 < call.seconds < 60
    options = {"pool": pool(), "path": path, "read_only": True, "chunk": 1000}
    more = HostAttention(**scored(a), out=out, **options, products=11)  # changes nothing
    more.launch()
    assert (more.checksum, more.bytes_read) == (words % 2**64, nbytes)


@pytest.mark.parametrize(
    ("dtype", "path", "group", "products"),
    [
        ("bf16", "amx", 8, 8), ("bf16", "amx", 1, 1), ("fp16", "amx", 8, 16),
        ("bf16", "avx512_bf16", 8, 12), ("bf16", "avx512", 1, 2), ("int8", "amx", 8, 0),
        ("bf16", "avx2", 8, 0),
    ],
)  # fmt: skip
def test_products_that_a_group_takes(dtype: str, path: str, group: int, products: int) -> None:
    shape = bench.Shape("any", 2 * group, 2, 128, 1, 64)
    assert bench.vector_products(shape, dtype, path) == products


def test_one_tensor_for_all_sequences() -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 32)
    keys, values = torch.randn(2, 3, 2, 50, 32).unbind()
    length = torch.tensor([50, 7, 30], dtype=torch.int32)
    out = torch.empty_like(query)
    HostAttention(query, keys, values, out, length=length, scores=Scores(0.2), pool=pool()).launch()
    wide = (x.double() for x in (query, keys, values))
    exact = reference.decode_attention(*wide, length=length, scores=Scores(0.2))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_start_returns_at_once() -> None:
    """Long before the work is done, and several calls wait their turn."""
    n = 4096
    keys = torch.randn(1, n, 128)
    query = torch.randn(200, 1, 128)
    length = torch.full((200,), n, dtype=torch.int32)
    outs = [torch.empty_like(query) for _ in range(3)]
    calls = [
        HostAttention(
            query, [keys] * 200, [keys] * 200, out, length=length, scores=Scores(0.1), pool=pool(1)
        )
        for out in outs
    ]
    for call in calls:
        call.start()
    assert not calls[-1].done
    with pytest.raises(KernelError, match="still running"):
        calls[-1].start()
    for call in calls:
        call.wait()
        assert call.done
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_call_that_is_dropped_while_it_runs() -> None:
    for seed in range(20):
        a = make(lengths=[2000] * 8, seed=seed)
        HostAttention(**scored(a), out=torch.empty_like(a["query"]), pool=pool()).start()
        del a


def test_threads_calling_at_once() -> None:
    wrong: list[str] = []

    def caller(seed: int) -> None:
        a = make(lengths=[300 + seed, 5], kv_heads=2, head_dim=80, seed=seed)
        out = torch.empty_like(a["query"])
        call = HostAttention(**scored(a), out=out, pool=pool())
        call.launch()
        first = out.clone()
        for _ in range(200):
            out.fill_(math.nan)
            call.launch()
            if not torch.equal(out, first):
                wrong.append(f"{seed}: {out}")
        exact = exactly(a)
        assert_accurate(out, as_torch_rounds(a, exact), exact)

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_are_pinned_and_sleep() -> None:
    before = {int(name) for name in os.listdir("/proc/self/task")}
    with HostPool([CPUS[0], CPUS[-1]], spin_us=0) as made:
        ids = {int(name) for name in os.listdir("/proc/self/task")} - before
        assert sorted(min(os.sched_getaffinity(i)) for i in ids) == sorted([CPUS[0], CPUS[-1]])
        assert all(len(os.sched_getaffinity(i)) == 1 for i in ids)
        a = make(lengths=[10])
        call = HostAttention(**scored(a), out=torch.empty_like(a["query"]), pool=made)
        call.launch()
        for _ in range(1000):
            states = [Path(f"/proc/self/task/{i}/stat").read_text().split()[2] for i in ids]
            if states == ["S", "S"]:
                break
        assert states == ["S", "S"]
    assert not ids & {int(name) for name in os.listdir("/proc/self/task")}
    with pytest.raises(KernelError, match="the pool is closed"):
        call.start()


def test_threads_beside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer where memory binds; where arithmetic does, all of them."""
    fourteen, bf16 = pool(14), torch.bfloat16
    monkeypatch.setattr(HostLibrary, "paths", lambda self: ("portable", "avx2", "avx512"))
    for group, dtype, threads in (
        (1, torch.float32, 10),
        (2, torch.float32, 10),
        (1, bf16, 10),
        (2, bf16, 12),
        (3, bf16, 14),
        (1, torch.int8, 12),
        (2, torch.int8, 14),
    ):
        assert fourteen.beside_stream(group, dtype) == threads
        a = make(lengths=[10], group=group, cache_dtype=dtype)
        out = torch.empty_like(a["query"])
        assert (
            HostAttention(**scored(a), out=out, pool=fourteen, beside_stream=True).threads
            == threads
        )
        assert HostAttention(**scored(a), out=out, pool=fourteen).threads == 14
    assert [pool(n).beside_stream(1, bf16) for n in (1, 2, 3)] == [1, 2, 3]
    monkeypatch.setattr(HostLibrary, "paths", lambda self: ("portable", "avx512", "amx"))
    for group, dtype, threads in (
        (1, bf16, 10),
        (3, bf16, 14),
        (4, bf16, 11),
        (8, bf16, 11),
        (9, bf16, 12),
        (8, torch.int8, 12),
        (8, torch.float16, 14),
    ):
        assert fourteen.beside_stream(group, dtype) == threads
    monkeypatch.setattr(HostLibrary, "paths", lambda self: ("portable", "avx2"))
    assert fourteen.beside_stream(1, bf16) == 14


def test_some_of_a_pools_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones alone, with the same bits, in any order of calls, more than a queue holds."""
    before = {int(name) for name in os.listdir("/proc/self/task")}
    a = make(lengths=[300, 0, 129, 1000], group=3, cache_dtype=torch.bfloat16)
    expected = outputs(a)
    monkeypatch.setattr(HostPool, "beside_stream", lambda self, group, dtype: 1)
    with HostPool([CPUS[0], CPUS[0], CPUS[-1]], spin_us=0) as made:
        ids = sorted({int(name) for name in os.listdir("/proc/self/task")} - before)

        def spent(thread: int) -> int:  # nanoseconds on its CPU
            text = Path(f"/proc/self/task/{thread}/schedstat").read_text()
            return int(text.split()[0])

        outs = [torch.empty_like(expected) for _ in range(6)]
        one = [
            HostAttention(**scored(a), out=out, pool=made, beside_stream=True) for out in outs[:3]
        ]
        every = [HostAttention(**scored(a), out=out, pool=made) for out in outs[3:]]
        some = [spent(thread) for thread in ids]
        for _ in range(30):
            for call in one:
                call.start()
            for call in one:
                call.wait()
        some = [spent(thread) - begin for thread, begin in zip(ids, some, strict=True)]
        assert some[2] > 2 * max(some[:2])
        for _ in range(30):
            for call in (one[0], every[0], one[1], one[2], every[1], every[2]):
                call.start()
            for call in (*every, *one):
                call.wait()
        assert all(torch.equal(out, expected) for out in outs)


IN_CHILDREN = """
import os, sys, torch
from offload.kernels import host_library
from offload.kernels.host_attention import HostAttention
from offload.kernels.library import KernelError
from offload.kernels.scores import Scores
import pathlib

host_library.FILE = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
query, keys, values = torch.randn(2, 2, 64), torch.randn(2, 2, 300, 64), torch.randn(2, 2, 300, 64)
length = torch.tensor([300, 20], dtype=torch.int32)

def call():
    out = torch.empty_like(query)
    return HostAttention(query, keys, values, out, length=length, scores=Scores(0.1)), out

before, first = call()
before.launch()
for running in (False, True):
    if running:
        before.start()
    child = os.fork()
    if child == 0:
        try:
            before.start()
            code = 1  # the parent's threads are not here
        except KernelError as error:
            code = 0 if "forked" in str(error) else 2
        after, out = call()
        after.launch()
        sys.exit(code if torch.equal(out, first) else 3)  # with all that runs at exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
before.wait()
last, out = call()
last.start()  # and the process ends
print("done")
"""


def test_fork_and_exit() -> None:
    command = [sys.executable, "-c", IN_CHILDREN, str(host_module.FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def check_all(path: str, made: HostPool) -> None:
    """Every kind of products that a path has: whole vectors and rests, turns of queries, tails."""
    for head_dim, group in ((128, 1), (80, 3), (33, 5), (7, 8), (256, 2), (128, 8), (64, 9)):
        for cache in CACHES:
            for query in DTYPES:
                a = make(
                    lengths=[70, 0, 1, 37, 140],
                    head_dim=head_dim,
                    group=group,
                    query_dtype=query,
                    cache_dtype=cache,
                    slopes=group == 3,
                    softcap=4.0 * (group == 5),
                    append=True,
                )
                check(a, f"{path} {head_dim} {group} {cache} {query}", path=path, pool=made)


def test_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no CPU here has AMX: the same code over a stand-in for its instructions."""
    paths = host_library().paths()
    if "amx" in paths:
        pytest.skip("this CPU has it: the other tests run it")
    if "avx512_bf16" not in paths:
        pytest.skip("the stand-in needs AVX-512 with bf16; another one stands for that too")
    monkeypatch.setattr(host_module, "FILE", host_build.host_library_with_tiles())
    host_module._loaded.cache_clear()
    try:
        assert host_library().paths()[-1] == "amx"
        with HostPool(CPUS[:1]) as emulated:
            check_all("amx", emulated)
            check_few_columns("amx", emulated)
            check_growing_scores("amx", emulated)
            for lengths in ([16, 63, 64, 65, 127, 128], [129, 255, 256, 257, 300]):
                for cache in (torch.bfloat16, torch.int8):
                    a = make(lengths=lengths, group=4, cache_dtype=cache, starts=[3] * len(lengths))
                    check(a, f"{lengths} {cache}", path="amx", pool=emulated)
    finally:
        monkeypatch.undo()
        host_module._loaded.cache_clear()


@pytest.mark.slow
def test_emulated_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no CPU here has it: the same code over a stand-in for its instructions."""
    if "avx512_bf16" in host_library().paths():
        pytest.skip("this CPU has it: the other tests run it")
    if "avx2" not in host_library().paths():
        pytest.skip("the stand-in needs AVX2")
    monkeypatch.setattr(host_module, "FILE", host_build.emulated_host_library())
    host_module._loaded.cache_clear()
    try:
        assert host_library().paths()[-3:] == ("avx512", "avx512_bf16", "amx")
        with HostPool(CPUS[:1]) as emulated:
            for path in ("avx512", "avx512_bf16", "amx"):
                check_all(path, emulated)
    finally:
        monkeypatch.undo()
        host_module._loaded.cache_clear()


def test_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row reads all its bytes; a stream beside it copies some."""
    monkeypatch.setattr(bench, "LEAST_BYTES", 100_000)
    monkeypatch.setattr(bench, "TURN_SECONDS", 0.02)
    monkeypatch.setattr(bench, "COPY_BYTES", 1 << 16)
    shape = bench.Shape("tiny", 4, 2, 64, 3, 50)
    result = bench.measure_host_attention([shape], ["bf16", "int8"], pools=[pool()], sweep=True)
    assert len(result.rows) == 2 * (2 + 3 * len(bench.DISTANCES))
    assert all(row.attention > 0 and row.read > 0 for row in result.rows)
    device = compute_device(torch.device("cpu"))
    (row,) = bench.measure_host_attention([shape], ["bf16"], pools=[pool()], device=device).rows
    assert row.stream and row.stream_beside_attention and row.stream_beside_read
    assert "tiny" in str(result)


def test_bench_compares_what_leaves_the_stream_its_rate() -> None:
    """The fastest of the numbers of threads that do, of attention and of the read apart."""
    rows = [
        bench.Measured(
            "a", "bf16", "auto", 1, attention, read, None, threads, 50e9, 50e9 * of_it, beside
        )
        for threads, attention, read, of_it, beside in (
            (8, 60e9, 80e9, 0.97, 48e9),
            (10, 70e9, 90e9, 0.95, 46e9),
            (12, 75e9, 95e9, 0.93, 44e9),
        )
    ]
    result = bench.HostAttentionResult("amx", range(12), rows)
    (line,) = result.beside_streams()
    assert "attention 70 GB/s (10 threads), read 80 GB/s (8): 0.875" in line
    assert str(result).endswith(line)
    rows[0].stream_beside_read = 46e9
    assert next(result.beside_streams()).endswith("(10 threads), read never")
    del rows[1:]
    assert not list(result.beside_streams())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "query": ({"query": torch.zeros(2, 64)}, r"query must be \[batch, heads, head_dim\]"),
    "query dtype": ({"query": torch.zeros(2, 4, 64).double()}, "not torch.float64"),
    "heads": ({"query": torch.zeros(2, 3, 64)}, "3 query heads must be a multiple of 2"),
    "head_dim": ({"query": torch.zeros(2, 4, 600)}, "head_dim must be at most 512, not 600"),
    "too few": ({"keys": [torch.zeros(2, 9, 64)]}, "keys must be 2 tensors, one a sequence, not 1"),
    "shape": ({"values": [torch.zeros(2, 8, 64)] * 2}, r"values\[0\] must have shape \[2, 9, 64\]"),
    "dtype": ({"values": [torch.zeros(2, 9, 64).half()] * 2}, r"values\[0\] must be torch.float32"),
    "int16": ({"keys": [torch.zeros(2, 9, 64, dtype=torch.int16)] * 2}, "int8, not torch.int16"),
    "columns": ({"keys": [torch.zeros(2, 18, 64)[:, ::2]] * 2}, r"columns of keys\[0\] must lie"),
    "strides": ({"keys": [torch.zeros(2, 18, 64)[:, :9]] * 2}, r"keys\[0\] and values\[0\] must"),
    "length": ({"length": torch.tensor([1, 2])}, "length must be torch.int32, not torch.int64"),
    "out": ({"out": torch.zeros(2, 4, 32)}, r"out must have shape \[2, 4, 64\]"),
    "scales": ({"key_scales": [torch.zeros(2, 9)] * 2}, "go with int8 caches"),
    "new": ({"new_key": torch.zeros(2, 2, 64)}, "new_value is missing"),
    "window": ({"window": -1}, "window must be 0"),
    "softcap": ({"softcap": math.inf}, "softcap must be 0"),
    "path": ({"path": "sse"}, "path must be one of auto, portable"),
    "products": ({"products": 8}, "products=8 go with read_only alone"),
    "prefetch": ({"prefetch": "l4"}, "prefetch must be one of auto, none"),
}


def plain() -> dict[str, Any]:
    return {
        "query": torch.zeros(2, 4, 64),
        "keys": [torch.zeros(2, 9, 64)] * 2,
        "values": [torch.zeros(2, 9, 64)] * 2,
        "out": torch.zeros(2, 4, 64),
        "length": torch.tensor([9, 4], dtype=torch.int32),
        "scale": 1.0,
        "pool": pool(),
    }


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        HostAttention(**scored({**plain(), **changes}))


def test_bad_lengths() -> None:
    a = plain()
    call = HostAttention(**scored(a))
    for bad in (10, -1):
        a["length"][1] = bad
        with pytest.raises(KernelError, match=rf"length\[1\] is {bad}: it must be 0 to 9"):
            call.launch()
    a["length"][1] = 9
    call.launch()


def test_bad_pools() -> None:
    with pytest.raises(KernelError, match="1 to 1024 CPUs"):
        HostPool([])
    missing = max(os.sched_getaffinity(0)) + 900
    with pytest.raises(KernelError, match=f"CPU {missing} cannot be started"):
        HostPool([CPUS[0], missing])
    with pytest.raises(ValueError, match="spare must be 0"):
        HostPool(spare=-1)
    assert default_pool() is default_pool()


def test_a_path_that_the_cpu_has_not() -> None:
    missing = [p for p in PATHS if p != "auto" and p not in host_library().paths()]
    if not missing:
        pytest.skip("this CPU has all")
    with pytest.raises(KernelError, match="this CPU cannot run"):
        HostAttention(**scored({**plain(), "path": missing[0]})).launch()


def test_a_library_of_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "ABI", 99)
    with pytest.raises(OSError, match="built from other sources"):
        HostLibrary(host_module.FILE)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs, with the same answers and complaints."""
    a = make(lengths=[70, 0, 5], group=3, append=True, cache_dtype=torch.int8)
    with monkeypatch.context() as patch:
        patch.setattr(host_module, "FILE", tmp_path / "none.so")
        host_module._loaded.cache_clear()
        out = torch.empty_like(a["query"])
        call = HostAttention(**scored(a), out=out)
        call.start()
        call.wait()
        assert call.done
        with pytest.raises(KernelError, match="was not built"):
            HostAttention(**scored(a), out=out, path="portable")
        a["length"][0] = 1000
        with pytest.raises(ValueError, match=r"length\[0\] is 1000"):
            call.start()
        a["length"][0] = 70
    host_module._loaded.cache_clear()
    torch.testing.assert_close(out, outputs(a), rtol=0.01, atol=0.01)
