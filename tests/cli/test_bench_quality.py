"""`offload bench quality`: perplexities as anybody would work them out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.bench import quality

WINDOW = 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{3 + 7 * i % 120}" for i in range(70)))
    return file


def perplexity(model: Any, folder: Path, text: Path) -> float:
    """Of windows of their own, by the model's own loss."""
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt").input_ids
    total, count = 0.0, 0
    for start in range(0, ids.shape[1], WINDOW):
        part = ids[:, start : start + WINDOW]
        with torch.no_grad():
            total += float(model(input_ids=part, labels=part).loss) * (part.shape[1] - 1)
        count += part.shape[1] - 1
    return math.exp(total / count)


def test_both_perplexities_and_their_difference(
    program: Any, chat_model: Path, text: Path, tmp_path: Path
) -> None:
    asked = ("--weights", "int4-channel")
    command = ("bench", "quality", chat_model, "--text", text, "--window", WINDOW)
    found = json.loads(program(*command, *asked, "--json").out)
    assert found["tokens"] == 66 and found["plain"]["name"] == "plain"
    plain = AutoModelForCausalLM.from_pretrained(chat_model)
    wanted = perplexity(plain, chat_model, text)
    assert found["plain"]["perplexity"] == pytest.approx(wanted, rel=1e-4)
    assert program("pack", chat_model, tmp_path / "out", *asked).code == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    quantised = perplexity(theirs, chat_model, text)
    assert found["quantised"]["perplexity"] == pytest.approx(quantised, rel=1e-4)
    assert abs(quantised / wanted - 1) > 1e-3
    assert found["change"] == pytest.approx(quantised / wanted - 1, rel=1e-2)
    assert 0 < found["standard_error"] < 1
    assert found["quantised"]["weight_bytes"] < 0.6 * found["plain"]["weight_bytes"]
    again = program(*command, "--against", tmp_path / "out")
    assert again.code == 0 and f"perplexity {found['change']:+.2%} (standard error" in again.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "to quantise to (--weights, --weights-of), or a quantised folder (--against)"),
        (["--weights", "int4", "--against", "x"], "name either the formats"),
        (["--weights", "int9"], "'int9' is no format"),
        (["--weights", "int8-channel", "--tokens", 1], "the text has 1 tokens; two are the least"),
        (["--weights", "int8-channel", "--window", 1], "a window of 1 tokens predicts none"),
        (["--against", "/no/such"], "no model '/no/such'"),
    ],
)
def test_what_goes_wrong_is_one_line_before_a_model_is_read(
    program: Any,
    chat_model: Path,
    text: Path,
    arguments: list[Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality, "run", lambda *_, **__: pytest.fail("a model was read"))
    done = program("bench", "quality", chat_model, "--text", text, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err and len(done.err.splitlines()) == 1


@pytest.fixture
def with_tokenizer(chat_model: Path, tmp_path: Path) -> Any:
    """`with_tokenizer(name, std=...)`: a variant's folder with the tokenizer of `chat_model`."""

    def save(name: str, dtype: torch.dtype = torch.float32, **arguments: Any) -> Path:
        folder = tmp_path / name
        variants.build(name, **arguments).to(dtype).save_pretrained(folder)
        AutoTokenizer.from_pretrained(chat_model).save_pretrained(folder)
        return folder

    return save


def test_a_model_that_cannot_read_the_text(
    program: Any, with_tokenizer: Any, text: Path, few_words: str
) -> None:
    """A GPU would fail an assertion, and be of no use from then on."""
    for name, message in (
        ("gpt2", "a window of 70 tokens is more than the model's 64 positions: pass --window 64"),
        ("bert", "BertForMaskedLM does not predict a text's next token"),
        ("t5", "T5ForConditionalGeneration does not predict a text's next token"),
        (few_words, "makes the token 122 of the text, and the model has 50 embeddings"),
    ):
        asked = ("--text", text, "--weights", "int8-channel")
        done = program("bench", "quality", with_tokenizer(name), *asked)
        assert (done.code, done.out) == (2, "") and message in done.err
        assert len(done.err.splitlines()) == 1


def test_losses_that_are_no_numbers(program: Any, with_tokenizer: Any, text: Path) -> None:
    folder = with_tokenizer("llama", torch.float16, std=30.0)
    done = program("bench", "quality", folder, "--text", text, "--weights", "int8-channel")
    assert (done.code, done.out) == (2, "") and len(done.err.splitlines()) == 1
    assert f"{folder} (plain) has a mean loss of nan nats: its numbers overflow" in done.err


def test_one_prediction_has_no_standard_error(
    program: Any, chat_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "two.txt"
    file.write_text("w3 w4")
    asked = ("bench", "quality", chat_model, "--text", file, "--weights", "int8-channel")
    assert json.loads(program(*asked, "--json").out)["standard_error"] is None
    assert "(standard error unknown)" in program(*asked).out


def test_a_plain_model_answers_with_quantised_weights(program: Any, chat_model: Path) -> None:
    run = ("run", chat_model, "--prompt", "w5 w9", "--max-new-tokens", 3, "--json")
    done = program(*run, "--weights", "int8-channel", "--weights-of", "lm_head=int8-channel")
    assert done.code == 0
    notes = json.loads(done.out)["report"]["notes"]
    assert "22 weights are quantised, and dequantised where they are used" in notes
