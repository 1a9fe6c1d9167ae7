"""Everything that transformers' generate offers gives what it gives on the plain model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import exactness
import pytest
import torch
import transformers
import variants
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import offload

Folder = Callable[[str], Path]
Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module", params=["cpu", "nvme"])
def pair(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[Pair]:
    """The plain model and the offloaded one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        folder = variant_folder("llama")
        with offload.run(folder, device_map=request.param, prefetch=1) as model:
            yield comparison.plain_model(folder), model


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Every id of the variants is a character of its own."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE

    characters = [chr(32 + i if i < 95 else 256 + i) for i in range(variants.VOCABULARY)]
    raw = Tokenizer(BPE({c: i for i, c in enumerate(characters)}, merges=[]))
    raw.decoder = Fuse()
    pad, start, end = characters[:3]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=pad, bos_token=start, eos_token=end, padding_side="left"
    )


def generate(model: PreTrainedModel, seed: int = 11, **options: Any) -> Any:
    torch.manual_seed(seed)
    arguments: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        **comparison.left_padded("llama"),
    }
    return model.generate(**arguments | options)


def flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in flatten(v)]
    return []


def check_equal(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    for key in want:
        if key in ("past_key_values", "cache"):
            continue
        a, b = flatten(got[key]), flatten(want[key])
        assert len(a) == len(b) > 0, key
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), key


class Ban(LogitsProcessor):
    """Forbids even tokens."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sample": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beam sample": {"do_sample": True, "num_beams": 2, "top_p": 0.9},
    "several a prompt": {"do_sample": True, "num_return_sequences": 3},
    "several beams a prompt": {"num_beams": 4, "num_return_sequences": 2},
    "repetition": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "forbidden words": {"bad_words_ids": [[5], [7, 9]]},
    "own processor": {"logits_processor": LogitsProcessorList([Ban()])},
    "end token": {"eos_token_id": list(range(0, 131, 3)), "max_new_tokens": 12},
    "all outputs": {
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": True,
    },
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 4},
    "past the limit": {"max_new_tokens": 30},
}


@pytest.mark.compat
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_option(pair: Pair, options: dict[str, Any]) -> None:
    plain, model = pair
    if "output_attentions" in options:
        plain.set_attn_implementation("eager")
        model.set_attn_implementation("eager")
    try:
        check_equal(generate(model, **options), generate(plain, **options))
    finally:
        if "output_attentions" in options:
            plain.set_attn_implementation("sdpa")
            model.set_attn_implementation("sdpa")


@pytest.mark.compat
def test_prompt_lookup(pair: Pair) -> None:
    options = {
        "input_ids": torch.tensor([[5, 9, 17, 5, 9, 17, 5, 9]]),
        "attention_mask": torch.ones(1, 8, dtype=torch.int64),
        "prompt_lookup_num_tokens": 3,
        "eos_token_id": 2,
        "max_new_tokens": 12,
    }
    check_equal(generate(pair[1], **options), generate(pair[0], **options))


@pytest.mark.compat
@pytest.mark.parametrize("offloaded", ["assistant", "main", "both"])
def test_assisted(pair: Pair, variant_folder: Folder, offloaded: str) -> None:
    """Main model and assistant, each on its own stream."""
    plain, model = pair
    folder = variant_folder("llama3-rope")  # another model of the same vocabulary
    options = {
        "input_ids": torch.tensor([[5, 9, 17, 44, 3]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.int64),
        "max_new_tokens": 12,
    }
    small = comparison.plain_model(folder)
    want = generate(plain, assistant_model=small, **options)
    with offload.run(folder, device_map="nvme") as assistant:
        main = plain if offloaded == "assistant" else model
        other = small if offloaded == "main" else assistant
        check_equal(generate(main, assistant_model=other, **options), want)


@pytest.mark.compat
def test_stop_strings(pair: Pair, tokenizer: Any) -> None:
    ids = {"input_ids": torch.tensor([[5, 9, 17]]), "attention_mask": torch.ones(1, 3).long()}
    free = generate(pair[0], **ids, max_new_tokens=10).sequences[0]
    stop = tokenizer.decode(free[7])
    options = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": 10, **ids}
    want = generate(pair[0], **options)
    assert want.sequences.shape[1] < 13
    check_equal(generate(pair[1], **options), want)


@pytest.mark.compat
def test_streamers(pair: Pair, tokenizer: Any) -> None:
    ids = {"input_ids": torch.tensor([[5, 9, 17]]), "attention_mask": torch.ones(1, 3).long()}
    want = tokenizer.decode(generate(pair[0], **ids).sequences[0, 3:])
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=pair[1].generate,
        kwargs={**ids, "streamer": streamer, "max_new_tokens": 6, "do_sample": False},
    )
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert "".join(pieces) == want and len(want) == 6


@pytest.mark.compat
def test_pipeline(pair: Pair, tokenizer: Any) -> None:
    texts = ["offload", "stream"]
    options = {"max_new_tokens": 6, "do_sample": False, "batch_size": 2}
    plain, model = (
        transformers.pipeline("text-generation", model=m, tokenizer=tokenizer) for m in pair
    )
    assert model.model is pair[1]
    assert model(texts, **options) == plain(texts, **options)


@pytest.mark.compat
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen2-swa"])
def test_sliding_window(variant_folder: Folder, name: str) -> None:
    """A short prompt that grows to three times the window of 8."""
    folder = variant_folder(name)
    ids = {"input_ids": torch.tensor([[5, 9, 17]]), "attention_mask": torch.ones(1, 3).long()}
    want = generate(comparison.plain_model(folder), **ids, max_new_tokens=22)
    with offload.run(folder, device_map="nvme") as model:
        check_equal(generate(model, **ids, max_new_tokens=22), want)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "falcon-rw-alibi", "bloom"])
def test_row_alone_and_in_a_padded_batch(variant_folder: Folder, name: str) -> None:
    with offload.run(variant_folder(name), device_map="nvme") as model:
        padded = comparison.left_padded(name)
        both = generate(model, **padded).sequences[1, -6:]
        alone = {k: v[1:, 5:] for k, v in padded.items()}
        assert torch.equal(generate(model, **alone).sequences[0, -6:], both)


def test_pad_token_that_is_the_end_token(pair: Pair) -> None:
    """Without a mask transformers guesses one, with a warning; so it does here."""
    options = {
        "input_ids": torch.tensor([[2, 2, 5, 9, 17]]),
        "attention_mask": None,
        "pad_token_id": 2,
        "eos_token_id": 2,
    }
    check_equal(generate(pair[1], **options), generate(pair[0], **options))


def test_cache_continues_between_calls(pair: Pair) -> None:
    """A prompt in three calls over one cache, as a chat does it."""
    results = []
    for model in pair:
        cache = transformers.DynamicCache(config=model.config)
        name = exactness.name_of_cache(model)
        logits = []
        with torch.no_grad():
            for part in ([[5, 9, 17]], [[44]], [[3, 8]]):
                logits.append(model(torch.tensor(part), use_cache=True, **{name: cache}).logits)
        results.append(torch.cat(logits, 1))
    assert torch.equal(*results)


def test_tuple_output_and_losses(pair: Pair) -> None:
    arguments = variants.inputs("llama")
    labels = arguments["input_ids"]
    with torch.no_grad():
        want, got = (m(**arguments, labels=labels, return_dict=False) for m in pair)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_signature_is_the_plain_one(pair: Pair) -> None:
    plain, model = pair
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    layers = plain.model.layers, model.model.layers
    assert inspect.signature(layers[1][0].forward) == inspect.signature(layers[0][0].forward)
    with pytest.raises((TypeError, ValueError)):
        model(no_such_argument=1)
