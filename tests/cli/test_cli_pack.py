"""`offload pack`: a quantised folder, its name on standard output, progress on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_a_folder_is_written_and_named(program: Any, chat_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = program(
        "pack", chat_model, out, "--weights", "int4-channel", "--weights-of", "lm_head=int8-channel"
    )
    assert (done.code, done.out) == (0, f"{out}\n")
    assert done.err.startswith("offload: packed ") and " in " in done.err.splitlines()[-1]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert [g["weights"]["num_bits"] for g in config["config_groups"].values()] == [4, 8]
    assert (out / "tokenizer.json").read_bytes() == (chat_model / "tokenizer.json").read_bytes()
    again = program("pack", chat_model, out, "--weights", "int8")
    assert (again.code, again.out) == (2, "")
    assert again.err == (
        f"offload: error: {out} is there already; remove it, or name another folder\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --weights"),
        (["--weights", "int3"], "'int3' is no format for weights; use int4, int8"),
        (["--weights", "int4"], "32 inputs do not divide into groups of 64"),
        (["--weights", "int8", "--weights-of", "lm_head"], "'lm_head' is not PATTERN=FORMAT"),
        (
            ["--weights", "int8", "--weights-of", "lm_head=fp8", "--weights-of", "lm_head=none"],
            "--weights-of has 'lm_head' twice (fp8 and none)",
        ),
        (["--weights", "int8", "--weights-of", "default=fp8"], "of all else is that of --weights"),
        (["--weights", "int8-channel", "--weights-of", "x=int4"], "'x' is found in the name of no"),
        (["--weights", "int4", "--device", "tpu"], "device='tpu' is not a device"),
    ],
)
def test_what_goes_wrong_is_one_line(
    program: Any, chat_model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = program("pack", chat_model, tmp_path / "out", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err and len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
