"""A real model says the same text with the same perplexity, in half of its weights' memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import process
import pytest
import torch
import transformers

import offload

GPL = Path("/usr/share/common-licenses/GPL-3")
PROMPTS = ("The capital of France is", "def fibonacci(n):\n")


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def text_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> torch.Tensor:
    if not GPL.exists():
        pytest.skip(f"needs {GPL} (Debian's base-files)")
    return tokenizer(GPL.read_text(), return_tensors="pt").input_ids[:, :512]


Said = tuple[list[str], float, torch.Tensor]


def say(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    ids: torch.Tensor,
) -> Said:
    """Greedy continuations, the perplexity of a text, and its last logits."""
    texts = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**tokens, max_new_tokens=8, do_sample=False)
        texts.append(tokenizer.decode(out[0, tokens.input_ids.shape[1] :]))
    with torch.no_grad():
        result = model(ids, labels=ids)
    return texts, float(result.loss.exp()), result.logits[:, -1]


@pytest.fixture(scope="module")
def plain(
    smollm2: Path, tokenizer: transformers.PreTrainedTokenizerBase, text_ids: torch.Tensor
) -> Said:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    said = say(model, tokenizer, text_ids)
    assert 5 < said[1] < 40  # a model that knows its language
    return said


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_same_text_and_perplexity(
    smollm2: Path,
    tokenizer: transformers.PreTrainedTokenizerBase,
    text_ids: torch.Tensor,
    plain: Said,
    tier: str,
) -> None:
    with offload.run(smollm2, device_map=tier) as model:
        assert model.dtype == torch.bfloat16
        texts, perplexity, logits = say(model, tokenizer, text_ids)
    assert texts == plain[0] and " Paris" in texts[0]
    assert perplexity == plain[1] and torch.equal(logits, plain[2])


def test_half_of_the_weights_in_memory(
    smollm2: Path, tokenizer: transformers.PreTrainedTokenizerBase, plain: Said
) -> None:
    """The demo's budget: measured memory grows by no more than half of the weights."""
    weights = sum(f.stat().st_size for f in smollm2.glob("*.safetensors"))
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    gc.collect()
    with (
        process.PeakMemory() as memory,
        offload.run(smollm2, device_map="nvme", max_memory={"cpu": "130MB"}) as model,
    ):
        out = model.generate(**ids, max_new_tokens=8, do_sample=False)
        huge_pages = process.status("HugetlbPages")
        assert model.offload.plan.device_bytes + model.offload.plan.ring_bytes <= 130e6
    assert tokenizer.decode(out[0, ids.input_ids.shape[1] :]) == plain[0][0]
    assert memory.growth + huge_pages <= weights / 2, f"{memory.growth / 1e6:.0f} MB"


def test_embedding_streamed_too(
    smollm2: Path,
    tokenizer: transformers.PreTrainedTokenizerBase,
    text_ids: torch.Tensor,
    plain: Said,
) -> None:
    """The tied embedding is a fifth of this model; it is used twice a pass."""
    place = {"": "nvme", "model.embed_tokens": "nvme"}
    with offload.run(smollm2, device_map=place) as model:
        assert model.offload.plan.outside_bytes < 1 << 20
        assert say(model, tokenizer, text_ids)[:2] == plain[:2]


def test_chat_by_pipeline(smollm2: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    with offload.run(smollm2, device_map="nvme") as model:
        chat = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = chat(messages, max_new_tokens=8, do_sample=False)
    assert "Paris" in answer[0]["generated_text"][-1]["content"]


Harness = Callable[[transformers.PreTrainedModel], list[tuple[float, bool]]]


@pytest.fixture(scope="module")
def harness(tokenizer: transformers.PreTrainedTokenizerBase) -> Harness:
    """lm-eval's wrapper around a model, asked about texts in memory."""
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [
        ("The capital of France is", " Paris."),
        ("The capital of France is", " Berlin."),
        ("Water freezes at zero degrees", " Celsius, and boils at a hundred."),
        ("", "Once upon a time there was a king."),
    ]

    def ask(model: transformers.PreTrainedModel) -> list[tuple[float, bool]]:
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
        requests = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(pairs)
        ]
        return wrapped.loglikelihood(requests, disable_tqdm=True)

    return ask


def test_lm_eval(smollm2: Path, harness: Harness) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto").eval()
    want = harness(plain)
    assert want[0][0] > want[1][0]
    with offload.run(smollm2, device_map="nvme") as model:
        assert harness(model) == want
