"""The model on the fused engine is the transformers model: whatever is asked of it, and by whom."""

from __future__ import annotations

import copy
import gc
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
from transformers import DynamicCache, PreTrainedModel, StaticCache

import offload
from offload.errors import ClosedError, UnsupportedError
from offload.models.fused import decoder, prompt
from offload.models.kv.layer import KvLayer

Folder = Callable[[str], Path]
Pair = tuple[PreTrainedModel, PreTrainedModel]
PLACES: dict[str, Any] = {"mixed": {"": "nvme", "model.layers.1": 0}, "cpu": "cpu"}


@pytest.fixture(scope="module", params=PLACES)
def pair(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[Pair]:
    """The plain model and the one on the fused engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        folder = variant_folder("llama")
        place = PLACES[request.param]
        with offload.run(folder, device_map=place, prefetch=1, engine="fused") as model:
            yield comparison.plain_model(folder), model


def unserved(model: PreTrainedModel) -> dict[str, int]:
    return dict(model.offload.report().unserved)


def generate(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    torch.manual_seed(11)
    prompt = comparison.left_padded("llama")
    return model.generate(**{"max_new_tokens": 6, "do_sample": False, **prompt} | options)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal to float32's rounding of a few sums."""
    return got.shape == want.shape and comparison.spread(got, want) < 1e-5


OPTIONS: dict[str, dict[str, Any]] = {
    "sample": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beam sample": {"do_sample": True, "num_beams": 2, "top_p": 0.9},
    "several a prompt": {"do_sample": True, "num_return_sequences": 3},
    "several beams a prompt": {"num_beams": 4, "num_return_sequences": 2},
    "repetition": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "end token": {"eos_token_id": list(range(0, 131, 3)), "max_new_tokens": 12},
    "chunked prefill": {"prefill_chunk_size": 4},
    "past the limit": {"max_new_tokens": 60},
}


@pytest.mark.compat
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_generate(pair: Pair, options: dict[str, Any]) -> None:
    before = unserved(pair[1])
    assert torch.equal(generate(pair[1], **options), generate(pair[0], **options))
    assert unserved(pair[1]) == before


@pytest.mark.compat
def test_prompt_lookup_and_assistant(pair: Pair, variant_folder: Folder) -> None:
    """What crops the cache again and again."""
    ids = torch.tensor([[5, 9, 17, 5, 9, 17, 5, 9]])
    options: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 14,
        "eos_token_id": 2,
    }
    before = unserved(pair[1])
    want = generate(pair[0], prompt_lookup_num_tokens=3, **options)
    assert torch.equal(generate(pair[1], prompt_lookup_num_tokens=3, **options), want)
    folder = variant_folder("llama3-rope")
    want = generate(pair[0], assistant_model=comparison.plain_model(folder), **options)
    with offload.run(folder, device_map="cpu", engine="fused") as assistant:
        assert torch.equal(generate(pair[1], assistant_model=assistant, **options), want)
        assert unserved(assistant) == {}
    assert unserved(pair[1]) == before


@pytest.mark.compat
def test_a_cache_of_the_users_own_is_filled(pair: Pair) -> None:
    plain = pair[0]
    name = exactness.name_of_cache(plain)
    first, second = torch.tensor([[5, 9, 17]]), torch.tensor([[44, 3]])
    caches = [DynamicCache(config=plain.config), DynamicCache(config=plain.config)]
    for ours, (m, cache) in enumerate(zip(pair, caches, strict=True)):
        torch.manual_seed(0)
        out = m.generate(
            first, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, **{name: cache}
        )
        assert out[name] is cache and cache.get_seq_length() == 6
        with torch.no_grad():
            logits = m(second, **{name: cache}).logits
        assert cache.get_seq_length() == 8
        assert all(isinstance(x, KvLayer) == bool(ours) for x in cache.layers)
        if not ours:
            want = logits
    assert close(logits, want)
    for a, b in zip(caches[1], caches[0], strict=True):
        assert close(a[0], b[0]) and close(a[1], b[1])


def test_a_plain_cache_is_taken_over_in_the_middle(pair: Pair) -> None:
    plain, model = pair
    name = exactness.name_of_cache(plain)
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(torch.tensor([[5, 9, 17]]), **{name: cache})
        got = model(torch.tensor([[44]]), **{name: cache}).logits
        want = plain(torch.tensor([[5, 9, 17, 44]])).logits[:, -1:]
    assert close(got, want) and isinstance(cache.layers[0], KvLayer)


def causal(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)[None, None]


def holes() -> dict[str, Any]:
    arguments = variants.inputs("llama")
    arguments["attention_mask"][0, 3:5] = 0
    return arguments


UNSERVED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "hidden states": (
        lambda: {**variants.inputs("llama"), "output_hidden_states": True},
        "the argument output_hidden_states",
    ),
    "holes": (holes, "an attention mask with holes"),
    "four dimensions": (
        lambda: {
            "input_ids": variants.inputs("llama")["input_ids"],
            "attention_mask": causal(19, 19).expand(2, 1, 19, 19),
        },
        "an attention mask that is not two-dimensional",
    ),
}


@pytest.mark.compat
@pytest.mark.parametrize(("make", "reason"), UNSERVED.values(), ids=UNSERVED.keys())
def test_other_calls_are_those_of_transformers(
    pair: Pair, make: Callable[[], dict[str, Any]], reason: str
) -> None:
    plain, model = pair
    before = unserved(model).get(reason, 0)
    with torch.no_grad():
        got, want = model(**make()), plain(**make())
    assert torch.equal(got.logits, want.logits)
    if "hidden_states" in want:
        pairs = zip(got.hidden_states, want.hidden_states, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert unserved(model)[reason] == before + 1
    assert reason in str(model.offload.report())


def test_fewer_layers_by_the_config(pair: Pair) -> None:
    """As `assistant_early_exit` asks for them, over a cache with steps that were issued before."""
    ids = variants.inputs("llama")["input_ids"]
    found = []
    for model in pair:
        cache = DynamicCache()

        def steps(first: int, last: int, kept: Any = cache, model: Any = model) -> list[Any]:
            given = {exactness.name_of_cache(model): kept}
            return [model(ids[:, i : i + 1], **given).logits for i in range(first, last)]

        with torch.no_grad():
            logits = steps(0, 8)
            try:
                model.config.num_hidden_layers = 2
                logits += [*steps(8, 10, copy.deepcopy(cache)), model(ids, use_cache=False).logits]
            finally:
                model.config.num_hidden_layers = 3
            found.append(logits + steps(8, 10))
    assert all(comparison.spread(a, b) < 1e-5 for a, b in zip(*found, strict=True))
    assert unserved(pair[1])["2 of the model's layers"] == 3


def test_attentions_by_another_implementation(pair: Pair) -> None:
    plain, model = pair
    arguments = variants.inputs("llama")
    for m in pair:
        m.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            got = model(**arguments, output_attentions=True)
            want = plain(**arguments, output_attentions=True)
            assert torch.equal(model(**arguments).logits, plain(**arguments).logits)
    finally:
        for m in pair:
            m.set_attn_implementation("sdpa")
    assert all(torch.equal(a, b) for a, b in zip(got.attentions, want.attentions, strict=True))
    assert unserved(model)["the attention implementation 'eager'"] >= 1


def test_a_mask_that_is_another_in_the_middle(pair: Pair) -> None:
    """A step takes the padding for that of the step before, until it knows better."""
    name = exactness.name_of_cache(pair[0])
    ids = variants.inputs("llama")["input_ids"]
    masks = [torch.ones_like(ids[:, : 8 + i]) for i in range(6)]
    masks[2][1, :3] = masks[3][1, :3] = 0  # the padding comes, and stays
    masks[4][0, 4:6] = 0  # a hole, which transformers' modules serve
    found = []
    before = unserved(pair[1]).get("an attention mask with holes", 0)
    for model in pair:
        cache, logits = None, []
        with torch.no_grad():
            for i, mask in enumerate(masks):
                new = ids[:, :8] if i == 0 else ids[:, 7 + i : 8 + i]
                positions = torch.arange(mask.shape[1])[None, -new.shape[1] :]
                out = model(new, attention_mask=mask, position_ids=positions, **{name: cache})
                cache = out[name]
                logits.append(out.logits[:, -1])
        found.append(torch.stack(logits))
    assert close(*found)
    assert unserved(pair[1])["an attention mask with holes"] == before + 1


def test_hooks_are_called(pair: Pair) -> None:
    plain, model = pair
    arguments = variants.inputs("llama")
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        model(**arguments, output_hidden_states=True)  # leaves transformers' own hooks behind
        before = unserved(model)
        model(**arguments)
        assert unserved(model) == before
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *a: seen.append(a[2]))
        got = model(**arguments).logits
        handle.remove()
        assert len(seen) == 1 and torch.equal(got, plain(**arguments).logits)
        after = unserved(model)
        assert after["a hook on a module of a layer"] == 1
        handle = model.model.norm.register_forward_hook(lambda *a: seen.append(a[2]))
        model(**arguments)
        handle.remove()
        assert len(seen) == 2 and unserved(model) == after


def test_both_engines_take_turns_on_one_cache(pair: Pair) -> None:
    """Every second call asks for hidden states, which only transformers' modules have."""
    plain, model = pair
    name = exactness.name_of_cache(plain)
    ids = variants.inputs("llama")["input_ids"]
    with torch.no_grad():
        want = plain(ids[:, :12]).logits
        cache, got = None, []
        for i, (first, last) in enumerate(((0, 4), (4, 7), (7, 8), (8, 9), (9, 10), (10, 12))):
            out = model(ids[:, first:last], output_hidden_states=i % 2 == 0, **{name: cache})
            cache = out[name]
            got.append(out.logits)
    assert close(torch.cat(got, 1), want)


def test_a_mask_with_a_hole_follows_a_prompt_padded_on_the_right(pair: Pair) -> None:
    """generate on such a prompt: the first call is served, later ones see a hole."""
    prompt = exactness.right_padded("llama")
    assert torch.equal(generate(pair[1], **prompt), generate(pair[0], **prompt))


def test_static_cache(pair: Pair) -> None:
    assert torch.equal(
        generate(pair[1], cache_implementation="static"),
        generate(pair[0], cache_implementation="static"),
    )
    kind = StaticCache.__name__
    assert any(f"a cache of the kind {kind}" in reason for reason in unserved(pair[1]))


def test_embeddings_instead_of_ids_are_left_as_they_are(pair: Pair) -> None:
    plain, model = pair
    arguments = variants.inputs("llama")
    embeddings = plain.model.embed_tokens(arguments.pop("input_ids")).detach()
    before = embeddings.clone()
    with torch.no_grad():
        got = model(inputs_embeds=embeddings, **arguments).logits
        want = plain(inputs_embeds=embeddings, **arguments).logits
    assert close(got, want) and torch.equal(embeddings, before)
    with pytest.raises(UnsupportedError, match="gradients"):
        model(inputs_embeds=embeddings.requires_grad_())


def test_tuple_output_losses_and_inference_mode(pair: Pair) -> None:
    arguments = variants.inputs("llama")
    labels = arguments["input_ids"]
    with torch.no_grad():
        want = pair[0](**arguments, labels=labels, return_dict=False)
    with torch.inference_mode():
        got = pair[1](**arguments, labels=labels, return_dict=False)
        inner = pair[1].model(**arguments, return_dict=False)
    assert isinstance(inner, tuple) and len(got) == len(want)
    assert close(got[0], want[0]) and close(got[1], want[1])
    assert torch.equal(generate(pair[1]), generate(pair[0]))  # on buffers made in that mode


def test_several_threads(pair: Pair) -> None:
    prompts = [torch.tensor([[5 + i, 9, 17 + i]]) for i in range(4)]
    want = [generate(pair[0], input_ids=p, attention_mask=torch.ones_like(p)) for p in prompts]
    got: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        mask = torch.ones_like(prompts[i])
        got[i] = generate(pair[1], input_ids=prompts[i], attention_mask=mask)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], w) for i, w in enumerate(want))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_pass_that_breaks_off_leaves_the_cache_as_it_was(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    plain, model = pair
    name = exactness.name_of_cache(plain)
    ids = variants.inputs("llama")["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :7])[name]
        calls = []

        def broken(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        target = prompt if tokens > 1 else decoder.DecodeSession
        what = "run_block" if tokens > 1 else "launch"
        real = getattr(target, what)
        with monkeypatch.context() as patch:
            patch.setattr(target, what, broken)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 7 : 7 + tokens], **{name: cache})
        assert cache.get_seq_length() == 7
        got = model(ids[:, 7 : 7 + tokens], **{name: cache}).logits
        want = plain(ids[:, : 7 + tokens]).logits[:, 7:]
    assert close(got, want)


def test_pipeline(pair: Pair, chat_model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_model)
    plain, model = (
        transformers.pipeline("text-generation", model=m, tokenizer=tokenizer) for m in pair
    )
    options = {"max_new_tokens": 6, "do_sample": False, "batch_size": 2}
    texts = ["w5 w9 w20", "w44"]
    assert model(texts, **options) == plain(texts, **options)


def test_embedding_and_head_may_stream_too(variant_folder: Folder) -> None:
    folder = variant_folder("llama-tied")
    place = {"": "nvme", "model.embed_tokens": "nvme", "model.norm": "cpu"}
    with offload.run(folder, device_map=place, engine="fused") as model:
        assert torch.equal(generate(model), generate(comparison.plain_model(folder)))
        assert unserved(model) == {}


def test_weights_of_the_users_own(variant_folder: Folder) -> None:
    folder = variant_folder("llama")
    place = {"": "nvme", "model.layers.1": 0}
    new = torch.nn.Parameter(torch.zeros(32, 48))
    with offload.run(folder, device_map=place, engine="fused") as model:
        plain = comparison.plain_model(folder)
        for m in (model, plain):
            m.model.layers[1].mlp.down_proj.weight = new
        assert torch.equal(generate(model), generate(plain))
        assert unserved(model)["a weight that was replaced"] == 6
        # In place is in place: the fused weight is the same memory.
    with offload.run(folder, device_map=place, engine="fused") as model:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.zero_()
            plain = comparison.plain_model(folder)
            plain.model.layers[1].mlp.up_proj.weight.zero_()
        assert torch.equal(generate(model), generate(plain)) and unserved(model) == {}
        model.model.layers[0].mlp.down_proj.weight = new
        with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.down_proj\.weight"):
            generate(model)


def test_token_types_matter(variant_folder: Folder) -> None:
    folder = variant_folder("gpt2")
    arguments = variants.inputs("gpt2")
    arguments["token_type_ids"] = torch.ones_like(arguments["input_ids"])
    plain = comparison.plain_model(folder)
    with offload.run(folder, device_map="cpu", engine="fused") as model, torch.no_grad():
        assert torch.equal(model(**arguments).logits, plain(**arguments).logits)
        assert unserved(model) == {"the argument token_type_ids": 1}


@pytest.mark.parametrize("name", ["falcon-40b-like", "qwen2-swa", "bloom", "gptj", "opt"])
def test_transformers_modules_run_on_the_same_slots_and_cache(
    variant_folder: Folder, name: str
) -> None:
    folder = variant_folder(name)
    plain = comparison.plain_model(folder)
    cache_name = exactness.name_of_cache(plain)
    ids = variants.inputs(name)["input_ids"]
    with offload.run(folder, device_map="nvme", engine="fused") as model, torch.no_grad():
        want = plain(ids, output_hidden_states=True)
        got = model(ids, output_hidden_states=True)
        pairs = zip(got.hidden_states, want.hidden_states, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        cache = model(ids[:, :9])[cache_name]
        rest = model(ids[:, 9:], output_hidden_states=True, **{cache_name: cache})
        last = model(ids[:, :1], **{cache_name: rest[cache_name]}).logits
        again = plain(torch.cat([ids, ids[:, :1]], 1)).logits
    assert close(rest.logits, want.logits[:, 9:]) and close(last, again[:, -1:])


def test_which_engine_and_why(variant_folder: Folder) -> None:
    with offload.run(variant_folder("llama"), device="cpu") as model:
        report = model.offload.report()
        assert report.engine == "transformers" and "CPU" in report.engine_reason
    with offload.run(variant_folder("llama"), device="cpu", engine="fused") as model:
        report = model.offload.report()
        assert report.engine == "fused" and "reference" in report.engine_reason
        assert report.as_dict()["unserved"] == {} and "engine fused" in str(report)
    with pytest.raises(UnsupportedError, match="the family 'mixtral'"):
        offload.run(variant_folder("mixtral"), device="cpu", engine="fused")
    with pytest.raises(UnsupportedError, match=r"torch\.float64"):
        offload.run(variant_folder("llama"), device="cpu", dtype="float64", engine="fused")
    with pytest.raises(ValueError, match="engine"):
        offload.run(variant_folder("llama"), engine="deepspeed")


def test_close_lets_go_of_the_slots(variant_folder: Folder) -> None:
    """Also where the user still holds a cache, whose calls point into them."""
    model = offload.run(variant_folder("llama"), device_map="nvme", engine="fused")
    ids = torch.tensor([[5, 9, 17]])
    with torch.no_grad():
        cache = model(ids)[exactness.name_of_cache(model)]
        model(ids[:, :1], **{exactness.name_of_cache(model): cache})
    slots = [weakref.ref(slot.untyped_storage()) for slot in model.offload._store.slots]
    pointers = [slot.data_ptr() for slot in model.offload._store.slots]
    assert pointers and slots
    model.offload.close()
    session = cache.layers[0].common.session
    assert session is not None and not any(each._made for each in session.micro_batches)
    gc.collect()
    with pytest.raises(ClosedError):
        model(ids)


def test_shape_of_smollm2(tmp_path: Path) -> None:
    """Real head sizes and an odd group of heads, in both dtypes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.randint(3, 300, (2, 40))
    with torch.no_grad():
        exact = comparison.plain_model(tmp_path, dtype=torch.float64)(ids).logits
        for dtype in (torch.float32, torch.bfloat16):
            want = comparison.plain_model(tmp_path, dtype=dtype)(ids).logits
            with offload.run(tmp_path, dtype=dtype, device_map="nvme", engine="fused") as model:
                cache_name = exactness.name_of_cache(model)
                first = model(ids[:, :-1])
                last = model(ids[:, -1:], **{cache_name: first[cache_name]})
                got = torch.cat([first.logits, last.logits], 1)
            error, own = comparison.spread(got, exact), comparison.spread(want, exact)
            assert error <= 2 * own
