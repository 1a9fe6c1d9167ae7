"""The programs in examples/: each runs on a tiny model and says what is true."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("generate", "MODEL", ...)`: what the example prints."""

    def execute(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return execute


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_is_short_and_says_how_to_run_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 60
    assert any(line.startswith(f"python examples/{file.name} ") for line in lines)


def test_generate_prints_the_models_own_text(run: Run, chat_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    inputs = tokenizer("w5 w9 w40", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert text.strip()

    printed = run(
        "generate", chat_model, "w5 w9 w40", "--device-map", "nvme", "--max-new-tokens", 6
    )

    assert f"\n{text}\n" in printed
    assert "NVMe (files)" in printed and "achieved: 6 passes" in printed


def test_throughput_has_a_line_for_every_batch(run: Run, chat_model: Path) -> None:
    printed = run("throughput", chat_model, "--batch", 1, 3, "--prompt", 4, "--new", 2)

    rates = re.findall(r"batch +(\d+): +([\d.]+) tokens/s", printed)
    assert [batch for batch, _ in rates] == ["1", "3"]
    assert all(float(rate) > 0 for _, rate in rates)
    assert "achieved: 5 passes" in printed  # one to warm up, then two for each batch


@pytest.mark.parametrize("size", [1, 1 << 20, (5 << 20) + 77])
def test_nvme_bandwidth_reads_the_whole_file(run: Run, tmp_path: Path, size: int) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(size))

    printed = run("nvme_bandwidth", file, "--block", 1, "--depth", 2)

    assert re.findall(r"GB/s of (\d+) bytes", printed) == [str(size)] * 2
