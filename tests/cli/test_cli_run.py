"""`offload run`: the plain model's text on standard output, all else on standard error."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "w5 w9 w40"
NEW = 6


def plain(folder: Path, prompt: str, **options: Any) -> str:
    """What transformers alone would answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=NEW, **options)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("where", ["auto", "cpu", "nvme"])
def test_the_text_is_that_of_the_plain_model(program: Any, chat_model: Path, where: str) -> None:
    done = program(
        "run", chat_model, "--no-chat", "--prompt", PROMPT, "--max-new-tokens", NEW,
        "--device-map", where,
    )  # fmt: skip
    assert done.code == 0
    assert done.out == plain(chat_model, PROMPT) + "\n"
    before, after = done.err.split("\n\n")
    assert "LlamaForCausalLM" in before and "outside the layers" in before
    assert "achieved" not in before
    assert f"{NEW} tokens in " in after and f"achieved: {NEW} passes" in after


def test_a_goal_is_planned_for(program: Any, chat_model: Path) -> None:
    done = program(
        "run", chat_model, "--no-chat", "--prompt", PROMPT, "--max-new-tokens", NEW,
        "--goal", "latency",
    )  # fmt: skip
    assert done.code == 0 and done.out == plain(chat_model, PROMPT) + "\n"
    assert f"planned for latency: batch 1 of 3 + {NEW} tokens" in done.err
    wrong = program("run", chat_model, "--prompt", "w5", "--goal", "fits", "--device-map", "cpu")
    assert wrong.code == 2 and "device_map='cpu' says it" in wrong.err


def test_keys_and_values_come_up(program: Any, chat_model: Path) -> None:
    done = program(
        "run", chat_model, "--no-chat", "--prompt", PROMPT, "--max-new-tokens", NEW, "--json",
        "--engine", "fused", "--kv-on-cpu", 1, "--kv-attention", "gpu", "--device", "cpu",
        "--device-map", "cpu",
    )  # fmt: skip
    found = json.loads(done.out)
    assert found["text"] == plain(chat_model, PROMPT)
    assert any(" come up in a step" in note for note in found["report"]["notes"])


def test_a_trace_is_written_and_drawn(program: Any, chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = program(
        "run", chat_model, "--prompt", PROMPT, "--max-new-tokens", NEW, "--device-map", "cpu",
        "--trace", file,
    )  # fmt: skip
    assert done.code == 0 and f" of {NEW} traced: " in done.err and "  compute: works" in done.err
    assert any(e["name"] == "layer 0" for e in json.loads(file.read_text())["traceEvents"])


def test_a_chat_template_is_applied_unless_told_otherwise(program: Any, chat_model: Path) -> None:
    done = program("run", chat_model, "--prompt", PROMPT, "--max-new-tokens", NEW)
    assert done.out == plain(chat_model, f"w7 {PROMPT} w8 w9") + "\n"
    assert done.out != plain(chat_model, PROMPT) + "\n"


def test_a_prompt_that_becomes_no_tokens_is_refused(
    program: Any, chat_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    tokenizer.chat_template = "{{ raise_exception('a system message comes first') }}"
    tokenizer.save_pretrained(folder)
    done = program("run", folder, "--prompt", "~", "--no-chat")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "the tokenizer makes no token of the prompt '~'" in done.err
    done = program("run", folder, "--prompt", "w5")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "(a system message comes first); --no-chat continues the prompt" in done.err


def test_json_is_one_object_and_all_there_is(program: Any, chat_model: Path) -> None:
    done = program(
        "run", chat_model, "--prompt", PROMPT, "--max-new-tokens", NEW, "--json",
        "--device-map", "nvme", "--prefetch", 1,
    )  # fmt: skip
    assert done.err == ""
    found = json.loads(done.out)
    assert found["text"] == plain(chat_model, f"w7 {PROMPT} w8 w9")
    assert (found["prompt_tokens"], found["tokens"]) == (6, NEW)
    assert found["tokens_per_second"] == pytest.approx(NEW / found["seconds"])
    assert 0 < found["first_token_seconds"] <= found["seconds"]
    report = found["report"]
    assert report["tiers"]["nvme"]["layers"] == 3 and report["prefetch"] == 1
    assert report["passes"] == NEW


def test_prompts_come_from_a_file_or_standard_input(
    program: Any, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    options = ("--max-new-tokens", NEW, "--device-map", "cpu")
    given = program("run", chat_model, "--prompt", PROMPT, *options).out
    assert program("run", chat_model, "--prompt-file", file, *options).out == given
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert program("run", chat_model, *options).out == given


def test_sampling_follows_the_seed_and_temperature(program: Any, chat_model: Path) -> None:
    def sample(*more: object) -> str:
        options = ("--prompt", PROMPT, "--no-chat", "--max-new-tokens", NEW, "--sample")
        return program("run", chat_model, *options, *more).out

    torch.manual_seed(4)
    expected = plain(chat_model, PROMPT, do_sample=True)
    assert sample("--seed", 4) == sample("--seed", 4) == expected + "\n"
    assert sample("--seed", 5) != sample("--seed", 4)
    assert sample("--seed", 5, "--temperature", 1e-4) == plain(chat_model, PROMPT) + "\n"


def test_packing_is_told(
    program: Any, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.progress.SAY_EVERY", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own, in place of a shell's
    pack = logging.getLogger("offload.store.pack")
    monkeypatch.setattr(pack, "level", pack.level)
    done = program(
        "run", chat_model, "--prompt", PROMPT, "--max-new-tokens", 1, "--device-map", "nvme",
        "--dtype", "float16", "--offload-folder", tmp_path, "--json",
    )  # fmt: skip
    assert done.code == 0 and json.loads(done.out)
    assert re.search(rf"^offload: packing .* into {tmp_path}/", done.err, re.MULTILINE)
    assert len(re.findall(r"^offload: packed .* KiB of .* KiB$", done.err, re.MULTILINE)) == 3


def test_limits_reach_the_plan(program: Any, chat_model: Path) -> None:
    done = program(
        "run", chat_model, "--prompt", PROMPT, "--max-new-tokens", 1, "--json",
        "--max-memory", "cpu=200KB", "--device-map", '{"": "nvme", "model.layers.1": "cpu"}',
    )  # fmt: skip
    report = json.loads(done.out)["report"]
    assert (report["tiers"]["nvme"]["layers"], report["tiers"]["cpu"]["layers"]) == (2, 1)
    tight = program("run", chat_model, "--prompt", "w5", "--max-memory", "cpu=2KB")
    assert tight.code == 2 and "1.953 KiB" in tight.err


def test_tokens_and_logits_that_are_none(
    program: Any, chat_model: Path, tmp_path: Path, few_words: str
) -> None:
    for model, message in (
        (variants.build(few_words), "the model has 50 embeddings: this is another model's"),
        (variants.build("llama", std=30.0).half(), "the model's logits are NaN"),
    ):
        folder = tmp_path / message[:9]
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(chat_model).save_pretrained(folder)
        for more in ([], ["--sample"]):
            done = program("run", folder, "--prompt", "w100", "--no-chat", "--json", *more)
            assert (done.code, done.out) == (2, "") and message in done.err


def test_learnt_positions_are_not_exceeded(
    program: Any, chat_model: Path, variant_folder: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "opt"
    folder.mkdir()
    for file in variant_folder("opt").iterdir():
        (folder / file.name).symlink_to(file)
    AutoTokenizer.from_pretrained(chat_model).save_pretrained(folder)
    options = ("--prompt", PROMPT, "--no-chat", "--device-map", "cpu", "--max-new-tokens")
    assert program("run", folder, *options, 61).code == 0
    beyond = program("run", folder, *options, 62)
    assert beyond.code == 2
    assert "3 prompt tokens and 62 new ones are more than the model's 64 positions" in beyond.err
