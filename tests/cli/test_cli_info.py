"""`offload info`: what it says is what the machine has."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload.build_report
from offload import aio
from offload.aio.backends import BACKENDS


def test_json_has_the_machines_own_figures(program: Any, tmp_path: Path) -> None:
    done = program("info", "--json", "--offload-folder", tmp_path / "new")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["packages"]["torch"] == torch.__version__
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert found["io"]["selected"] == aio.probe()["selected"]
    assert found["cpu_count"] == len(os.sched_getaffinity(0))
    assert len(found["gpus"]["devices"]) == torch.cuda.device_count()
    folder = found["offload_folder"]
    assert folder["path"] == str(tmp_path / "new") and folder["is_folder"] is None
    assert not (tmp_path / "new").exists()


def test_text_gives_a_reason_for_what_is_not_in_use(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = program("info")
    assert "GPU: none; torch" in done.out and "layers run on the CPU" in done.out
    assert "kernels: none; " in done.out
    for backend in BACKENDS:
        (line,) = [ln for ln in done.out.splitlines() if ln.startswith(f"  {backend}: ")]
        assert ("in use" in line) == (backend == aio.probe()["selected"])


def test_a_backend_that_the_environment_names(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "python-threads")
    out = program("info").out
    assert "\ndisk reads: python-threads, as OFFLOAD_AIO_BACKEND says\n" in out
    assert "\n  python-threads: in use\n" in out and out.count(": in use\n") == 1


def test_a_named_backend_that_cannot_run(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> dict[str, Any]:
        return {"backend": name, "ok": name == "threads", "errno": 1, "reason": "not here"}

    monkeypatch.setattr(sys.modules["offload.aio.probe"], "try_out", refused)
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "uring")
    out = program("info").out
    assert "\ndisk reads: none; OFFLOAD_AIO_BACKEND names uring, which cannot run here\n" in out
    assert "\n  uring: not here\n" in out and "\n  threads: works, not needed\n" in out
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "posix")
    done = program("info")
    assert done.code == 2 and "OFFLOAD_AIO_BACKEND must be one of" in done.err


def test_says_that_a_cgroup_is_the_limit(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import offload.memory_limits

    monkeypatch.setattr(offload.memory_limits, "host_memory_total", lambda: 1 << 20)
    assert "of 1 MiB of memory available; the limit is that of a cgroup" in program("info").out


def test_says_that_the_folder_is_a_file(program: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file (a file!)" in program("info", "--offload-folder", tmp_path / "file").out


def test_says_which_parts_are_of_no_use_and_why(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"one": None, "two": "no compiler was found"}
    monkeypatch.setattr(offload.build_report, "build_report", lambda: parts)
    out = program("info").out
    assert "compiled part one: built\n" in out
    assert "compiled part two: not in use; no compiler was found\n" in out


def test_says_that_sources_are_run_instead_of_what_is_installed(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.build_report, "build_report", dict)
    out = program("info").out
    assert f"these are the sources in {Path(offload.__file__).parent}, which" in out
    assert "pip install -e ." in out
