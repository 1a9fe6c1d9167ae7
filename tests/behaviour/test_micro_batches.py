"""Two micro-batches of a decode step that take turns: what is computed beside cores that attend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comparison
import exactness
import pytest
import torch
from test_kv_on_cpu import engine_of, generate, prompts, run, steps_of
from transformers import PreTrainedModel

from offload.kernels.host_attention import HostAttention
from offload.models.fused import micro_batch
from offload.models.fused.decode import DecodeSession
from offload.models.fused.host_rows import CpuSteps, CpuWork, HostJoin, HostStart
from offload.models.kv.cache import common_of
from offload.scheduler.stream import Stream

Folder = Callable[[str], Path]
# Streamed layers on both sides of a resident one, and a resident one behind them.
PLACES = [
    "cpu",
    {"": "cpu", "model.layers.1": 0},
    {"": 0, "model.layers.0": "cpu", "model.layers.1": "cpu"},
    {"": 0},
]


@pytest.fixture(params=PLACES, ids=["streamed", "outer", "first", "resident"])
def pair(
    variant_folder: Folder, request: pytest.FixtureRequest
) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """The plain model, and one whose decode steps have two micro-batches; of five sequences four
    are in CPU memory.
    """
    folder = variant_folder("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        with run(folder, device_map=request.param, batch_size=5, kv_on_cpu=4) as model:
            engine_of(model).micro_batches = 2
            yield comparison.plain_model(folder), model


def told(patch: pytest.MonkeyPatch) -> list[str]:
    """What cores are told, as it is: s0 and j0 start and join the first micro-batch."""
    found: list[str] = []
    for letter, kind in (("s", HostStart), ("j", HostJoin)):
        launch = kind.launch

        def tell(self: Any, stream: int = 0, letter: str = letter, launch: Any = launch) -> None:
            found.append(f"{letter}{int(not self._rows._first)}")
            launch(self, stream)

        patch.setattr(kind, "launch", tell)
    return found


def session_of(cache: Any) -> DecodeSession:
    return common_of(cache).session


def filled(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(ids)[exactness.name_of_cache(model)]


def step(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{exactness.name_of_cache(model): cache}).logits[:, -1]


def test_cores_have_work_while_the_other_half_is_computed(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = pair
    engine, ids = engine_of(model), prompts(5, 6)
    cache = filled(model, ids[:, :4])
    step(model, ids[:, 4:5], cache)
    stream = engine._stream
    before = (list(stream.stats.loads), stream.stats.misses) if stream else ([], 0)
    order = told(monkeypatch)
    got = step(model, ids[:, 5:6], cache)
    layers = model.config.num_hidden_layers
    # The host waits for one while the other has been started; but for the end.
    turns = ["s0", "s1", *["j0", "s0", "j1", "s1"] * (layers - 1), "j0", "j1"]
    assert order == turns
    assert comparison.spread(got, plain(ids).logits[:, -1]) < 1e-5
    if stream is not None:  # each layer was loaded once for both, ahead of its use
        loads = [now - then for now, then in zip(stream.stats.loads, before[0], strict=True)]
        assert max(loads) <= 1 and stream.stats.misses == before[1]
    assert [m._calls.part for m in session_of(cache).micro_batches] == [slice(0, 3), slice(3, 5)]
    assert steps_of(engine) == (2, 4)
    assert "4 sequences, in two micro-batches that take turns, " in str(engine.cpu_work)


def test_cores_are_idle_where_nothing_was_started_behind_what_they_did() -> None:
    work = CpuWork()
    steps = CpuSteps(work, 4, 2)
    done: Any = SimpleNamespace(seconds=2.0, bytes_read=10)
    for starts in ((1.0, 2.0, 6.5), (20.0, 21.0)):
        steps.begin()
        for started in starts:
            steps.add(started, done)
    assert [(s.attention, s.waiting, s.nbytes) for s in work.latest] == [(6, 1.5, 30), (4, 0, 20)]
    assert work.steps == 2 and {s.sequences for s in work.latest} == {4}


def test_generations_are_those_of_one_batch(pair: Any) -> None:
    plain, model = pair
    engine, ids = engine_of(model), prompts(5, 7)
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
    pads = [0, 3, 0, 6, 1]
    whole = generate(plain, ids, pads, **options)
    ends = [int(row[9]) for row in whole]  # rows end early, at different lengths
    for given in (options, options | {"eos_token_id": ends}, options | {"num_beams": 2}):
        want = generate(plain, ids, pads, **given)
        for parts in (1, 2):
            engine.micro_batches = parts
            assert torch.equal(generate(model, ids, pads, **given), want)
    assert engine.unserved == {}


@pytest.mark.parametrize("which", [1, 2, 4, 11])
def test_a_step_that_breaks_off_leaves_nobody_at_work(
    pair: Any, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """Where the host waits for one half, and the other is under way; it is done again then."""
    plain, model = pair
    ids = prompts(5, 7)
    cache = filled(model, ids[:, :4])
    step(model, ids[:, 4:5], cache)
    calls: list[int] = []
    at_work: set[int] = set()
    held = {"acquire": 0, "release": 0}
    with monkeypatch.context() as patch:
        for kind in (HostStart, HostJoin):
            launch = kind.launch

            def broken(self: Any, stream: int = 0, launch: Any = launch) -> None:
                calls.append(1)
                if len(calls) == which + 1:
                    raise KeyboardInterrupt
                launch(self, stream)

            patch.setattr(kind, "launch", broken)
        for name in held:
            real = getattr(Stream, name)

            def counted(self: Any, site: int, name: str = name, real: Any = real) -> Any:
                held[name] += 1
                return real(self, site)

            patch.setattr(Stream, name, counted)
        start, wait = HostAttention.start, HostAttention.wait
        patch.setattr(HostAttention, "start", lambda s: at_work.add(id(s)) or start(s))
        patch.setattr(HostAttention, "wait", lambda s: at_work.discard(id(s)) or wait(s))
        with pytest.raises(KeyboardInterrupt) as raised:
            step(model, ids[:, 6:7], cache)
    assert len(calls) == which + 1 and not at_work
    assert held["acquire"] == held["release"]  # although what broke off is still known
    del raised
    assert cache.get_seq_length() == 5
    for at in (5, 6):
        got = step(model, ids[:, at : at + 1], cache)
        assert comparison.spread(got, plain(ids[:, : at + 1]).logits[:, -1]) < 1e-5


def test_in_lock_step_no_two_layers_are_in_use(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = pair
    ids = prompts(5, 6)
    order = told(monkeypatch)
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.offload.generate(ids, micro_batch_size=5, **given)
    layers = model.config.num_hidden_layers
    assert order == ["s0", "s1", "j0", "j1"] * layers * 2
    assert torch.equal(found, plain.generate(ids, **given))


def test_half_of_one_sequence_is_none(pair: Any) -> None:
    """A batch of which one sequence is in CPU memory is not cut."""
    model = pair[1]
    cache = filled(model, prompts(2, 4))
    step(model, prompts(2, 1), cache)
    assert len(session_of(cache).micro_batches) == 1


def test_without_a_plan_a_batch_is_cut_where_cores_attend_for_long(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair[1]
    engine = engine_of(model)
    layers = filled(model, prompts(5, 4)).layers
    monkeypatch.setattr(engine, "micro_batches", None)
    assert engine._micro_batches(layers) == 1  # where the CPU computes
    monkeypatch.setattr(engine, "_device", torch.device("cuda"))
    if engine._stream is not None:
        assert engine._stream.depth == 1
        monkeypatch.setattr(micro_batch, "CPU_SHARE", 0)
        monkeypatch.setattr(micro_batch, "CPU_BYTES", 0)
        assert engine._micro_batches(layers) == 1  # two layers in use would leave no slot free
        monkeypatch.setattr(engine._stream, "_depth", 2)
    read = sum(layer.host_bytes() for layer in layers)
    keys = layers[0].host_keys
    assert read == len(layers) * 2 * keys.stored.nbytes
    for share, nbytes, cut in (
        (0.99 * read / engine._layers.whole_bytes, 0.99 * read / len(layers), True),
        (1.01 * read / engine._layers.whole_bytes, 0, False),
        (0, 1.01 * read / len(layers), False),
    ):
        monkeypatch.setattr(micro_batch, "CPU_SHARE", share)
        monkeypatch.setattr(micro_batch, "CPU_BYTES", nbytes)
        assert engine._micro_batches(layers) == 1 + cut
    assert (
        layers[0].host_bytes(window=2) * layers[0].host_keys.shape[2] == 2 * layers[0].host_bytes()
    )
