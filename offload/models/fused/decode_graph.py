"""A stretch of launches as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable

import torch


class LaunchGraph:
    """What `launch()` issues, captured once and replayed.

    It must have been issued before, so that workspaces and libraries are set up, and whatever it
    reads and writes must stay where it is. Capturing runs nothing.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        # Not `torch.cuda.graph`, which empties the allocator's cache and collects garbage: that
        # costs more than a generation of a few tokens, and a model may have many stretches.
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(_capture_stream(device)):
            # Other threads read files and copy meanwhile: only this thread's calls are restricted.
            # What the collector would release now may need one of those that are.
            collecting = gc.isenabled()
            gc.disable()
            try:
                self._capture(launch)
            finally:
                if collecting:
                    gc.enable()

    def _capture(self, launch: Callable[[], None]) -> None:
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            # What was refused has made the capture invalid: its end fails, too, and says less.
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        self._graph.capture_end()

    def replay(self) -> None:
        """Issue all of it on the current stream."""
        self._graph.replay()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures, so that libraries keep one workspace for them."""
    return torch.cuda.Stream(device)
