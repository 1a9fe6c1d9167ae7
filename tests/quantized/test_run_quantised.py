"""`offload.run(..., quantization=...)`: a plain checkpoint is quantised once, beside the packs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch

import offload
from offload.errors import CheckpointError, UnsupportedError

Source = Callable[[str], Path]
ASKED = {"default": "int4", r"layers\.0\.": "int8-g32", "lm_head": "fp8"}


@pytest.mark.compat
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_logits_are_those_of_a_packed_folder(
    source: Source, tmp_path: Path, tier: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "offload.packed")
    out = folders.pack(source("llama"), tmp_path / "out", ASKED)
    state = folders.whole(out, ASKED, torch.bfloat16)
    wanted = folders.logits(folders.plain_model(source("llama"), state, tmp_path / "whole"))
    options = {"device_map": tier, "device": "cpu", "quantization": ASKED}
    for _ in range(2):
        with offload.run(source("llama"), **options) as model:
            assert torch.equal(folders.logits(model), wanted)
            assert model.name_or_path == str(source("llama"))
            assert model.offload.plan.streamed_bytes < 130_000
        (made,) = (tmp_path / "offload-home" / "packs").glob("quantised-*")
        assert folders.tensors(made).keys() == folders.tensors(out).keys()
    assert caplog.text.count("quantising ") == 1


def test_another_wish_is_another_folder(source: Source, tmp_path: Path) -> None:
    for asked in ("int4", "int4-clip", "int8", {"default": "int8", "layers.0": "none"}):
        with offload.run(
            source("llama"), device="cpu", quantization=asked, offload_folder=tmp_path / "here"
        ):
            pass
    assert len(list((tmp_path / "here").glob("quantised-*"))) == 4


def _run(folder: Path, home: Path, queue: Any) -> None:
    with offload.run(folder, device="cpu", quantization="int4", offload_folder=home) as model:
        queue.put(float(folders.logits(model).float().sum()))


def test_two_processes_make_one_folder(source: Source, tmp_path: Path) -> None:
    processes = multiprocessing.get_context("spawn")
    queue = processes.Queue()
    runs = [
        processes.Process(target=_run, args=(source("llama"), tmp_path / "home", queue))
        for _ in range(2)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(120)
    assert [run.exitcode for run in runs] == [0, 0]
    found = [queue.get(timeout=20) for _ in runs]
    assert found[0] == found[1]
    assert [f.name.split("-")[0] for f in (tmp_path / "home").iterdir()] == ["quantised"]


@pytest.mark.parametrize("damage", ["cut", "no config.json"])
def test_what_was_damaged_since_is_said_to_be_no_download(
    source: Source, tmp_path: Path, damage: str
) -> None:
    options: dict[str, Any] = {"device": "cpu", "device_map": "cpu", "quantization": "int4"}
    offload.run(source("llama"), **options).offload.close()
    (folder,) = (tmp_path / "offload-home").rglob("quantised-*")
    if damage == "cut":
        os.truncate(next(folder.glob("*.safetensors")), 5000)
    else:
        (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="remove the folder, and it is written anew") as told:
        offload.run(source("llama"), **options)
    assert str(folder) in str(told.value)
    shutil.rmtree(folder)
    offload.run(source("llama"), **options).offload.close()


def test_what_is_quantised_already(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    with pytest.raises(UnsupportedError, match=r"quantised already \(compressed-tensors\)"):
        offload.run(out, device="cpu", quantization="int4")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": {"nope": "cpu"}}, ValueError, "does not have: 'nope'"),
        ({"device_map": {"model.layers.0": "cpu"}}, ValueError, "gives 'model.layers.1' no place"),
        ({"kv_on_cpu": 1}, UnsupportedError, "kv_on_cpu=1 takes the fused engine.* pass engine="),
    ],
)
def test_what_is_refused_is_refused_before_quantising(
    source: Source, tmp_path: Path, options: dict[str, Any], error: type, message: str
) -> None:
    home = tmp_path / "home"
    with pytest.raises(error, match=message):
        offload.run(
            source("llama"), device="cpu", quantization="int4", offload_folder=home, **options
        )
    assert not home.exists()


def test_what_cannot_be_asked_for(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'int7' is no format"):
        offload.run("/no/such/model", device="cpu", quantization="int7")
    with pytest.raises(ValueError, match="not to a live model"):
        offload.run(folders.build("llama"), device="cpu", quantization="int4")
