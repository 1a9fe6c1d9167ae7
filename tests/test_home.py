"""Where the package keeps files: one rule for all of them."""

from __future__ import annotations

from pathlib import Path

import demo_model
import pytest
import torch

from offload.aio import tuning
from offload.home import home_folder
from offload.kernels import choices
from offload.measure.cache import rates_file


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/someone/.cache/offload"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/offload"),
        ({"XDG_CACHE_HOME": "/caches", "OFFLOAD_HOME": "~/files"}, "/home/someone/files"),
    ],
    ids=str,
)
def test_one_folder_has_all(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("OFFLOAD_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    home = Path(folder)
    assert home_folder() == home
    assert Path(choices.cache_path()) == home / "kernels.json"
    assert Path(tuning.cache_path()) == home / "aio.json"
    assert rates_file(None, torch.device("cpu")).parent == home / "rates"
    assert demo_model.models_folder() == home / "models"
