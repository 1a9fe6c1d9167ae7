"""What goes wrong is one line on standard error, exit code 2, and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

RUN = ("run", "MODEL", "--prompt", "w5")
CAST = ("--dtype", "bfloat16", "--device-map", "nvme")
BENCH = ("bench", "throughput", "--shape", "tiny")

CASES: dict[tuple[str, ...], str] = {
    (): "required: COMMAND",
    ("frob",): "'frob'",
    ("run",): "required: MODEL",
    ("run", "/no/such/folder", "--prompt", "x"): "'/no/such/folder'",
    ("run", "nobody/nothing", "--prompt", "x"): "hf download nobody/nothing",
    ("run", "EMPTY", "--prompt", "x"): "no config.json",
    ("run", "ENCODER", "--prompt", "w5"): "no tokenizer",
    ("run", "MODEL", "--prompt-file", "/no/such"): "No such file or directory: '/no/such'",
    ("run", "MODEL", "--prompt-file", "BINARY"): "is not UTF-8 text",
    ("run", "MODEL", "--prompt", "  "): "the prompt (--prompt) is empty",
    ("run", "MODEL", "--prompt", "w5 \udce9"): "(--prompt) is not UTF-8 text",  # as from a shell
    ("run", "MODEL", "--prompt-file", ""): "the name of a file or folder is empty",
    ("pack", "MODEL", "", "--weights", "int4"): "the name of a file or folder is empty",
    (*RUN, "--max-memory", "cpu=" + "9" * 400): "is more than any machine has",
    (*RUN, "--prompt-file", "BINARY"): "not allowed with argument",
    (*RUN, "--max-memory", "20GiB"): "'20GiB' is not PLACE=SIZE",
    (*RUN, "--max-memory", "disk=1GB"): "'disk=1GB' is not PLACE=SIZE",
    (*RUN, "--max-memory", "cpu=lots"): "the size 'lots' is not understood",
    (*RUN, "--max-memory", "cpu=1GB", "--max-memory", "cpu=2GB"): "names cpu twice (1000000000 and",
    (*RUN, "--device-map", '{"": "cpu", "": "nvme"}'): "the name '' stands there twice",
    (*RUN, "--device-map", '{"":' * 2000): "is not valid JSON: ",
    (*RUN, "--device-map", "gpu"): "device_map='gpu' is not known",
    (*RUN, "--device-map", "{bad"): "'{bad' is not valid JSON",
    (*RUN, "--device-map", '{"nope": "cpu"}'): "does not have: 'nope'",
    (*RUN, "--dtype", "int8"): "dtype='int8'",
    (*RUN, "--device", "tpu"): "device='tpu' is not a device",
    (*RUN, "--max-new-tokens", "0"): "'0' is not a whole number above zero",
    (*RUN, "--prefetch=--"): "argument --prefetch: '--' is no value",
    ("run", "MODEL", "--prompt=--"): "argument --prompt: '--' is no value",
    (*RUN, "--prefetch", "1.5"): "'1.5' is not a whole number above zero",
    (*RUN, "--temperature", "2"): "belong to --sample",
    (*RUN, "--max-new-tokens", "9" * 22): "--max-new-tokens must be at most 1073741824, got 999",
    (*RUN, "--sample", "--temperature", "0"): "must be between 1e-30 and 1e+30, got 0.0; without",
    (*RUN, "--sample", "--temperature", "1e-320"): "1e+30, got 1e-320; without --sample the likel",
    (*RUN, "--sample", "--temperature", "nan"): "1e+30, got nan; without --sample the likeliest",
    (*RUN, "--sample", "--temperature", "inf"): "1e+30, got inf; without --sample the likeliest",
    (*RUN, "--sample", "--seed", "9" * 23): "--seed must be a number of 64 bits",
    (*RUN, "--kv-dtype", "int8"): "say with kv_on_cpu how many",
    (*RUN, "--trace", ""): "the name of a file or folder is empty",
    (*RUN, "--weights", "int5"): "-clip at the end",
    (*RUN, "--offload-folder", "BINARY", *CAST): "is a file",
    ("bench",): "required: BENCHMARK",
    ("bench", "throughput"): "--shape NAME or --model FOLDER",
    ("bench", "throughput", "--shape", "opt-13z"): "choose one of tiny, ",
    ("bench", "throughput", "--model", "/no/such/folder"): "'/no/such/folder'",
    (*BENCH, "--peer", "fast"): "peer 'fast' is not known; choose of accelerate, resident",
    (*BENCH, "--gpu-memory", "1Gb"): "'1Gb' is ambiguous",
    (*BENCH, "--gpu-memory", "1GB", "--device", "cpu"): "--gpu-memory caps a GPU, and layers run",
    (*BENCH, "--device-map", "{}"): "device_map={} places nothing",
    (*BENCH, "--cpu-memory", "1KB"): "1000 B on CPU memory",
    ("bench", "nvme", "/no/such/folder"): "'/no/such/folder' is no folder",
    ("bench", "nvme", "EMPTY", "--block", "1MB,x"): "argument --block: 'x' is not a size",
    (*BENCH, "--kv-on-cpu", "-1"): "'-1' is not a whole number, zero or more",
    (*BENCH, "--overhead", "--kv-on-cpu", "2"): "--kv-on-cpu belongs to the measurement of",
    (*BENCH, "--micro-batch", "4", "--batch", "4"): "--micro-batch 4 is no part of --batch 4",
    (*BENCH, "--overhead", "--batch", "2"): "--batch belongs to the measurement of throughput",
    (*BENCH, "--overhead", "--prompt-len", "8"): "--prompt-len belongs to the measurement of",
    (*BENCH, "--cold-start", "--gen-len", "8"): "--gen-len belongs to the measurement of",
    (*BENCH, "--cold-start", "--peer", "resident"): "--peer belongs to the measurement of",
    ("bench", "host-attention", "--device", "cpu"): "--device goes with --beside-stream",
    (*BENCH, "--overhead", "--cold-start"): "not allowed with argument",
}  # fmt: skip


@pytest.fixture
def stand_ins(chat_model: Path, variant_folder: Any, tmp_path: Path) -> dict[str, str]:
    """What the capital words of the cases are."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    return {
        "MODEL": str(chat_model),
        "ENCODER": str(variant_folder("bert")),
        "EMPTY": str(tmp_path / "empty"),
        "BINARY": str(tmp_path / "binary"),
    }


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_is_one_line(program: Any, stand_ins: dict[str, str], arguments: tuple[str, ...]) -> None:
    done = program(*(stand_ins.get(a, a) for a in arguments))
    assert done.code == 2
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("offload: error: ") and CASES[arguments] in lines[0]


def test_debug_shows_where_it_came_from(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_DEBUG", "1")
    done = program("run", "/no/such/folder", "--prompt", "x")
    assert done.code == 2
    assert done.err.startswith("Traceback") and "hub.py" in done.err
    assert done.err.splitlines()[-1].startswith("offload: error: no model '/no/such/folder'")


def test_a_fault_of_the_program_is_not_passed_off_as_the_users(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.commands import info

    def fail(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(info, "collect", fail)
    done = program("info")
    assert done.code == 2
    assert "Traceback" in done.err and done.err.endswith("offload: error: 'lost'\n")


def test_warnings_are_one_line_too(program: Any, chat_model: Path) -> None:
    done = program(
        "run", chat_model, "--prompt", "w5", "--max-new-tokens", 1, "--json",
        "--max-memory", "cpu=900TB",
    )  # fmt: skip
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert line.startswith("offload: warning: max_memory['cpu']")
