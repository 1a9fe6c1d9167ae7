"""A whole layer's measurement runs, ours and eager, on every release of transformers."""

from __future__ import annotations

import pytest
import torch

from offload.bench.kernels import layer


@pytest.mark.compat
@pytest.mark.filterwarnings("error:.*past_key_values")
def test_runs_beside_eager() -> None:
    for case in layer.cases(torch.device("cpu"), quick=True):
        for index in range(layer.LAYERS):
            case.ours(index)
            case.peers["eager"](index)
