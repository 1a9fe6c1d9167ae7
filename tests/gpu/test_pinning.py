"""Where memory cannot be pinned, copies come from plain memory, and the report says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import variants

import offload
from offload.aio import cudart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_pinning_refused(
    variant_folder: Callable[[str], Path], tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    folder = variant_folder("llama")
    inputs = {k: v.cuda() for k, v in variants.inputs("llama").items()}
    options: dict[str, Any] = {"device_map": tier, "prefetch": 1, "engine": "transformers"}
    with torch.no_grad(), offload.run(folder, **options) as model:
        want = model(**inputs).logits
        assert model.offload.report().pageable_bytes == 0
    monkeypatch.setattr(cudart.Cudart, "register", lambda *_: "refused by this test")
    with torch.no_grad(), offload.run(folder, **options) as model:
        for _ in range(5):
            assert torch.equal(model(**inputs).logits, want)
        report = model.offload.report()
    assert report.pageable_bytes > 0
    assert "could not be pinned" in str(report) and "refused by this test" in str(report)
