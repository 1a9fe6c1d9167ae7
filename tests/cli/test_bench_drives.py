"""`offload bench nvme` and `offload bench link` reach the microbenchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


def test_nvme_measures_the_drive_of_a_folder(program: Any, tmp_path: Path) -> None:
    size = ("--max-size", "16MiB", "--block", "1MiB", "--depth", 2, "--rounds", 1)
    done = program("bench", "nvme", tmp_path, *size, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)
    assert list(tmp_path.iterdir()) == []


def test_nvme_measures_what_the_environment_names(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "python-threads")
    size = ("--max-size", "1MiB", "--block", "1MiB", "--depth", 1, "--rounds", 1)
    found = json.loads(program("bench", "nvme", tmp_path, *size, "--json").out)
    assert [row["name"] for row in found["rows"]] == ["python-threads"]
    assert found["probe"]["selected"] == "python-threads"


def test_link_needs_a_gpu_and_says_so(program: Any) -> None:
    done = program("bench", "link", "--max-size", "1MiB", "--rounds", 1)
    if torch.cuda.is_available():
        assert done.code == 0, done.err
        assert done.out
    else:
        assert done.code == 2
        assert done.err.startswith("offload: error: ") and len(done.err.splitlines()) == 1
