"""A stretch of launches as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LaunchGraph:
    """What `launch()` issues, captured once and replayed.

    It must have been issued before, so that workspaces and libraries are set up, and whatever it
    reads and writes must stay where it is. Capturing runs nothing.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads read files and copy meanwhile: only this thread's calls are restricted.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            launch()

    def replay(self) -> None:
        """Issue all of it on the current stream."""
        self._graph.replay()
