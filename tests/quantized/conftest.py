"""What the tests of quantised models share: their home, one thread, no bars."""

from collections.abc import Callable, Iterator
from pathlib import Path

import folders
import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path / "offload-home"))


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source("llama")` is its plain checkpoint in bf16, written once a session: leave it alone."""
    parent = tmp_path_factory.mktemp("plain")
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = folders.save(name, parent / name)
        return made[name]

    return folder
