"""Keys and values that come up from CPU memory for attention: what comes ahead of its use."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kv_on_cpu import LateCopies as Copies
from test_kv_on_cpu import Pair, close, engine_of, generate, prompts, run
from transformers import PreTrainedModel

import offload
from offload import placement, planned
from offload.errors import UnsupportedError
from offload.kernels.attention import DecodeAttention
from offload.measure.cache import rates_file
from offload.measure.machine import this_machine
from offload.models.fused.decoder import FusedEngine
from offload.models.kv.host_kv import HostKv
from offload.models.kv.streamed_kv import StreamedKv, Wanted, places_bytes
from offload.row_copies import HostCopies
from offload.scheduler import kv_pieces
from offload.scheduler.engine import CpuAttention
from offload.scheduler.hardware import Hardware
from offload.scheduler.kv_pieces import (
    KV_PIECES,
    largest_piece,
    piece_count,
    piece_limit,
    pieces_of,
)
from offload.trace import KEYS_AND_VALUES, Track

Folder = Callable[[str], Path]
LAYERS = 3


@pytest.fixture(scope="module")
def pair(variant_folder: Folder) -> Iterator[Pair]:
    """The plain model, and one with three of four sequences in CPU memory."""
    folder = variant_folder("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        with run(folder, kv_attention="gpu") as model:
            yield comparison.plain_model(folder), model


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of a sequence at a time."""
    monkeypatch.setattr(kv_pieces, "KV_PIECE", 1)


def copies_of(engine: FusedEngine, patch: pytest.MonkeyPatch, early: bool) -> Copies:
    """Copies that are made as late, or as early, as can be."""
    found = Copies(early)
    patch.setattr(engine.host_kv, "copies", found)
    patch.setattr(engine, "_copies", found)
    return found


def streamed_of(model: PreTrainedModel) -> StreamedKv:
    found = engine_of(model).streamed_kv
    assert found is not None
    return found


@settings(max_examples=20)
@given(st.data())
def test_whatever_happens_between_steps(pair: Pair, data: st.DataObject) -> None:
    """What came ahead for the next step is of no use when other things come first."""
    plain, model = pair
    engine, batch = engine_of(model), data.draw(st.integers(1, 3))
    name = exactness.name_of_cache(plain)
    acts = st.sampled_from(["step", "step", "step", "turn", "crop", "reorder", "modules", "fail"])
    order = data.draw(st.lists(acts, min_size=3, max_size=8))
    ids = prompts(batch, 40, data.draw(st.integers(0, 9)))
    caches: list[Any] = [None, None]
    at = 0

    def say(count: int, **options: Any) -> None:
        nonlocal at
        tokens, at = ids[:, at : at + count], at + count
        found = []
        for side, one in enumerate(pair):
            out = one(tokens, **{name: caches[side]}, **options)
            caches[side] = out[name]
            found.append(out.logits)
        assert close(found[1], found[0])

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kv_pieces, "KV_PIECE", data.draw(st.sampled_from([1, 1 << 26])))
        patch.setattr(engine.host_kv, "gpu_sequences", data.draw(st.integers(0, batch - 1)))
        copies_of(engine, patch, data.draw(st.booleans()))
        say(3)
        say(1)
        for act in order:
            if act == "step":
                say(1)
            elif act == "turn":
                say(2)
            elif act == "modules":
                say(1, output_hidden_states=True)
            elif act == "crop":
                for cache in caches:
                    cache.crop(-1)
            elif act == "reorder":
                rows = torch.tensor(data.draw(st.permutations(range(batch))))
                for cache in caches:
                    cache.reorder_cache(rows)
            else:
                break_off(model, ids[:, at : at + 1], {name: caches[1]}, data.draw)
    engine.unserved.clear()


def break_off(model: PreTrainedModel, ids: torch.Tensor, cache: Any, draw: Any) -> None:
    """A step that fails in the middle."""
    launch, calls, last = DecodeAttention.launch, [], draw(st.integers(1, 4))

    def broken(self: DecodeAttention, stream: int = 0) -> None:
        calls.append(1)
        if len(calls) == last:
            raise KeyboardInterrupt
        launch(self, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeAttention, "launch", broken)
        try:
            model(ids, **cache)
        except KeyboardInterrupt:
            return
    (layers,) = (x.layers for x in cache.values())
    for layer in layers:  # fewer pieces than that
        layer.length -= 1


def move(one: PreTrainedModel, cache: Any) -> None:
    cache.reorder_cache(torch.tensor([2, 0, 1]))


def replace_last(one: PreTrainedModel, cache: Any) -> None:
    """Another token's keys and values in the last column, as a user may write them."""
    for layer in cache.layers:
        keys, values = (x[:, :, -1:].flip(0).clone() for x in (layer.keys, layer.values))
        layer.crop(-1)
        layer.update(keys, values)


def say_other_things(one: PreTrainedModel, cache: Any) -> None:
    """A turn that ends where the one ended that it takes the place of."""
    cache.crop(-2)
    one(prompts(3, 2, seed=7), **{exactness.name_of_cache(one): cache})


@pytest.mark.parametrize("change", [move, replace_last, say_other_things])
@pytest.mark.parametrize("piece", [1, 1 << 26])
def test_what_came_ahead_is_forgotten_once_columns_change(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], piece: int
) -> None:
    monkeypatch.setattr(kv_pieces, "KV_PIECE", piece)
    copies_of(engine_of(pair[1]), monkeypatch, early=True)
    name, ids, said = exactness.name_of_cache(pair[0]), prompts(3, 9), []
    with torch.no_grad():
        for one in pair:
            cache = one(ids[:, :5])[name]
            one(ids[:, 5:6], **{name: cache})
            change(one, cache)
            said.append(one(ids[:, 6:7], **{name: cache}).logits)
    assert close(*said)


@pytest.mark.parametrize("piece", [1, 1 << 26])
def test_caches_that_take_turns_do_not_get_each_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    plain, model = pair
    monkeypatch.setattr(kv_pieces, "KV_PIECE", piece)
    copies_of(engine_of(model), monkeypatch, early=True)
    name, jobs = exactness.name_of_cache(plain), [prompts(3, 9, seed) for seed in (1, 2)]
    with torch.no_grad():
        caches = [model(ids[:, :5])[name] for ids in jobs]
        for end in (6, 7, 8):
            for ids, cache in zip(jobs, caches, strict=True):
                got = model(ids[:, end - 1 : end], **{name: cache}).logits[:, -1]
                assert close(got, plain(ids[:, :end]).logits[:, -1])


def test_a_load_waits_for_what_was_sent_down_and_for_its_place() -> None:
    told: list[tuple[Any, ...]] = []

    class Told(HostCopies):
        def mark(self) -> str:
            return f"after use {len(told)}"

        def prefetch(self, pairs: Any, after: Any) -> Any:
            told.append(tuple(after))

    class Rows:
        count, arriving = 1, "sent"

        def pairs(self, wanted: Wanted, place: int) -> list[Any]:
            return []

    kv = StreamedKv(HostKv(0, 1, Told(), False), torch.device("cpu"))
    kv.reserve(64, 0)
    for number in range(3):
        kv.take(Wanted("me", 0, number, 5, 0), Rows())
        kv.give_back()
    assert told == [("after use 0", "sent"), ("after use 0", "sent"), ("after use 1", "sent")]


def loads_of(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every load from now on."""
    found: list[int] = []
    load = StreamedKv._load

    def told(self: StreamedKv, *args: Any) -> Any:
        one = load(self, *args)
        found.append(one.nbytes)
        return one

    patch.setattr(StreamedKv, "_load", told)
    return found


@pytest.mark.usefixtures("small_pieces")
def test_steps_in_a_row_load_nothing_twice(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = pair[1], pair[1].config
    loads = loads_of(model, monkeypatch)
    generate(model, prompts(3, 5), [0] * 3, max_new_tokens=5)
    head = 2 * config.hidden_size // config.num_attention_heads * 4
    pieces = 2 * config.num_key_value_heads * LAYERS  # of two sequences
    want = [past * head for past in (5, 6, 7, 8) for _ in range(pieces)]
    assert loads == [*want, *[9 * head] * KV_PIECES]  # and what no step came for
    work = streamed_of(model).work
    assert list(work.latest)[-4:] == [
        sum(want[i : i + pieces]) for i in range(0, 4 * pieces, pieces)
    ]
    assert work.sequences == 2 and "2 sequences in CPU memory" in str(work)
    assert str(work) in str(model.offload.report())


def test_a_window_brings_up_no_more_than_it_sees(
    variant_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variant_folder("mistral")
    plain = comparison.plain_model(folder)
    window = plain.config.sliding_window
    assert window and window < 20
    ids = prompts(2, 20)
    with run(folder, batch_size=2, kv_on_cpu=2, kv_attention="gpu", max_length=40) as model:
        loads = loads_of(model, monkeypatch)
        options = {"max_new_tokens": 4}
        got = generate(model, ids, [0, 0], **options)
        assert torch.equal(got, generate(plain, ids, [0, 0], **options))
        column = 2 * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
        assert set(loads) == {(window - 1) * column}
    assert engine_of(model).unserved == {}


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 2**20), st.integers(0, 24))
def test_pieces_cover_all_once(rows: int, heads: int, head_bytes: int, shift: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_pieces, "KV_PIECE", 1 << shift)
        pieces = pieces_of(rows, heads, head_bytes)
        asked = piece_count, largest_piece, piece_limit
        count, largest, limit = (f(rows, heads, head_bytes) for f in asked)
    found = [(row, head) for a, b in pieces for row in range(9)[a] for head in range(9)[b]]
    assert found == [(row, head) for row in range(rows) for head in range(heads)]
    sizes = [(a.stop - a.start, b.stop - b.start) for a, b in pieces]
    assert len(sizes) == count and max(sizes) == largest
    assert largest[0] * largest[1] <= limit
    for some_rows, some_heads in sizes:
        assert some_rows * some_heads == 1 or some_rows * some_heads * head_bytes <= 1 << shift
        assert some_heads == heads or some_rows == 1


@pytest.mark.parametrize("int8", [False, True])
def test_places_take_what_is_planned(variant_folder: Folder, int8: bool) -> None:
    kept = "int8" if int8 else "auto"
    with run(variant_folder("llama"), kv_attention="gpu", kv_dtype=kept, max_length=12) as model:
        generate(model, prompts(4, 8), [0] * 4, max_new_tokens=4)
        streamed, config = streamed_of(model), model.config
        width = config.hidden_size // config.num_attention_heads
        shapes = [(config.num_key_value_heads, width)] * LAYERS
        planned = places_bytes(3, shapes, 12, torch.float32, int8)
        assert sum(x.nbytes for x in (*streamed.places, streamed.whole)) == planned
    assert not streamed.places and not streamed.whole.numel()


def test_a_larger_cache_leaves_the_smaller_one_usable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = pair
    copies_of(engine_of(model), monkeypatch, early=False)
    name, ids = exactness.name_of_cache(plain), prompts(3, 400)
    with torch.no_grad():
        small = model(ids[:, :5])[name]
        model(ids[:, 5:6], **{name: small})
        large = model(ids[:, :390])[name]
        places = streamed_of(model).places
        for end in (391, 392):
            got = model(ids[:, end - 1 : end], **{name: large}).logits[:, -1]
            assert close(got, plain(ids[:, :end]).logits[:, -1])
        assert streamed_of(model).places is not places
        for end in (7, 8):
            got = model(ids[:, end - 1 : end], **{name: small}).logits[:, -1]
            assert close(got, plain(ids[:, :end]).logits[:, -1])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.usefixtures("small_pieces")
def test_calls_in_lock_step_take_turns(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    plain, model = pair
    copies_of(engine_of(model), monkeypatch, early)
    monkeypatch.setattr(engine_of(model).host_kv, "gpu_sequences", 0)
    loads = loads_of(model, monkeypatch)
    jobs = [(prompts(2, 4, 1), 5), (prompts(1, 6, 2), 3), (prompts(1, 3, 3), 6)]

    def job(ids: torch.Tensor, count: int, one: PreTrainedModel = model) -> Any:
        return generate(one, ids, [0] * len(ids), max_new_tokens=count)

    got = model.offload.together([lambda ids=ids, n=n: job(ids, n) for ids, n in jobs])
    for (ids, n), said in zip(jobs, got, strict=True):
        assert torch.equal(said, job(ids, n, plain))
    pieces = LAYERS * model.config.num_key_value_heads
    steps = sum(len(ids) * (n - 1) for ids, n in jobs)
    # Nothing is guessed while several take turns: only the last one's steps, and the first layer.
    assert pieces * steps <= len(loads) <= pieces * steps + 3 * KV_PIECES


def test_nothing_is_left_of_a_cache_that_went(pair: Pair) -> None:
    model = pair[1]
    generate(model, prompts(3, 5), [0] * 3, max_new_tokens=3)
    gc.collect()
    assert not list(engine_of(model)._sessions)


def test_a_trace_has_what_comes_up(pair: Pair) -> None:
    model = pair[1]
    with model.offload.trace() as trace:
        generate(model, prompts(3, 5), [0] * 3, max_new_tokens=3)
    spans = trace.end()
    up = [s for s in spans if s.track is Track.LINK_UP and s.name == KEYS_AND_VALUES]
    assert len(up) == 2 * LAYERS + KV_PIECES and all(s.nbytes for s in up)
    waits = [s for s in spans if s.waits_for == KEYS_AND_VALUES and s.track is Track.COMPUTE]
    assert len(waits) == 2 * LAYERS


def test_a_plan_lets_them_come_up_where_cores_cannot_attend(
    variant_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    monkeypatch.setattr(planned, "why_not_on_cpu", lambda *_: "no such cores")
    monkeypatch.setattr(placement, "why_not_on_cpu", lambda *_: "no such cores")
    folder, device = variant_folder("llama"), torch.device("cpu")
    file = rates_file(None, device)
    file.parent.mkdir(parents=True)
    rates: dict[str, Any] = {
        "matrix": {"float32": ((1, 1e12),)},
        "cpu_attention": {"float32": ((1, 1e9),)},
    }
    rates |= dict.fromkeys(("link_up", "link_down", "hbm"), 1e9)
    machine = this_machine(tmp_path, device)
    file.write_text(json.dumps(Hardware(machine=machine, **rates).as_dict()))
    job: dict[str, Any] = {"goal": "fits", "prompt_len": 4, "gen_len": 60, "batch_size": 3}
    with offload.run(folder, device="cpu", engine="fused", dtype=torch.float32, **job) as model:
        setting = model.offload.planned.choice.setting
        assert setting.attention is CpuAttention.GPU and setting.cpu_sequences
        got = generate(model, prompts(3, 4), [0] * 3, max_new_tokens=60)
        work = streamed_of(model).work
        assert work.steps == 59 and work.sequences == setting.cpu_sequences
        assert "come up for attention" in str(model.offload.report())
    want = generate(comparison.plain_model(folder), prompts(3, 4), [0] * 3, max_new_tokens=60)
    assert torch.equal(got, want)


def test_what_cannot_be_is_refused(variant_folder: Folder) -> None:
    folder = variant_folder("llama")
    with pytest.raises(ValueError, match=r"kv_attention must be one of .*'gpus'"):
        run(folder, kv_attention="gpus")
    with pytest.raises(ValueError, match="kv_attention='gpu' is about keys and values in CPU"):
        run(folder, kv_on_cpu=0, kv_attention="gpu")
    with pytest.raises(UnsupportedError, match="kv_on_cpu=3 takes the fused engine"):
        run(folder, engine="transformers", kv_attention="gpu")
    goal = {"goal": "latency", "prompt_len": 4, "gen_len": 4, "device": "cpu"}
    with pytest.raises(ValueError, match="kv_attention='gpu' is decided by the plan"):
        offload.run(folder, kv_attention="gpu", **goal)
