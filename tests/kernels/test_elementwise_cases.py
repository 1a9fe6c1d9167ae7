"""The element-wise measurements run, ours and their peers."""

from __future__ import annotations

import pytest
import torch

from offload.bench.kernels import elementwise
from offload.bench.kernels.case import Case

CASES = list(elementwise.cases(torch.device("cpu"), quick=False))


def test_every_model_is_there() -> None:
    assert {case.op for case in CASES} == set(elementwise.OPS)
    assert len({(case.op, case.shape) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shape}")
def test_runs_beside_its_peer(case: Case) -> None:
    assert case.bytes > 0
    case.peers["eager"](0)
    case.ours(0)
