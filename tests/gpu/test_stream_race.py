"""Slots on a GPU are never overwritten while kernels read them, and never read before they are
filled.
"""

from pathlib import Path

import check_stream_race
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return check_stream_race.save(str(tmp_path_factory.mktemp("race")))


@pytest.mark.parametrize(("tier", "depth", "late"), check_stream_race.CASES)
def test_late_streams(
    folder: Path, tier: str, depth: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    assert check_stream_race.wrong_passes(folder, tier, depth, late, passes=200) == 0
