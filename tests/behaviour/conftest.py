"""What all behaviour tests share: poisoned slots, own folders, a quiet transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are filled with NaN before they are loaded: what still reads them then shows."""
    monkeypatch.setenv("OFFLOAD_POISON", "1")


@pytest.fixture(autouse=True)
def offload_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where packs of this test go."""
    home = tmp_path / "offload-home"
    monkeypatch.setenv("OFFLOAD_HOME", str(home))
    return home


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Threads that spin for a tiny product cost more than the product, on a busy machine most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
