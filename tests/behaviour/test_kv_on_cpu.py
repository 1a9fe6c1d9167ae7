"""Keys and values of some sequences in CPU memory: nobody can tell by what the model says."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import exactness
import pytest
import torch
import transformers
import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import offload
from offload.errors import BudgetError, UnsupportedError
from offload.models.fused import prompt
from offload.models.fused.decoder import FusedEngine
from offload.models.kv import host_kv
from offload.models.kv.cache import layers_of
from offload.models.kv.host_columns import HostColumns
from offload.models.kv.host_kv import HostKv
from offload.models.kv.layer import KvLayer
from offload.models.kv.split_rows import SPARE, in_place
from offload.row_copies import HostCopies
from offload.scheduler import kv_pieces
from offload.scheduler.kv_pieces import evenly

Folder = Callable[[str], Path]
Pair = tuple[PreTrainedModel, PreTrainedModel]
NAN = float("nan")


def run(folder: Path, **options: Any) -> PreTrainedModel:
    """With three of four sequences on the CPU, unless said otherwise."""
    common = {"device_map": "cpu", "engine": "fused", "device": "cpu", "batch_size": 4}
    return offload.run(folder, **common | {"kv_on_cpu": 3, "max_length": 24} | options)


def engine_of(model: PreTrainedModel) -> FusedEngine:
    return model.offload._engine


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def pair(variant_folder: Folder, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The plain model and one whose split and chunks a test may change; of the latter, CPU cores
    attend to what is in CPU memory, or the compute device as it comes up.
    """
    folder = variant_folder("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        with run(folder, kv_attention=request.param) as model:
            yield comparison.plain_model(folder), model


@pytest.fixture(autouse=True)
def _poisoned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cache gets from the one before is no number."""
    halves = host_kv.HostBlock.halves

    def poisoned(*args: Any) -> Any:
        found = halves(*args)
        for half in found:
            poison(half.stored)
            if half.scales is not None:
                poison(half.scales)
        return found

    monkeypatch.setattr(host_kv.HostBlock, "halves", poisoned)


def poison(memory: torch.Tensor) -> None:
    """No number, or in int8 a large one."""
    memory.fill_(NAN if memory.is_floating_point() else 99)


def steps_of(engine: FusedEngine) -> tuple[int, int]:
    """Decode steps that had sequences in CPU memory, and how many the latest one had."""
    if engine.streamed_kv is not None:
        assert not engine.cpu_work.steps
        return engine.streamed_kv.work.steps, engine.streamed_kv.work.sequences
    work = engine.cpu_work
    return work.steps, work.latest[-1].sequences if work.latest else 0


class LateCopies(HostCopies):
    """Every copy is made when somebody waits for it, from what its source holds then; `early`: what
    is prefetched is there at once, as soon as it may be.
    """

    def __init__(self, early: bool = False) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.made = 0
        self.drained = False
        self.early = early
        self.up_waiting: list[Any] = []
        self.up_made = 0

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype)
        poison(memory)
        return memory

    def down(self, target: torch.Tensor, source: torch.Tensor) -> int:
        poison(target)
        self.waiting.append((target, source))
        return self.made + len(self.waiting)

    def prefetch(self, pairs: Any, after: Any) -> Any:
        for target, _ in pairs:
            poison(target)
        self.up_waiting.append((pairs, list(after)))
        point = self, self.up_made + len(self.up_waiting)
        if self.early:
            self.wait(point)
        return point

    def wait(self, point: Any) -> None:
        if isinstance(point, tuple):  # perhaps of a test before
            point[0].bring_up(point[1])
        while isinstance(point, int) and self.made < point:
            target, source = self.waiting.pop(0)
            target.copy_(source)
            self.made += 1

    def bring_up(self, count: int) -> None:
        while self.up_made < count:
            pairs, after = self.up_waiting.pop(0)
            for before in after:
                self.wait(before)
            for target, source in pairs:
                target.copy_(source)
            self.up_made += 1

    synchronize = wait

    def drain(self) -> None:
        """Which the tests do without: what is on its way then stays there."""
        self.drained = True


def generate(model: PreTrainedModel, ids: torch.Tensor, pads: list[int], **options: Any) -> Any:
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    common = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(ids, **common | options)


def log_likelihood(
    model: PreTrainedModel, said: torch.Tensor, pads: list[int], new: int
) -> torch.Tensor:
    """Of the last `new` tokens of each row [batch, tokens]: [batch]."""
    mask = torch.ones_like(said)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(said, attention_mask=mask, position_ids=positions).logits[:, -new - 1 : -1]
    chosen = logits.double().log_softmax(-1).gather(2, said[:, -new:, None])
    return chosen.sum((1, 2))


def prompts(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, variants.VOCABULARY, (batch, tokens), generator=generator)


@settings(max_examples=25)
@given(st.data())
def test_any_split_says_the_same(pair: Pair, data: st.DataObject) -> None:
    plain, model = pair
    engine = engine_of(model)
    assert engine.host_kv is not None
    batch, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    pads = data.draw(st.lists(st.integers(0, tokens - 1), min_size=batch, max_size=batch))
    options: dict[str, Any] = {"max_new_tokens": data.draw(st.integers(1, 6))}
    options |= data.draw(st.sampled_from([{}, {"num_beams": 3}, {"prefill_chunk_size": 3}]))
    ids = prompts(batch, tokens, data.draw(st.integers(0, 99)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.host_kv, "gpu_sequences", data.draw(st.integers(0, batch)))
        patch.setattr(engine, "prefill_rows", data.draw(st.sampled_from([None, 1, 2 * tokens])))
        patch.setattr(engine.host_kv, "copies", late := LateCopies(data.draw(st.booleans())))
        patch.setattr(engine, "_copies", late)
        patch.setattr(engine, "micro_batches", data.draw(st.sampled_from([1, 2])))
        # A head's of one sequence, several heads', one sequence's, all.
        patch.setattr(kv_pieces, "KV_PIECE", data.draw(st.sampled_from([1, 9000, 20000, 1 << 26])))
        got = generate(model, ids, pads, **options)
    wanted = generate(plain, ids, pads, **options)
    if "num_beams" in options:  # two beams may be as likely but for rounding
        likely = [
            log_likelihood(plain, said, pads, new=said.shape[1] - tokens) for said in (got, wanted)
        ]
        torch.testing.assert_close(*likely, rtol=1e-6, atol=0)
    else:
        assert torch.equal(got, wanted)
    assert engine.unserved == {}


@pytest.mark.compat
@pytest.mark.parametrize(("attention", "parts"), [("cpu", 1), ("cpu", 2), ("gpu", 1)])
@pytest.mark.parametrize("name", exactness.FUSED)
def test_every_family(variant_folder: Folder, name: str, attention: str, parts: int) -> None:
    folder = variant_folder(name)
    plain = comparison.plain_model(folder)
    asked = {k: v for k, v in comparison.left_padded(name).items() if k != "decoder_input_ids"}
    asked |= {"max_new_tokens": 6, "do_sample": False}
    with run(folder, batch_size=2, kv_on_cpu=1, kv_attention=attention) as model:
        engine = engine_of(model)
        engine.prefill_rows, engine.micro_batches = 1, parts
        said = [m.generate(**asked, num_beams=2) for m in (model, plain)]
        assert torch.equal(*said)
        assert engine.unserved == {}
        assert steps_of(engine) == (5, 3)  # of four beams


def turns(model: PreTrainedModel, between: Callable[[Any], Any] = lambda cache: cache) -> Any:
    """Logits of several turns over one cache, of many tokens and of one, each as it is said."""
    name = exactness.name_of_cache(model)
    ids, cache, found = prompts(3, 16), None, []
    with torch.no_grad():
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 11), (11, 12), (12, 15), (15, 16)):
            out = model(ids[:, first:last], **{name: cache})
            found.append(out.logits[:, -1])
            cache = between(out[name])
    return torch.stack(found)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and comparison.spread(got, want) < 1e-5


@pytest.mark.parametrize("parts", [1, 2])
def test_turns_over_one_cache(pair: Pair, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    plain, model = pair
    engine = engine_of(model)
    monkeypatch.setattr(engine, "micro_batches", parts)
    late = LateCopies()
    monkeypatch.setattr(engine.host_kv, "copies", late)
    monkeypatch.setattr(engine, "_copies", late)
    monkeypatch.setattr(engine, "prefill_rows", 1)
    want = turns(plain)
    assert close(turns(model), want)
    assert close(turns(model, copy.deepcopy), want)


def test_a_pass_that_breaks_off_leaves_no_copy_behind(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had sent on its way does not cover what is kept later."""
    plain, model = pair
    engine = engine_of(model)
    late = LateCopies()
    monkeypatch.setattr(engine.host_kv, "copies", late)
    monkeypatch.setattr(engine, "_copies", late)
    name, ids = exactness.name_of_cache(plain), prompts(3, 12)
    real, calls = prompt.run_block, []

    def broken(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*args)

    with torch.no_grad():
        cache = model(ids[:, :5])[name]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(prompt, "run_block", broken)
            model(ids[:, 6:11], **{name: cache})
        assert late.drained and cache.get_seq_length() == 5
        model(ids[:, 5:6], output_hidden_states=True, **{name: cache})  # by transformers' modules
        got = [model(ids[:, 6:7], **{name: cache}).logits[:, -1]]
        got.append(model(ids[:, 7:10], **{name: cache}).logits[:, -1])
        want = plain(ids[:, :10]).logits
    engine.unserved.clear()
    assert close(got[0], want[:, 6]) and close(got[1], want[:, 9])


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_move_between_the_sides(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Reordered, selected, repeated, cropped, also while copies are on their way."""
    engine = engine_of(pair[1])
    monkeypatch.setattr(engine, "micro_batches", parts)
    late = LateCopies()
    monkeypatch.setattr(engine.host_kv, "copies", late)
    monkeypatch.setattr(engine, "_copies", late)
    ids = prompts(3, 12)
    said = []
    for model in pair:
        name = exactness.name_of_cache(model)
        with torch.no_grad():
            cache = model(ids[:, :5])[name]
            cache.reorder_cache(torch.tensor([2, 0, 0]))
            found = [model(ids[:, 5:6], **{name: cache}).logits]
            cache.batch_repeat_interleave(2)
            found.append(model(ids[:, 6:7].repeat(2, 1), **{name: cache}).logits)
            cache.batch_select_indices(torch.tensor([5, 1, 0]))
            found.append(model(ids[:, 7:9], **{name: cache}).logits[:, -1:])
            cache.batch_select_indices(torch.tensor([1]))  # on one side from here on
            found.append(model(ids[:1, 9:10], **{name: cache}).logits)
            cache.batch_repeat_interleave(2)
            found.append(model(ids[:2, 10:11], **{name: cache}).logits)
        said.append(torch.cat(found))
    assert close(*said)


@given(st.lists(st.integers(0, 11), min_size=8, max_size=8))
def test_rows_are_copied_in_an_order_that_loses_none(sources: list[int]) -> None:
    """Rows 8 to 11 are sources alone."""
    rows = {**{i: f"row {i}" for i in range(12)}, SPARE: ""}
    wanted = [rows[source] for source in sources]
    copies = list(in_place(dict(enumerate(sources))))
    for target, source in copies:
        rows[target] = rows[source]
    assert [rows[i] for i in range(8)] == wanted
    moved = sum(i != source for i, source in enumerate(sources))
    assert len(copies) - sum(target == SPARE for target, _ in copies) == moved


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4], [3, 1, 2, 0, 4], [4, 4, 1, 2, 3], [1, 0, 3, 4, 2]]
)
def test_only_what_moves_is_copied(pair: Pair, order: list[int]) -> None:
    """Of five rows one is on the compute device."""
    model, name = pair[1], exactness.name_of_cache(pair[0])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        cache = model(prompts(5, 6))[name]
        assert cache.layers[0].rows_on_cpu == 4
        before = [x.clone() for layer in cache.layers for x in (layer.keys, layer.values)]
        taken: list[int] = []
        take = HostColumns.take
        patch.setattr(HostColumns, "take", lambda *args: taken.append(1) or take(*args))
        cache.reorder_cache(torch.tensor(order))
        after = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    for a, b in zip(after, before, strict=True):
        assert torch.equal(a, b[order])
    moved = sum(i != source for i, source in enumerate(order) if i)
    assert len(taken) <= len(before) * (moved + 1) and (moved or not taken)


def test_transformers_modules_run_on_the_same_cache(pair: Pair) -> None:
    plain, model = pair
    name = exactness.name_of_cache(plain)
    ids, said = prompts(3, 8), []
    for m in pair:
        with torch.no_grad():
            cache = m(ids[:, :4])[name]
            m(ids[:, 4:6], output_hidden_states=True, **{name: cache})
            said.append(m(ids[:, 6:7], **{name: cache}).logits)
    assert close(*said)
    assert isinstance(cache.layers[0], KvLayer) and cache.layers[0].rows_on_cpu == 2
    engine_of(model).unserved.clear()


def test_a_small_batch_stays_where_it_is_computed(pair: Pair) -> None:
    model = pair[1]
    steps, _ = steps_of(engine_of(model))
    generate(model, prompts(1, 4), [0], max_new_tokens=3)
    assert steps_of(engine_of(model))[0] == steps
    generate(model, prompts(2, 4), [0, 0], max_new_tokens=3)
    assert steps_of(engine_of(model))[0] == steps + 2


def test_caches_share_the_room_on_the_compute_device(pair: Pair) -> None:
    model, ids = pair[1], prompts(3, 5)
    name = exactness.name_of_cache(model)

    def rows_on_cpu(batch: int, keep: list[Any]) -> int:
        with torch.no_grad():
            keep.append(model(ids[:batch])[name])
        assert len({layer.rows_on_cpu for layer in keep[-1].layers}) == 1
        return keep[-1].layers[0].rows_on_cpu

    kept: list[Any] = []
    assert rows_on_cpu(3, kept) == 2  # there is room for one
    assert rows_on_cpu(2, kept) == 2
    twin = copy.deepcopy(kept[0])
    kept[0].batch_select_indices(torch.tensor([2, 0]))  # one of them may stay
    assert kept[0].layers[0].rows_on_cpu == 1
    del kept[0]
    assert rows_on_cpu(2, kept) == 1
    with torch.no_grad():  # which grows, and keeps its rows where they are
        for cache in (twin, kept[0]):
            batch = cache.layers[0].batch_size
            before = cache.layers[0].rows_on_cpu
            more = prompts(batch, 300) % 7 + 3
            got = model(more, **{name: cache}).logits[:, -1]
            want = pair[0](torch.cat([ids[:batch], more], 1)).logits[:, -1]
            assert close(got, want) and cache.layers[0].rows_on_cpu == before


def test_memory_is_used_again_and_given_back(
    variant_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    alloc = host_kv.aio.alloc
    monkeypatch.setattr(
        host_kv.aio, "alloc", lambda n, **options: made.append(n) or alloc(n, **options)
    )
    with run(variant_folder("llama")) as model:
        model.offload.wait_loaded()  # in memory that is none of ours
        made.clear()
        generate(model, prompts(4, 3), [0] * 4, max_new_tokens=2)
        config = model.config
        token = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
        assert made == [3 * 24 * token * 4] * 3  # as planned, though less was needed
        for batch in (4, 3):
            generate(model, prompts(batch, 3), [0] * batch, max_new_tokens=20)
        assert len(made) == 3
        generate(model, prompts(5, 20), [0] * 5, max_new_tokens=20)  # more than planned
        gc.collect()
        free = engine_of(model).host_kv._free
        assert len(free) == 3 and min(b.nbytes for b in free) > made[0]
    assert free == []


def test_what_cannot_be_is_refused(
    variant_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variant_folder("llama")
    with pytest.raises(ValueError, match="kv_on_cpu=3 of batch_size=2"):
        run(folder, batch_size=2)
    with pytest.raises(TypeError, match="kv_on_cpu must be an int"):
        run(folder, kv_on_cpu=True)
    with pytest.raises(UnsupportedError, match="kv_on_cpu=3 takes the fused engine"):
        run(folder, engine="transformers")
    with pytest.raises(UnsupportedError, match="kv_on_cpu=3 takes the fused engine"):
        run(variant_folder("mixtral"), engine="auto")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=520, vocab_size=31,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="heads of up to 512 elements, not 520"):
        run(tmp_path)
    with run(folder) as model:
        monkeypatch.setattr(host_kv, "host_memory_available", lambda: 1000)
        with pytest.raises(BudgetError, match="1000 B are free: lower kv_on_cpu"):
            generate(model, prompts(2, 3), [0, 0], max_new_tokens=2)
        monkeypatch.undo()
        cache = model(prompts(2, 3))[exactness.name_of_cache(model)]
        with pytest.raises(TypeError, match="keys and values in CPU memory cannot be pickled"):
            pickle.dumps(cache)


@pytest.mark.parametrize("short", ["cpu", "device"])
def test_a_cache_that_could_not_grow_is_as_it_was(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    plain, model = pair
    name, ids = exactness.name_of_cache(plain), prompts(3, 220)
    empty, calls = torch.empty_like, []

    def fails(like: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:  # of the second layer
            raise torch.OutOfMemoryError
        return empty(like)

    with torch.no_grad():
        cache = model(ids[:, :5])[name]
        model(ids[:, 5:6], **{name: cache})
        with monkeypatch.context() as patch, pytest.raises((BudgetError, torch.OutOfMemoryError)):
            patch.setattr(host_kv, "host_memory_available", lambda: 1000 if short == "cpu" else 1e9)
            patch.setattr(engine_of(model).host_kv, "_free", [])
            patch.setattr(torch, "empty_like", empty if short == "cpu" else fails)
            model(ids[:, 6:], **{name: cache})
        for first, last in ((6, 7), (7, 220)):
            got = model(ids[:, first:last], **{name: cache}).logits[:, -1]
            assert close(got, plain(ids[:, :last]).logits[:, -1])


@given(st.integers(0, 9), st.integers(0, 40), st.integers(1, 12))
def test_chunks_cover_all_evenly(first: int, count: int, most: int) -> None:
    spans = list(evenly(first, first + count, most))
    assert [x for a, b in spans for x in range(a, b)] == list(range(first, first + count))
    sizes = {b - a for a, b in spans}
    assert not sizes or (max(sizes) <= most and max(sizes) - min(sizes) <= 1)


def test_blocks_are_given_back_behind_the_copies_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Told(HostCopies):
        def drain(self) -> None:
            done.append("drained")

    home = HostKv(0, 64, Told(), False)
    close = host_kv.aio.AlignedBuffer.close
    monkeypatch.setattr(
        host_kv.aio.AlignedBuffer, "close", lambda self: done.append("closed") or close(self)
    )
    small = home.borrow(80, 1)
    done.clear()
    del small  # a cache that nobody has, whose last copies may still be on their way
    large = home.borrow(8000, 1)
    assert done == ["drained", "closed"]
    del large
    home.close()
    assert done == ["drained", "closed"] * 2


def test_two_threads_do_not_get_the_same_block() -> None:
    home = HostKv(0, 64, HostCopies(), False)
    got: list[Any] = [home.borrow(80, 1)]
    got.clear()

    class Slow(list):
        """Another thread asks in the middle of looking for a block."""

        def __iter__(self) -> Iterator[Any]:
            found = list(super().__iter__())
            if not got:
                got.append(threading.Thread(target=lambda: got.append(home.borrow(80, 1))))
                got[0].start()
                got[0].join(0.2)
            return iter(found)

    home._free = Slow(home._free)
    mine = home.borrow(80, 1)
    got[0].join()
    assert mine._buffer is not got[1]._buffer


def test_two_threads_do_not_get_the_same_room() -> None:
    """Room on the compute device, of which there is some for three sequences."""
    home = HostKv(3, 64, HostCopies(), False)
    got: list[Any] = []

    class Slow(weakref.WeakSet):
        """Another thread asks in the middle of counting what is taken."""

        def __iter__(self) -> Iterator[Any]:
            if not got:
                got.append(threading.Thread(target=lambda: got.append(home.share(2))))
                got[0].start()
                got[0].join(0.2)
            return super().__iter__()

    home._shares = Slow()
    mine = home.share(2)
    got[0].join()
    assert (mine.rows, got[1].rows) == (2, 1)


def test_garbage_is_collected_once_for_a_cache(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all that a program has imported that takes longer than a layer of a prompt."""
    model = pair[1]
    engine_of(model).host_kv._give_back()
    collect, seen = gc.collect, []

    def collected() -> int:
        seen.append(len(layers))
        return collect()

    monkeypatch.setattr(host_kv.gc, "collect", collected)
    layers: list[Any] = []
    allocate = KvLayer._allocate

    def allocated(self: KvLayer, *args: Any) -> None:
        layers.append(self)
        allocate(self, *args)

    monkeypatch.setattr(KvLayer, "_allocate", allocated)
    ids = prompts(4, 6)
    with torch.no_grad():
        cache = model(ids)[exactness.name_of_cache(model)]
        assert len(layers) == 3 and seen == [1]
        layers_of(cache)[0].common.max_length = 0
        model(prompts(4, 300), **{exactness.name_of_cache(model): cache})  # which must grow
    assert len(layers) == 6 and seen == [1, 4]


def test_a_pool_that_is_closed_takes_nothing_back() -> None:
    home = HostKv(0, 64, HostCopies(), False)
    block = home.borrow(80, 1)
    keys, _ = block.halves((1, 2, 5, 1), torch.float32)
    home.close()
    keys.stored.fill_(3)
    del block
    gc.collect()
    assert home._free == [] and keys.read(5).sum() == 30  # a view keeps its memory
