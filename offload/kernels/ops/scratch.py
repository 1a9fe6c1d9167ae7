"""Scratch memory of the ops' calls: one of a stream's own, or a captured graph's."""

from __future__ import annotations

import torch

from offload.kernels.call import current_stream
from offload.kernels.workspace import Workspace


class _Scratch(Workspace):
    """Memory of one call's own, taken where a graph is captured: there it is the graph's."""

    def partials(self, nbytes: int) -> torch.Tensor:
        return torch.empty(-(-nbytes // 4), dtype=torch.float32, device=self.device)

    def counters(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device=self.device)


_workspaces: dict[tuple[int | None, int], Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """Scratch for a call on torch's current stream, which runs one call after another."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return _Scratch(device)
    key = device.index, current_stream(device)
    return _workspaces.setdefault(key, Workspace(device))
