"""Scratch memory grows, is shared, and is never swapped below a call that holds it."""

from __future__ import annotations

import pytest
import torch

from offload.kernels.workspace import Workspace


def test_every_caller_gets_the_same_memory() -> None:
    workspace = Workspace("cpu")
    large = workspace.partials(1000)
    assert large.dtype == torch.float32 and large.shape == (250,)
    assert workspace.partials(10).data_ptr() == large.data_ptr()
    assert workspace.partials(10).shape == (3,)
    counters = workspace.counters(7)
    assert counters.dtype == torch.int32 and counters.tolist() == [0] * 7
    assert workspace.counters(3).data_ptr() == counters.data_ptr()


def test_a_call_keeps_what_it_was_given() -> None:
    workspace = Workspace("cpu")
    small, few = workspace.partials(16), workspace.counters(2)
    small.fill_(7)
    few.fill_(3)
    assert workspace.partials(1 << 20).data_ptr() != small.data_ptr()
    assert workspace.counters(1000).tolist() == [0] * 1000
    assert small.tolist() == [7] * 4 and few.tolist() == [3, 3]


def test_nothing_is_wanted() -> None:
    workspace = Workspace("cpu")
    assert workspace.partials(0).numel() == 0 and workspace.counters(0).numel() == 0


def test_negative_sizes_are_refused() -> None:
    workspace = Workspace("cpu")
    with pytest.raises(ValueError, match="nbytes must not be negative, got -1"):
        workspace.partials(-1)
    with pytest.raises(ValueError, match="n must not be negative, got -2"):
        workspace.counters(-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_does_not_grow_while_a_graph_is_captured() -> None:
    workspace = Workspace("cuda")
    held = workspace.partials(1024), workspace.counters(4)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert workspace.partials(512).data_ptr() == held[0].data_ptr()
        assert workspace.counters(2).data_ptr() == held[1].data_ptr()
        for grow in (lambda: workspace.partials(1 << 20), lambda: workspace.counters(100)):
            with pytest.raises(RuntimeError, match="before the capture begins"):
                grow()
        held[0].zero_()  # an empty graph is warned about
