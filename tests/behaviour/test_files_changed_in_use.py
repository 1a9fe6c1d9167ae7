"""Weight files that are deleted, replaced or written to while a model streams from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints
import comparison
import pytest
import torch
from comparison import output
from safetensors.torch import save_file
from transformers import PreTrainedModel

import offload

Folder = Callable[[str], Path]


@pytest.fixture
def folder(variant_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(variant_folder("llama"), tmp_path / "llama"))


@pytest.fixture(params=["cpu", "nvme"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PreTrainedModel]:
    with offload.run(folder, device_map=request.param, prefetch=1) as offloaded:
        offloaded.offload.wait_loaded()
        yield offloaded


@pytest.fixture
def want(variant_folder: Folder) -> torch.Tensor:
    return output(comparison.plain_model(variant_folder("llama")))


def on_nvme(model: PreTrainedModel) -> bool:
    return any(tier.value == "nvme" for tier in model.offload.plan.tiers)


def test_deleted(model: PreTrainedModel, folder: Path, want: torch.Tensor) -> None:
    """An open file is there until it is closed."""
    shutil.rmtree(folder)
    assert torch.equal(output(model), want) and torch.equal(output(model), want)
    if on_nvme(model):
        with pytest.raises(FileNotFoundError):
            model.state_dict()


def test_replaced(model: PreTrainedModel, folder: Path, want: torch.Tensor) -> None:
    """As a download of another revision does it: the model in use keeps its weights, also in what
    it would save."""
    state = checkpoints.read_tensors(folder)
    for file in folder.glob("*.safetensors"):
        tensors = {k: -v for k, v in checkpoints.read_tensors(folder).items()}
        save_file(tensors, folder / "new", metadata={"format": "pt"})
        os.replace(folder / "new", file)
    assert torch.equal(output(model), want) and torch.equal(output(model), want)
    if on_nvme(model):
        with pytest.raises(offload.CheckpointError, match="changed or replaced"):
            model.state_dict()
    else:
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("cut", [False, True])
def test_written_to(model: PreTrainedModel, folder: Path, want: torch.Tensor, cut: bool) -> None:
    output(model)
    file = sorted(folder.glob("*.safetensors"))[5]
    with open(file, "r+b") as opened:
        if cut:
            opened.truncate(file.stat().st_size - 64)
        else:
            opened.seek(-64, os.SEEK_END)
            opened.write(bytes(64))
    for _ in range(2):
        if on_nvme(model):
            with pytest.raises(offload.CheckpointError, match=f"{file.name} was changed"):
                output(model)
        else:
            assert torch.equal(output(model), want)


def test_saved_over_itself(model: PreTrainedModel, folder: Path, want: torch.Tensor) -> None:
    model.save_pretrained(folder)
    assert torch.equal(output(model), want)
    assert torch.equal(output(comparison.plain_model(folder)), want)
