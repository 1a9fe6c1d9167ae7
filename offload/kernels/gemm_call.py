"""What the calls of products share: scratch memory of the size that the library names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.kernels.call import Call
from offload.kernels.workspace import Workspace


class GemmCall(Call):
    """A product whose sums may be in parts; the library tells the scratch and the ways it has.

    Its struct has `workspace`, `workspace_bytes` and `counters`, and beside `function` the library
    has the same name with `_workspace`, `_counters` and `_variants` behind it.
    """

    arguments: Any

    def _reserve(self, workspace: Workspace | None, device: torch.device) -> None:
        """Give the call the scratch that the library says it needs, where it runs on a GPU."""
        self._device = device
        if not self._on_gpu:
            return
        workspace = workspace or Workspace(device)
        nbytes, counters = self._ask("workspace"), self._ask("counters")
        self._scratch: Sequence[torch.Tensor] = (
            workspace.partials(nbytes),
            workspace.counters(counters),
        )
        self.arguments.workspace = self._scratch[0].data_ptr() if nbytes else None
        self.arguments.workspace_bytes = nbytes
        self.arguments.counters = self._scratch[1].data_ptr() if counters else None

    @property
    def variants(self) -> int:
        """How many ways the library has to run this call; 1 on a CPU."""
        return self._ask("variants") if self._on_gpu else 1

    def _ask(self, what: str) -> int:
        with torch.cuda.device(self._device):
            return self._library.ask(f"{self.function}_{what}", self.arguments)
