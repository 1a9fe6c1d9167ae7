"""The weight stream reads with the settings that `offload bench nvme --tune` kept for the drive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comparison
import pytest
import torch
import variants

import offload
from offload.aio import tuning

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kept", "backend"),
    [
        ({"block_size": 8192, "queue_depth": 3, "backend": "threads"}, "threads"),
        ({"backend": "no such backend"}, None),
        ({"block_size": "eight", "queue_depth": None}, None),
        ({"block_size": -5, "queue_depth": 0, "intra_op_parallelism": 65}, None),
        ({"block_size": True, "queue_depth": 1 << 20}, None),
    ],
)
def test_settings_of_the_drive(
    variant_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: dict[str, Any],
    backend: str | None,
) -> None:
    folder = variant_folder("llama")
    inputs = variants.inputs("llama")
    tuning.remember(folder, kept, 1.0)
    with torch.no_grad():
        want = comparison.plain_model(folder)(**inputs).logits
        with offload.run(folder, device_map="nvme") as model:
            assert torch.equal(model(**inputs).logits, want)
            report = model.offload.report()
    assert report.plan.chunks == (3 if kept.get("queue_depth") == 3 else 8)
    if backend is not None and "compiled extension" not in str(report.io):
        assert report.io["selected"] == backend
