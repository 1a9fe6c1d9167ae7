"""A decode step is begun before its arguments are checked: nothing of that may ever show.

Where there is a GPU all of it runs there, since only there are graphs replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import comparison
import exactness
import pytest
import torch
import variants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

import offload
from offload.models.fused.decoder import FusedEngine
from offload.models.kv.cache import common_of

Folder = Callable[[str], Path]
Pair = tuple[PreTrainedModel, PreTrainedModel]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = 1e-5 if DEVICE == "cpu" else 1e-4  # float32's rounding of a few sums, in another order
Change = Callable[[PreTrainedModel], AbstractContextManager[Any]]
PLACES: dict[str, Any] = {
    "resident": {"": 0},
    "resident first": {"": 0, "model.layers.1": "nvme"},
    "streamed first": {"": 0, "model.layers.0": "nvme"},
}


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and comparison.spread(got, want) < SLACK


def tokens() -> torch.Tensor:
    return variants.inputs("llama")["input_ids"].to(DEVICE)


def engine_of(model: PreTrainedModel) -> FusedEngine:
    return model.offload._engine


@contextmanager
def offloaded(folder: Path, place: str) -> Iterator[PreTrainedModel]:
    with offload.run(folder, device=DEVICE, device_map=PLACES[place], engine="fused") as model:
        yield model


@pytest.fixture(scope="module", params=PLACES)
def pair(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[Pair]:
    folder = variant_folder("llama")
    with offloaded(folder, request.param) as model:
        yield comparison.plain_model(folder, DEVICE), model


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every call that an engine serves, whether it was begun early."""
    found: list[bool] = []
    start = FusedEngine._start

    def spy(self: FusedEngine, given: Any) -> Any:
        step = start(self, given)
        found.append(step is not None)
        return step

    monkeypatch.setattr(FusedEngine, "_start", spy)
    return found


@contextmanager
def swapped(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute, also of a module's parameters, buffers or modules, that is another for now."""
    there = name in vars(holder)
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if there or name not in vars(holder):
            setattr(holder, name, before)
        else:
            delattr(holder, name)


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, out: out * 1.5)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def globally_hooked(kind: type[nn.Module]) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if type(module) is kind else None
    )
    try:
        yield
    finally:
        handle.remove()


class Scaled(nn.Module):
    """Another module in the place of one, as an adapter is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inner(*args) * 1.5


def other(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().flip(0) * 1.5)


@contextmanager
def other_data(parameter: nn.Parameter) -> Iterator[None]:
    before = parameter.data
    parameter.data = other(parameter).data
    try:
        yield
    finally:
        parameter.data = before


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def patched_forward(module: nn.Module) -> AbstractContextManager[None]:
    before = module.forward
    return swapped(module, "forward", lambda *args: before(*args) * 1.5)


@contextmanager
def other_angles(model: PreTrainedModel) -> Iterator[None]:
    """Of the class, so that no module is another."""
    kind = type(model.model.rotary_emb)
    before = kind.forward
    kind.forward = lambda self, x, position_ids: before(self, x, 3 * position_ids)
    try:
        yield
    finally:
        kind.forward = before


@contextmanager
def another_layer(model: PreTrainedModel) -> Iterator[None]:
    """Two layers change places."""
    layers = model.model.layers
    first, last = layers[0], layers[2]
    layers[0], layers[2] = last, first
    for i, layer in ((0, last), (2, first)):
        layer.self_attn.layer_idx = i
    try:
        yield
    finally:
        layers[0], layers[2] = first, last
        for i, layer in ((0, first), (2, last)):
            layer.self_attn.layer_idx = i


LAYER = "model.layers.{}"
IN_MODEL: dict[str, Change] = {
    "embedding's weight": lambda m: swapped(
        m.model.embed_tokens, "weight", other(m.model.embed_tokens.weight)
    ),
    "embedding's data": lambda m: other_data(m.model.embed_tokens.weight),
    "embedding": lambda m: swapped(m.model, "embed_tokens", Scaled(m.model.embed_tokens)),
    "embedding's hook": lambda m: hooked(m.model.embed_tokens),
    "embedding's forward": lambda m: patched_forward(m.model.embed_tokens),
    "angles' scale": lambda m: swapped(m.model.rotary_emb, "attention_scaling", 1.5),
    "angles' buffer": lambda m: swapped(
        m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 1.5
    ),
    "angles' class": other_angles,
    "norm's weight": lambda m: swapped(m.model.norm, "weight", other(m.model.norm.weight)),
    "norm": lambda m: swapped(m.model, "norm", Scaled(m.model.norm)),
    "norm's hook": lambda m: hooked(m.model.norm),
    "norm's forward": lambda m: patched_forward(m.model.norm),
    "layer's module": lambda m: swapped(m.model.layers[1], "mlp", Scaled(m.model.layers[1].mlp)),
    "layer's hook": lambda m: hooked(m.model.layers[0].mlp),
    "layer's forward": lambda m: patched_forward(m.model.layers[1].mlp),
    "hook on any module": lambda m: globally_hooked(type(m.model.layers[0].mlp)),
    "order of layers": another_layer,
    "hidden states": lambda m: swapped(m.config, "output_hidden_states", True),
    "attention": eager,
    "training": lambda m: swapped(m.model, "training", True),
    "autocast": lambda m: torch.autocast(DEVICE, dtype=torch.bfloat16),
}
RESIDENT: dict[str, Change] = {
    "layer's weight": lambda m: swapped(
        m.model.layers[2].mlp.down_proj, "weight", other(m.model.layers[2].mlp.down_proj.weight)
    ),
}
AHEAD = ("embedding", "angles", "hook on any")
# What transformers' modules do, and what is done with their own weights still.
LEFT_ALONE = {
    *("layer's module", "layer's hook", "layer's forward", "hook on any module"),
    *("order of layers", "hidden states", "attention", "training", "autocast", "layer's weight"),
}


@pytest.mark.parametrize("what", [*IN_MODEL, *RESIDENT])
def test_what_changes_in_a_model_between_two_steps(
    pair: Pair, begun: list[bool], what: str
) -> None:
    change = (IN_MODEL | RESIDENT)[what]
    name = exactness.name_of_cache(pair[0])
    ids = tokens()
    logits = []
    for model in pair:
        engine = engine_of(model) if hasattr(model, "offload") else None
        cache, found = None, []

        def step(first: int, last: int) -> None:
            nonlocal cache
            mask = torch.ones(2, last, dtype=torch.long, device=DEVICE)
            out = model(ids[:, first:last], attention_mask=mask, **{name: cache})  # noqa: B023
            cache = out[name]
            found.append(out.logits[:, -1].float())  # noqa: B023

        with torch.no_grad():
            step(0, 7)
            for i in range(7, 10):
                step(i, i + 1)
            before = sum(engine.unserved.values()) if engine else 0
            ahead = engine._ahead if engine else None
            with change(model):
                for i in range(10, 13):
                    step(i, i + 1)
                if engine and what.startswith(AHEAD):
                    assert engine._ahead is not ahead  # and graphs of it are forgotten
            if engine:
                count = sum(engine.unserved.values()) - before
                assert count == (3 if what in LEFT_ALONE else 0), engine.unserved
            for i in range(13, 16):
                step(i, i + 1)
        logits.append(torch.stack(found))
    slack = 3e-2 if what == "autocast" else SLACK  # its products round otherwise from row to row
    assert comparison.spread(*logits) < slack
    assert begun[3] and begun[-1]


def test_a_hook_ahead_of_the_layers_is_called_once_a_step(pair: Pair) -> None:
    model = pair[1]
    name = exactness.name_of_cache(model)
    seen: list[int] = []
    with torch.no_grad():
        cache = model(torch.tensor([[5, 9, 17]], device=DEVICE))[name]
        for i in range(6):
            if i == 3:
                handle = model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))
            model(torch.tensor([[i + 5]], device=DEVICE), **{name: cache})
    handle.remove()
    assert seen == [1, 1, 1]


def test_a_step_that_is_refused_writes_nothing_that_counts(pair: Pair, begun: list[bool]) -> None:
    """Also where other buffers stand in the cache than those that its calls were made for."""
    plain, model = pair
    name = exactness.name_of_cache(plain)
    ids = tokens()[:1]
    with torch.no_grad():
        cache = model(ids[:, :6])[name]
        for i in range(6, 9):
            model(ids[:, i : i + 1], **{name: cache})
        buffers = [(x.key_buffer.clone(), x.value_buffer.clone()) for x in cache.layers]
        model(ids[:, 9:10], output_hidden_states=True, **{name: cache})
        assert begun[-1] and cache.get_seq_length() == 10
        for layer, (keys, values) in zip(cache.layers, buffers, strict=True):
            assert torch.equal(layer.keys[:, :, :9], keys[:, :, :9])
            assert torch.equal(layer.values[:, :, :9], values[:, :, :9])
        layer = cache.layers[1]
        old = layer.key_buffer
        layer.key_buffer = old.clone()
        old.fill_(float("nan"))
        got = model(ids[:, 10:11], **{name: cache}).logits
        assert not begun[-1] and old.isnan().all()
        assert close(got, plain(ids[:, :11]).logits[:, -1:])


def test_a_copy_of_a_cache_goes_its_own_way(pair: Pair) -> None:
    plain, model = pair
    name = exactness.name_of_cache(plain)
    ids = tokens()
    with torch.no_grad():
        cache = model(ids[:, :6])[name]
        for i in range(6, 9):
            model(ids[:, i : i + 1], **{name: cache})
        twin = copy.deepcopy(cache)
        assert common_of(twin) is not common_of(cache)
        for own, i in ((cache, 9), (twin, 10), (cache, 11)):
            before = own.get_seq_length()
            got = model(ids[:, i : i + 1], **{name: own}).logits
            whole = ids[:, [*[*range(9), 9, 11][:before], i]]
            assert close(got, plain(whole).logits[:, -1:])


def test_a_cache_is_kept_in_a_file(pair: Pair, tmp_path: Path) -> None:
    plain, model = pair
    ids, name = tokens(), exactness.name_of_cache(plain)
    with torch.no_grad():
        cache = model(ids[:, :6])[name]
        model(ids[:, 6:7], **{name: cache})
        torch.save(cache, tmp_path / "cache")
        model(ids[:, :1], **{name: cache})  # which goes on as it was
        again = torch.load(tmp_path / "cache", weights_only=False)
        for i in (7, 8):
            got = model(ids[:, i : i + 1], **{name: again}).logits
            assert close(got, plain(ids[:, : i + 1]).logits[:, -1:])


def test_a_cache_of_another_dtype_is_gone_on_with_as_in_the_plain_model(
    pair: Pair, variant_folder: Folder
) -> None:
    """The first tokens under another dtype, by whatever model or autocast, the next ones not."""
    half = comparison.plain_model(variant_folder("llama"), DEVICE, dtype=torch.float16)
    ids, name, said = tokens(), exactness.name_of_cache(half), []
    with torch.no_grad():
        for model in pair:
            cache = half(ids[:, :5])[name]
            turns = [model(ids[:, i : i + 1], **{name: cache}).logits for i in (5, 6, 7)]
            said.append(torch.cat(turns, 1))
    assert close(*said)
    engine_of(pair[1]).unserved.clear()


def test_steps_in_inference_mode_and_outside(pair: Pair) -> None:
    plain, model = pair
    ids, name, cache = tokens(), exactness.name_of_cache(plain), None
    for i, inference in enumerate((False, True, False, True, False)):
        with torch.inference_mode(inference), torch.no_grad():
            out = model(ids[:, i : i + 1], **{name: cache})
            assert close(out.logits, plain(ids[:, : i + 1]).logits[:, -1:])
        cache = out[name]


# A history: (what, number). Rows are two, one of which may begin with padding.
TURNS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("token", "token", "token", "no mask", "positions", "odd positions", "int32"),
                *("tokens", "embeddings", "hidden states", "crop", "reorder", "other cache"),
                *("embedding", "norm", "select"),
            ]
        ),
        st.integers(0, 5),
    ),
    min_size=4,
    max_size=16,
)


HISTORIES = ("llama", "gpt2", "opt", "bloom", "gptj")


def test_a_cache_goes_from_model_to_model(pair: Pair, tmp_path: Path, begun: list[bool]) -> None:
    """The calls that were made for it read the weights of one of them."""
    plain, model = pair
    folder = variants.save("llama", tmp_path, seed=9)
    ids, name = tokens(), exactness.name_of_cache(plain)
    with offloaded(folder, "resident first") as other, torch.no_grad():
        said = []
        for first, second in ((model, other), (plain, comparison.plain_model(folder, DEVICE))):
            cache = first(ids[:, :5])[name]
            turns = [first, first, second, second, second, first, first]
            found = [m(ids[:, i : i + 1], **{name: cache}).logits for i, m in enumerate(turns, 5)]
            said.append(torch.cat(found, 1))
        assert close(*said)
    assert any(begun)


class History:
    """What one model said in a history, turn by turn."""

    def __init__(self, model: PreTrainedModel, padding: int) -> None:
        self._model, self._name = model, exactness.name_of_cache(model)
        self._vocabulary = model.config.vocab_size
        self._generator = torch.Generator().manual_seed(3)
        self._caches: list[Any] = [None, None]
        self._masks = [torch.ones(2, 0, dtype=torch.long, device=DEVICE) for _ in range(2)]
        self._padding = padding
        self._now = 0
        self.said: list[torch.Tensor] = []
        for cache in range(2):
            self._now = cache
            self._ask(6)

    def _ask(self, count: int, **options: Any) -> None:
        mask = self._masks[self._now]
        rows = mask.shape[0]
        ids = torch.randint(3, self._vocabulary, (rows, count), generator=self._generator).to(
            DEVICE
        )
        new = torch.ones(rows, count, dtype=torch.long, device=DEVICE)
        if mask.shape[1] == 0:
            new[1, : self._padding] = 0
        mask = self._masks[self._now] = torch.cat([mask, new], 1)
        counted = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
        asked: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": counted}
        if "embeddings" in options:
            asked["inputs_embeds"] = self._model.get_input_embeddings()(asked.pop("input_ids"))
            del options["embeddings"]
        if "int32" in options:
            asked["input_ids"] = ids.int()
            del options["int32"]
        asked |= options
        out = self._model(**asked, **{self._name: self._caches[self._now]})
        self._caches[self._now] = out[self._name]
        self.said.append(out.logits[:, -1])

    def turn(self, what: str, number: int) -> None:
        cache, mask = self._caches[self._now], self._masks[self._now]
        rows = mask.shape[0]
        if what == "no mask" and mask.all():
            self._ask(1, attention_mask=None, position_ids=None)
        elif what == "positions":
            self._ask(1, position_ids=torch.full((rows, 1), mask.shape[1], device=DEVICE))
        elif what == "odd positions":
            self._ask(1, position_ids=torch.tensor([[number]], device=DEVICE))
        elif what == "tokens":
            self._ask(2 + number % 3)
        elif what == "hidden states":
            self._ask(1, output_hidden_states=True)
        elif what in ("embeddings", "int32"):
            self._ask(1, **{what: True})
        elif what == "crop":
            cut = min(number + 1, mask.shape[1] - 5)
            if cut > 0:
                cache.crop(-cut)
                self._masks[self._now] = mask[:, :-cut]
        elif what in ("reorder", "select"):
            order = torch.tensor([1, 0][:rows] if number % 2 else [rows - 1] * rows, device=DEVICE)
            order = order.clamp(max=rows - 1)
            if what == "select" and number == 5:
                order = order[:1]
            if order.numel() == rows:
                cache.reorder_cache(order)
            else:
                cache.batch_select_indices(order)
            self._masks[self._now] = mask[order]
        elif what == "other cache":
            self._now = 1 - self._now
        elif what == "embedding":
            weight = self._model.get_input_embeddings().weight
            self._model.get_input_embeddings().weight = nn.Parameter(weight.detach().roll(1, 0))
        elif what == "norm":
            decoder = self._model.get_decoder() if hasattr(self._model, "get_decoder") else None
            norm = getattr(decoder, "norm", None) or getattr(decoder, "final_layer_norm", None)
            if norm is not None:
                norm.weight = nn.Parameter(norm.weight.detach().roll(1, 0))
        else:
            self._ask(1)


@pytest.fixture(scope="module", params=HISTORIES)
def resident(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[Pair]:
    folder = variant_folder(request.param)
    with offload.run(folder, device=DEVICE, engine="fused") as model:
        yield comparison.plain_model(folder, DEVICE), model


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, padding=st.sampled_from([0, 0, 2]))
def test_any_history(resident: Pair, turns: list[tuple[str, int]], padding: int) -> None:
    with torch.no_grad():
        found = [History(model, padding) for model in resident]
        for turn in turns:
            for history in found:
                history.turn(*turn)
    for got, want in zip(*(history.said for history in found), strict=True):
        assert close(got, want)


BY_LENGTH = ("llama-dynamic-rope", "phi3-longrope")


@pytest.mark.parametrize("name", exactness.FUSED)
def test_which_steps_are_begun_early(variant_folder: Folder, begun: list[bool], name: str) -> None:
    """All but the first of a cache, where what is ahead of the layers may be repeated."""
    ids = variants.inputs(name)["input_ids"].to(DEVICE)
    with offload.run(variant_folder(name), device=DEVICE, engine="fused") as model:
        cache_name = exactness.name_of_cache(model)
        with torch.no_grad():
            cache = model(ids[:, :5])[cache_name]
            for i in range(5, 9):
                positions = torch.tensor([[i]], device=DEVICE)
                model(ids[:, i : i + 1], position_ids=positions, **{cache_name: cache})
    early = name not in BY_LENGTH
    assert begun[:2] == [False, False] and begun[3:] == [early, early]
    assert begun[2] == (early and DEVICE == "cpu")  # on a GPU this one is captured
