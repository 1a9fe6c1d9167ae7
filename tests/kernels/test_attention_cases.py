"""Decode attention's measurements run, ours and their peers, and compare like with like."""

from __future__ import annotations

import pytest
import torch

from offload.bench.kernels import attention
from offload.bench.kernels.case import Case

CASES = list(attention.cases(torch.device("cpu"), quick=False))
SHAPES = (*attention.ANCHORS, *attention.GRID, *attention.OTHERS, *attention.RAGGED)


def test_shapes_are_told_apart() -> None:
    assert len({shape.name for shape in {*SHAPES}}) == len({*SHAPES})


@pytest.mark.parametrize("shape", attention.RAGGED, ids=lambda shape: shape.name)
def test_ragged_lengths_are_as_many_columns(shape: attention.Shape) -> None:
    lengths = shape.lengths()
    assert len(lengths) == shape.batch and sum(lengths) == shape.batch * shape.length
    assert 0 < min(lengths) < shape.length < max(lengths)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.shape)
def test_runs_beside_its_peers(case: Case) -> None:
    assert case.bytes > 0 and case.op == attention.OP
    case.ours(0)
    for peer in case.peers.values():
        peer(0)
