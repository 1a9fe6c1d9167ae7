"""The element-wise measurements run, ours and their peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.bench.kernels import elementwise
from offload.bench.kernels.case import Case
from offload.kernels import QkvLayout, reference

CASES = list(elementwise.cases(torch.device("cpu"), quick=False))


def test_every_model_is_there() -> None:
    assert {case.op for case in CASES} == set(elementwise.OPS)
    assert len({(case.op, case.shape) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shape}")
def test_runs_beside_its_peer(case: Case) -> None:
    assert case.bytes > 0
    case.peers["eager"](0)
    case.ours(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_only_copies_copies(count: int, grouped: bool) -> None:
    pytest.importorskip("triton")
    from offload.bench.kernels.elementwise import streams

    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    inputs = [torch.randn(7, 577, **like) for _ in range(count)]
    before = [x.clone() for x in inputs]
    outputs = [*inputs[1:], torch.zeros(7, 577, **like)]
    streams.copy_streams(inputs, outputs)
    assert all(map(torch.equal, outputs, before))

    layout = (QkvLayout.grouped if grouped else QkvLayout.apart)(6, 2, 96)
    qkv = torch.randn(2, 5, layout.width, **like)
    query = torch.zeros(2, 5, 6, 96, **like)
    key, value = (torch.zeros(2, 2, 9, 96, **like) for _ in "kv")
    streams.split_heads(qkv, layout, query, key, value, 3)
    expected = reference.split_qkv(qkv, layout)
    assert torch.equal(query, expected[0])
    for cache, new in zip((key, value), expected[1:], strict=True):
        assert torch.equal(cache[:, :, 3:8].transpose(1, 2), new)
        assert not cache[:, :, :3].any() and not cache[:, :, 8:].any()
