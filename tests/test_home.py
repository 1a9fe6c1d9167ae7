"""Where the package keeps files: one rule for all of them."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import demo_model
import pytest
import torch

import offload
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


def test_a_user_without_a_home_folder_is_told_where_something_is_to_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variant_folder: Callable[[str], Path]
) -> None:
    """As in a container whose user has no name; nothing is written in a folder called `~`."""
    for name in ("HOME", "OFFLOAD_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    folder = variant_folder("llama")
    with offload.run(folder, device_map="nvme", device="cpu") as model:  # which keeps nothing
        model.offload.report()
    cast: dict[str, Any] = {"device_map": "nvme", "dtype": "bfloat16"}
    for options in (cast, {"goal": "latency", "prompt_len": 3, "gen_len": 2}):
        with pytest.raises(FileNotFoundError, match=r"'~/.cache/offload\S* begins with is not"):
            offload.run(folder, device="cpu", **options)
    with pytest.raises(FileNotFoundError, match="that '~nobody-here/packs' begins with"):
        offload.run(folder, device="cpu", offload_folder="~nobody-here/packs", **cast)
    with pytest.warns(UserWarning, match="are not kept: .*the home folder"):
        choices.Table("a GPU").keep(choices.Key("float16", 8, 8, 1), choices.OWN)
    assert not list(tmp_path.iterdir())
