"""Several calls of one model in lock step: each computes what it does alone, for one's loads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import pytest
import torch
import transformers
import variants
from greenlet import greenlet
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

import offload
from offload.bench.memory import peak_of
from offload.errors import ClosedError, JobError, UnsupportedError
from offload.models.fused import prompt
from offload.models.lockstep import spent

Folder = Callable[[str], Path]
Request = dict[str, Any]
ENGINES = [
    ("llama", "transformers"),
    ("llama", "fused"),
    ("gemma2", "fused"),  # windows
    ("opt", "fused"),
    ("mixtral", "transformers"),
    ("t5", "transformers"),
    ("llama-dynamic-rope", "transformers"),  # its rotary tables grow with what was seen
    ("llama-dynamic-rope", "fused"),
]


def requests(name: str, tokens: list[int], seed: int = 0) -> list[Request]:
    """Prompts of different lengths and batches, with as many new tokens as the list says."""
    found = []
    for i, new in enumerate(tokens):
        request: Request = variants.inputs(name, rows=1 + i % 2, length=4 + 3 * i, seed=seed + i)
        request.pop("decoder_input_ids", None)
        found.append({**request, "max_new_tokens": new, "do_sample": False})
    return found


def loads(model: Any) -> int:
    return sum(model.offload._owner.stream.stats.loads)


def counted(model: Any, call: Callable[[], Any]) -> tuple[Any, int]:
    """What the call gives, and the loads of whole layers that it took."""
    before = loads(model)
    result = call()
    return result, loads(model) - before


@pytest.mark.compat
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_tokens_are_those_of_each_alone_and_loads_those_of_the_longest(
    variant_folder: Folder, name: str, engine: str
) -> None:
    work = requests(name, [3, 9, 5, 7])
    with offload.run(variant_folder(name), device_map="cpu", prefetch=1, engine=engine) as model:
        alone = [counted(model, lambda r=r: model.generate(**r)) for r in work]
        together, taken = counted(model, lambda: model.offload.generate(work))
        for got, (want, _) in zip(together, alone, strict=True):
            assert torch.equal(got, want)
        longest = max(count for _, count in alone)
        assert longest - 1 <= taken <= longest  # one load less is ahead at the end than before
        # And once more, the longest first and three at a time.
        again = model.offload.generate(reversed(work), live=3)
        for got, (want, _) in zip(again, reversed(alone), strict=True):
            assert torch.equal(got, want)
        if engine == "fused":
            assert model.offload.report().unserved == {}


@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_the_last_layer_is_used_by_all_before_any_goes_on(
    variant_folder: Folder, engine: str
) -> None:
    """Its slot is free while one after another chooses its token."""
    order: list[str] = []

    class Chooses(StoppingCriteria):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            order.append(self.name)
            return torch.zeros(len(ids), dtype=torch.bool)

    work = requests("llama", [4, 4, 4])
    for i, request in enumerate(work):
        request["stopping_criteria"] = [Chooses(f"token {i}")]
    with offload.run(variant_folder("llama"), device_map="cpu", prefetch=1, engine=engine) as model:
        stream = model.offload._owner.stream
        release = stream.release

        def released(site: int) -> None:
            order.append(f"layer {site}")
            release(site)

        stream.release = released
        model.offload.generate(work)
    layers = [f"layer {site}" for site in range(3) for _ in range(3)]
    tokens = ["token 0", "token 1", "token 2"]
    assert order[-12:] == layers + tokens
    # Which layer is the last is known from the pass before.
    assert order[:12] == layers[:6] + [
        x for pair in zip(layers[6:], tokens, strict=True) for x in pair
    ]


@pytest.fixture(scope="module", params=["transformers", "fused"])
def model(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[Any]:
    """Llama with a resident layer between two that are streamed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        places = {"": "cpu", "model.layers.1": 0}
        folder = variant_folder("llama")
        with offload.run(folder, device_map=places, prefetch=1, engine=request.param) as made:
            yield made


class _Stops(StoppingCriteria):
    """After so many tokens of a row, or with an error."""

    def __init__(self, length: int, error: BaseException | None = None) -> None:
        self.length, self.error = length, error

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] >= self.length and self.error is not None:
            raise self.error
        return torch.full((len(ids),), ids.shape[1] >= self.length)


def passes_of(forwards: list[int], live: int) -> int:
    """Passes of a queue whose jobs take so many forwards, at most `live` of them at a time."""
    queue, running, passes = list(forwards), [], 0
    while queue or running:
        while queue and len(running) < live:
            running.append(queue.pop(0))
        running = [left - 1 for left in running if left > 1]
        passes += 1
    return passes


@settings(max_examples=15)
@given(st.data())
def test_jobs_join_and_leave_in_any_order(model: Any, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6), label="new tokens")
    live = data.draw(st.integers(1, 6), label="live")
    work = requests("llama", tokens, seed=data.draw(st.integers(0, 3), label="seed"))
    forwards = list(tokens)
    for i, request in enumerate(work):
        if data.draw(st.booleans(), label="stops early"):
            forwards[i] = data.draw(st.integers(1, tokens[i]), label="after")
            length = request["input_ids"].shape[1] + forwards[i]
            request["stopping_criteria"] = [_Stops(length)]
    want = [model.generate(**request) for request in work]
    before = model.offload._owner.passes
    got = model.offload.generate(iter(work), live=live)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert model.offload._owner.passes - before == passes_of(forwards, live)


def test_a_batch_is_split_and_joined(model: Any) -> None:
    whole = variants.inputs("llama", rows=7, length=9)
    whole["attention_mask"][2, :4] = 0
    whole["attention_mask"][6, :2] = 0
    options: Request = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": list(range(3, 131, 4)),  # rows end early, and micro-batches with them
        "pad_token_id": 1,
    }
    pieces = [
        model.generate(**{k: v[i : i + 3] for k, v in whole.items()}, **options)
        for i in range(0, 7, 3)
    ]
    longest = max(ids.shape[1] for ids in pieces)
    assert len({ids.shape[1] for ids in pieces}) > 1
    want = torch.cat(
        [torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=1) for x in pieces]
    )
    got = model.offload.generate(whole, micro_batch_size=3, **options)
    assert torch.equal(got, want)
    mask = whole.pop("attention_mask")
    options["attention_mask"] = mask
    got = model.offload.generate(whole["input_ids"], micro_batch_size=3, live=2, **options)
    assert torch.equal(got, want)
    outputs = model.offload.generate(
        whole, micro_batch_size=3, return_dict_in_generate=True, num_beams=2, **options
    )
    assert [len(o.sequences) for o in outputs] == [3, 3, 1]


def test_what_asks_for_a_sequence_by_number_gets_that_of_the_batch(model: Any) -> None:
    whole = variants.inputs("llama", rows=5, length=4)
    options: Request = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2}
    options["prefix_allowed_tokens_fn"] = lambda i, ids: list(range(10 + 7 * i, 17 + 7 * i))
    want = model.generate(**whole, **options)
    got = model.offload.generate(whole, micro_batch_size=2, **options)
    assert torch.equal(got, want)


def test_early_exits_are_those_of_each_call(model: Any) -> None:
    """`generate` lowers the model's number of layers while it makes candidates, and the others run
    all of theirs meanwhile.
    """
    options: Request = {"assistant_early_exit": 1}
    work = [{**r, "input_ids": r["input_ids"][:1]} for r in requests("llama", [8, 5, 6])]
    for request in work:
        request["attention_mask"] = request["attention_mask"][:1]
    want = [model.generate(**request) for request in work]
    got = model.offload.generate([work[0], work[1] | options, work[2] | options])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert model.config.num_hidden_layers == 3
    ends = {"logits_processor": [_Fails()], "max_new_tokens": 9}
    with pytest.raises(JobError, match="enough"):
        model.offload.generate([work[0] | options | ends, work[1] | options])
    assert model.config.num_hidden_layers == 3


class _Fails:
    """A logits processor that has enough of a candidate."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 8:
            raise ValueError("enough")
        return scores


@settings(max_examples=8)
@given(
    rows=st.integers(1, 7),
    size=st.integers(1, 8),
    live=st.none() | st.integers(1, 3),
    beams=st.integers(1, 2),
)
def test_any_split_is_its_pieces(
    model: Any, rows: int, size: int, live: int | None, beams: int
) -> None:
    whole = variants.inputs("llama", rows=rows, length=5, seed=rows)
    whole["attention_mask"][rows // 2, :2] = 0
    options: Request = {"max_new_tokens": 3, "do_sample": False, "num_beams": beams}
    pieces = [
        model.generate(**{k: v[i : i + size] for k, v in whole.items()}, **options)
        for i in range(0, rows, size)
    ]
    got = model.offload.generate(whole, micro_batch_size=size, live=live, **options)
    assert torch.equal(got, torch.cat(pieces))


def test_prompts_in_pieces_beside_others_that_decode(model: Any) -> None:
    work = requests("llama", [8, 3, 4])
    work[2] |= {"prefill_chunk_size": 3}
    want = [model.generate(**request) for request in work]
    got = model.offload.generate(work, live=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_calls_of_any_kind(model: Any) -> None:
    """Plain forwards, layers asked for out of order, and one that never calls the model."""
    hidden = torch.randn(1, 4, 32)
    arguments = variants.inputs("llama")
    rotary = model.model.rotary_emb(hidden, torch.arange(4)[None])

    def layers() -> torch.Tensor:
        out = hidden
        for i in (2, 0, 2, 1):
            out = model.model.layers[i](out, position_embeddings=rotary)
        return out

    def forward() -> torch.Tensor:
        states = model(**arguments, output_hidden_states=True).hidden_states
        return torch.stack(states)

    calls: list[Callable[[], torch.Tensor]] = [
        layers,
        lambda: model(**arguments).logits,
        forward,
        lambda: torch.zeros(1),
        lambda: model.generate(**requests("llama", [4])[0]),
    ]
    with torch.no_grad():
        want = [call() for call in calls]
        got = model.offload.together(calls)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert model.offload.together([]) == []


@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_rotary_tables_grow_for_each_alone(variant_folder: Folder, engine: str) -> None:
    """A table for the longest sequence so far would change what a shorter one computes."""
    folder = variant_folder("llama-dynamic-rope")  # grows behind 16 tokens
    work = [
        {**variants.inputs("llama", length=length), "max_new_tokens": 4, "do_sample": False}
        | {"return_dict_in_generate": True, "output_logits": True}
        for length in (24, 17, 20, 8)
    ]
    with offload.run(folder, device_map="cpu", prefetch=1, engine=engine) as model:
        got = model.offload.generate(work)
    for output, request in zip(got, work, strict=True):
        want = comparison.plain_model(folder).generate(**request)
        for ours, theirs in zip(output.logits, want.logits, strict=True):
            assert comparison.spread(ours, theirs) < (1e-4 if engine == "fused" else 1e-12)


def test_prompts_share_the_memory_between_a_blocks_products(
    variant_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits keeps its hidden states, and no more. Keys and values in CPU memory, too."""
    rooms = []
    init = prompt.Room.__init__
    monkeypatch.setattr(prompt.Room, "__init__", lambda *a: rooms.append(1) or init(*a))
    work = [
        r | variants.inputs("llama", rows=3, length=4 + i)
        for i, r in enumerate(requests("llama", [3, 2, 4]))
    ]
    options: Request = {"batch_size": 3, "kv_on_cpu": 2, "max_length": 24, "device_map": "cpu"}
    with offload.run(variant_folder("llama"), engine="fused", prefetch=1, **options) as model:
        want = [model.generate(**request) for request in work]
        assert len(rooms) == 3
        rooms.clear()
        with torch.inference_mode():
            first = model.offload.together([lambda: model.generate(**work[0])])
        got = model.offload.generate(work)
        assert len(rooms) == 2
        assert all(torch.equal(a, b) for a, b in zip([*first, *got], [want[0], *want], strict=True))
        with torch.no_grad():  # one that keeps no cache beside one that does
            calls = [
                lambda: model(**variants.inputs("llama"), use_cache=False).logits,
                lambda: model(**variants.inputs("llama", rows=3, seed=5)).logits,
            ]
            plain = [call() for call in calls]
            together = model.offload.together(calls)
        assert all(torch.equal(a, b) for a, b in zip(together, plain, strict=True))


@pytest.mark.skipif(
    not (3, 11) <= sys.version_info < (3, 14), reason="nothing is let go of in this Python"
)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_what_waits_keeps_its_hidden_states_alone(
    variant_folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not its embeddings: of eight micro-batches together a fifth of what one batch takes."""
    monkeypatch.setattr(spent, "LEAST_BYTES", 1)
    whole = torch.cat([variants.inputs(name, rows=8, length=24)["input_ids"]] * 2)
    with offload.run(variant_folder(name), device_map="cpu", prefetch=1) as model:

        def prefill(ids: torch.Tensor) -> None:
            model.base_model(ids, use_cache=False)

        def in_micro_batches() -> None:
            model.offload.together([lambda x=x: prefill(x) for x in whole.split(2)])

        with torch.no_grad():
            want = model(whole).logits
            got = torch.cat(
                model.offload.together([lambda x=x: model(x).logits for x in whole.split(2)])
            )
            one = peak_of(lambda: prefill(whole), whole.device)
            several = peak_of(in_micro_batches, whole.device)
        assert comparison.spread(got, want) < 1e-4
        assert several <= one / 4


def test_a_layer_within_a_layer_does_not_wait(model: Any) -> None:
    """It holds a slot and its weights are in place: others must not run before it has ended."""
    arguments = variants.inputs("llama")
    hidden = torch.randn(1, 4, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(4)[None])
    inner: list[torch.Tensor] = []
    first, last = model.model.layers[0], model.model.layers[2]

    def call(*_: Any) -> None:
        inner.append(last(hidden, position_embeddings=rotary))

    with torch.no_grad():
        want, within = model(**arguments).logits, last(hidden, position_embeddings=rotary)
        hook = first.mlp.register_forward_pre_hook(call)
        got = model.offload.together([lambda: model(**arguments).logits] * 3)
        hook.remove()
    assert len(inner) == 3 and all(torch.equal(x, within) for x in inner)
    assert all(comparison.spread(logits, want) < 1e-4 for logits in got)


def test_an_encoder_beside_decoders_that_are_under_way(variant_folder: Folder) -> None:
    """A new request's encoder runs in the pass in which others decode; nobody waits for ever."""
    work = requests("t5", [6, 2, 5, 1, 3])
    with offload.run(variant_folder("t5"), device_map="cpu", prefetch=1) as model:
        want = [model.generate(**request) for request in work]
        for live in (1, 2, 3):
            got = model.offload.generate(work, live=live)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_each_call_has_its_own_settings_of_torch(model: Any) -> None:
    arguments = variants.inputs("llama")

    def now() -> tuple[bool, bool, bool, torch.dtype]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    def under(*contexts: Any) -> Callable[[], bool]:
        def call() -> bool:
            outer = now()
            for context in contexts:
                context.__enter__()
            inner, same = now(), True
            for _ in range(3):
                model(**arguments)
                same &= now() == inner
            for context in reversed(contexts):
                context.__exit__(None, None, None)
            return same and now() == outer

        return call

    def calls() -> list[Callable[[], bool]]:
        return [
            under(torch.no_grad()),
            under(torch.inference_mode()),
            under(torch.autocast("cpu", dtype=torch.bfloat16)),
            under(torch.enable_grad()),
            under(torch.autocast("cpu", dtype=torch.float16), torch.no_grad()),
            under(torch.inference_mode(), torch.autocast("cpu", enabled=False)),
            under(),
        ]

    before = now()
    assert model.offload.together(calls()) == [True] * 7
    assert now() == before
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = now()
        assert model.offload.together(calls(), live=3) == [True] * 7
        assert now() == before


def test_settings_are_as_they_were_behind_a_call_that_failed(model: Any) -> None:
    """Those that are ended have their own once more meanwhile."""
    arguments = variants.inputs("llama")

    def goes_on() -> None:
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.float16):
            model.generate(**requests("llama", [9])[0])

    def fails() -> None:
        model(**arguments)
        raise ValueError("nonsense")

    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(JobError, match="nonsense"):
            model.offload.together([goes_on, fails, goes_on])
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


# ---- what goes wrong ----------------------------------------------------------------------------


def check_usable(model: Any) -> None:
    """Nothing is held, and the model computes what it should."""
    owner = model.offload._owner
    assert owner.lockstep is None and owner.depth == 0
    assert owner.stream.meeting is None
    assert not any(slot.users for slot in owner.stream._slots)
    work = requests("llama", [2, 3])
    want = [model.generate(**request) for request in work]
    got = model.offload.generate(work)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    threads = threading.Thread(target=lambda: model(**variants.inputs("llama")))
    threads.start()
    threads.join(60)
    assert not threads.is_alive()


@pytest.mark.parametrize("error", [ValueError("nonsense"), torch.OutOfMemoryError("too much")])
def test_one_that_fails_ends_all_and_is_named(model: Any, error: Exception) -> None:
    work = requests("llama", [9, 9, 9])
    work[1]["stopping_criteria"] = [_Stops(work[1]["input_ids"].shape[1] + 2, error)]
    ended = []

    def call(request: Request) -> None:
        try:
            model.generate(**request)
        finally:
            ended.append(request)

    expected = type(error) if isinstance(error, torch.OutOfMemoryError) else JobError
    with pytest.raises(expected, match=rf"call 1 of together\(\) failed.*{error}") as raised:
        model.offload.together([lambda r=r: call(r) for r in work])
    assert raised.value.__cause__ is error or raised.value.__cause__.__cause__ is error
    assert getattr(raised.value, "number", 1) == 1
    assert len(ended) == 3
    check_usable(model)
    batch = variants.inputs("llama", rows=5)
    with pytest.raises(expected, match=r"micro-batch 0 \(sequences 0 to 1\) failed"):
        model.offload.generate(
            batch, micro_batch_size=2, max_new_tokens=4, stopping_criteria=[_Stops(0, error)]
        )
    check_usable(model)


@pytest.mark.parametrize("stubborn", [False, True])
def test_ctrl_c_ends_all(model: Any, stubborn: bool) -> None:
    work = requests("llama", [9, 9, 9])
    work[1]["stopping_criteria"] = [_Stops(0, KeyboardInterrupt())]

    def call(request: Request) -> None:
        try:
            model.generate(**request)
        except BaseException:
            if stubborn:  # it tries again, where all is at an end
                model.generate(**request)
            raise

    with pytest.raises(KeyboardInterrupt):
        model.offload.together([lambda r=r: call(r) for r in work])
    check_usable(model)


def test_a_pass_that_cannot_begin_ends_all(variant_folder: Folder, tmp_path: Path) -> None:
    folder = variants.save("llama", tmp_path)
    with offload.run(folder, device_map="nvme", prefetch=1) as model:
        work = requests("llama", [6, 6])
        file = next(folder.glob("*.safetensors"))

        class Spoils(StoppingCriteria):
            def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                with open(file, "r+b") as opened:
                    opened.truncate(100)
                return torch.zeros(len(ids), dtype=torch.bool)

        work[0]["stopping_criteria"] = [Spoils()]
        with pytest.raises(offload.CheckpointError, match="changed or replaced"):
            model.offload.generate(work)
        owner = model.offload._owner
        assert owner.lockstep is None and not any(s.users for s in owner.stream._slots)


@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_one_that_closes_the_model_ends_the_others(variant_folder: Folder, engine: str) -> None:
    class Closes(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            model.offload.close()
            return torch.zeros(len(ids), dtype=torch.bool)

    with offload.run(variant_folder("llama"), device_map="cpu", engine=engine) as model:
        work = requests("llama", [4, 4, 4])
        work[1]["stopping_criteria"] = [Closes()]
        with pytest.raises(ClosedError, match="was closed and its weights are gone"):
            model.offload.generate(work)
        assert model.offload._owner.lockstep is None


def test_what_is_refused(model: Any) -> None:
    arguments = variants.inputs("llama")
    with pytest.raises(JobError, match=r"together\(\) within together\(\) of the same model"):
        model.offload.together([lambda: model.offload.together([lambda: None])])

    def in_a_greenlet() -> None:
        greenlet(lambda: model(**arguments)).switch()

    with pytest.raises(JobError, match="from a greenlet of its own"):
        model.offload.together([in_a_greenlet])

    def under_a_device() -> None:
        with torch.device("cpu"):
            model(**arguments)

    with pytest.raises(JobError, match="which would reach the other jobs"):
        model.offload.together([under_a_device])
    with torch.device("cpu"):  # around all of them it is theirs
        model.offload.together([lambda: model(**arguments)] * 2)
    hook = model.model.register_forward_pre_hook(lambda *_: model.offload.together([]))
    with pytest.raises(UnsupportedError, match="within a forward"):
        model(**arguments)
    hook.remove()
    check_usable(model)


@pytest.mark.parametrize("live", [None, 2])
def test_a_seed_gives_the_same_samples_again(model: Any, live: int | None) -> None:
    ids = torch.full((6, 5), 7)  # of one prompt

    def sampled(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.offload.generate(
            ids, micro_batch_size=2, live=live, do_sample=True, max_new_tokens=8
        )

    first = sampled(1)
    assert torch.equal(sampled(1), first)
    assert not torch.equal(sampled(2), first)
    assert len(first.unique(dim=0)) == 6, "micro-batches drew the same numbers"


@pytest.mark.parametrize(
    ("inputs", "options", "error", "text"),
    [
        (3, {}, TypeError, "inputs must be input ids"),
        ("ids", {}, TypeError, "inputs must be input ids"),
        ([[1, 2]], {}, TypeError, "request 0 must be a mapping"),
        ([{}], {"micro_batch_size": 2}, ValueError, "micro_batch_size=2 splits a batch"),
        ({}, {}, ValueError, "inputs are empty"),
        ({"input_ids": [[1]]}, {}, TypeError, r"inputs\['input_ids'\] must be a tensor"),
        (torch.ones(0, 3, dtype=torch.long), {}, ValueError, "no sequence"),
        (torch.ones(7), {}, ValueError, r"must be \[batch, tokens\], got \[7\]: one sequence is"),
        ({"input_ids": torch.tensor(7)}, {}, TypeError, r"first dimension, got shape \[\]"),
        (torch.ones(2, 0), {}, ValueError, r"input ids hold no token: their shape is \[2, 0\]"),
        ([{"input_ids": torch.ones(7)}], {}, ValueError, "input_ids of request 0 must be"),
        ([{"input_ids": [[1, 2]]}], {}, TypeError, "input_ids of request 0 must be a tensor"),
        (torch.ones(2, 3), {"micro_batch_size": 0}, ValueError, "micro_batch_size must be"),
        (torch.ones(2, 3), {"live": 0}, ValueError, "live must be a positive number"),
        (torch.ones(9, 3), {"streamer": object()}, ValueError, "streamer cannot be split"),
        (torch.ones(9, 3), {"past_key_values": object()}, ValueError, "past_key_values cannot"),
        (torch.ones(2, 3), {"input_ids": torch.ones(2, 3)}, TypeError, "input_ids is given in"),
        (
            {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(3, 3)},
            {},
            ValueError,
            "input_ids: 2, attention_mask: 3",
        ),
    ],
)
def test_arguments_are_checked(
    model: Any, inputs: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        model.offload.generate(inputs, **options)
    assert model.offload._owner.lockstep is None


def test_without_a_padding_token_lengths_must_not_differ(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    batch = variants.inputs("llama", rows=3)
    by_config = transformers.GenerationConfig(max_time=1e-9)
    for option in (
        {"stopping_criteria": [_Stops(3)]},
        {"max_time": 1e-9},
        {"stop_strings": ["x"], "tokenizer": object()},
        {"generation_config": by_config},
    ):
        with pytest.raises(ValueError, match="pass pad_token_id"):
            model.offload.generate(batch, micro_batch_size=1, **option)
    got = model.offload.generate(batch, micro_batch_size=1, max_new_tokens=2)
    assert got.shape == (3, batch["input_ids"].shape[1] + 2)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("pad", [0, 1])
def test_short_rows_are_padded_as_in_one_batch(model: Any, pad: int, beams: int) -> None:
    """Also where a whole micro-batch ends early, with beams, whose padding is another one."""
    batch = variants.inputs("llama", rows=7, length=9)
    options: Request = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    options |= {"eos_token_id": list(range(3, 131, 4)), "pad_token_id": pad}
    want = model.generate(**batch, **options)
    assert len({len(row) - int((row == row[-1]).sum()) for row in want}) > 1
    got = model.offload.generate(batch, micro_batch_size=1, **options)
    assert torch.equal(got, want)


def test_another_threads_pass_comes_after_all(model: Any) -> None:
    arguments = variants.inputs("llama", seed=5)
    with torch.no_grad():
        want = model(**arguments).logits
    found: list[torch.Tensor] = []

    def other() -> None:
        with torch.no_grad():
            found.append(model(**arguments).logits)

    thread = threading.Thread(target=other)

    def starts() -> torch.Tensor:
        thread.start()
        return model.generate(**requests("llama", [5])[0])

    calls = [starts, *[lambda r=r: model.generate(**r) for r in requests("llama", [4, 4])]]
    model.offload.together(calls)
    thread.join(60)
    assert not thread.is_alive() and torch.equal(found[0], want)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nested", [False, True], ids=["call", "lock step"])
def test_threads_that_call_each_others_model_do_not_wait_for_ever(
    variant_folder: Folder, nested: bool
) -> None:
    models = [offload.run(variant_folder("llama"), device="cpu") for _ in range(2)]
    ids = variants.inputs("llama")["input_ids"]
    both = threading.Barrier(2)
    failed: list[JobError] = []

    def run(own: Any, other: Any) -> None:
        def crosswise() -> None:
            both.wait()
            other.offload.together([lambda: other(ids)]) if nested else other(ids)

        try:
            own.offload.together([crosswise])
        except JobError as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in (models, models[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed and all("call each other's model" in str(error) for error in failed)
    for model, other in (models, models[::-1]):  # from one thread it is no circle
        model.offload.together([lambda other=other: other(ids)] * 2)
    for model in models:
        model.offload.close()


@pytest.mark.compat
def test_static_caches_are_not_shared(variant_folder: Folder) -> None:
    plain = comparison.plain_model(variant_folder("llama"))
    work = [
        r | {"cache_implementation": "static", "disable_compile": True}
        for r in requests("llama", [5, 5, 5])
    ]
    work = [r | variants.inputs("llama", rows=2, seed=i) for i, r in enumerate(work)]
    with offload.run(variant_folder("llama"), device_map="cpu") as model:
        got = model.offload.generate(work)
    for ids, request in zip(got, work, strict=True):
        assert torch.equal(ids, plain.generate(**request))
