"""`offload bench quality`: perplexities as anybody would work them out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_a_plain_model_answers_with_quantised_weights(program: Any, chat_model: Path) -> None:
    run = ("run", chat_model, "--prompt", "w5 w9", "--max-new-tokens", 3, "--json")
    done = program(*run, "--weights", "int8-channel", "--weights-of", "lm_head=int8-channel")
    assert done.code == 0
    notes = json.loads(done.out)["report"]["notes"]
    assert "22 weights are quantised, and dequantised where they are used" in notes
