"""The program as a process: quick where nothing heavy is needed, and polite when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import offload

ROOT = Path(__file__).resolve().parents[2]


def cli(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "offload", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["pack"], ["info"], ["bench"], ["bench", "nvme"]]
)
def test_help_imports_neither_torch_nor_transformers(arguments: list[str]) -> None:
    code = (
        "import sys; from offload.cli import main; code = main([*sys.argv[1:], '--help']);"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: offload")


def test_version() -> None:
    out, err = cli("--version").communicate()
    assert (out, err) == (f"offload {offload.__version__}\n", "")


def test_a_reader_that_leaves_is_no_error(chat_model: Path) -> None:
    options = ("--prompt", "w5", "--max-new-tokens", 40, "--device-map", "cpu")
    process = cli("run", chat_model, *options)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 141
    assert "Traceback" not in err and "error" not in err and "Exception" not in err


@pytest.mark.parametrize(
    ("arguments", "closed", "words"),
    [
        (["run", "MODEL"], "<&-", "the prompt (standard input) is empty"),
        (["info"], ">&-", "standard output is closed"),
    ],
)
def test_closed_streams(chat_model: Path, arguments: list[str], closed: str, words: str) -> None:
    command = [sys.executable, "-m", "offload", *arguments]
    command = [str(chat_model) if word == "MODEL" else word for word in command]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr


def test_ctrl_c_ends_it_at_once(chat_model: Path) -> None:
    # Its positions are no hard limit, so this would run for long.
    options = ("--prompt", "w5", "--max-new-tokens", 1000000, "--device-map", "nvme")
    process = cli("run", chat_model, *options)
    assert process.stdout is not None
    assert process.stdout.read(1)  # it generates
    process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - stopped < 20
    assert process.returncode == 130
    assert "Traceback" not in err and err.endswith("offload: interrupted\n")


def test_a_terminated_benchmark_removes_its_file(tmp_path: Path) -> None:
    process = cli("bench", "nvme", tmp_path, "--max-size", "256MiB", "--rounds", 10000)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
