"""A capture that fails: its first error is told, and Python's collector goes on. On a graph that is
none, since on a GPU captures go well.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from offload.models.fused import decode_graph
from offload.models.fused.decode_graph import LaunchGraph


class Graph:
    """Ends with an error of its own where what was captured failed, as CUDA's do."""

    refused = ""
    valid = True

    def capture_begin(self, capture_error_mode: str) -> None:
        self._refuse("begin")

    def capture_end(self) -> None:
        if not self.valid:
            raise RuntimeError("a previous error during capture")
        self._refuse("end")

    def _refuse(self, step: str) -> None:
        if self.refused == step:
            raise RuntimeError(f"no {step}")


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ("begin", RuntimeError("no begin")),
        ("end", RuntimeError("no end")),
        ("launch", RuntimeError("not permitted while a stream is captured")),
        ("launch", KeyboardInterrupt("Ctrl-C")),
    ],
)
def test_the_first_error_is_told_and_garbage_is_collected(
    refused: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(decode_graph, "_capture_stream", lambda _: None)
    monkeypatch.setattr(Graph, "refused", refused)

    def launch() -> None:
        if refused == "launch":
            monkeypatch.setattr(Graph, "valid", False)
            raise error

    try:
        with pytest.raises(type(error), match=str(error)):
            LaunchGraph(launch, torch.device("cuda", 0))
        assert gc.isenabled()
    finally:
        gc.enable()
