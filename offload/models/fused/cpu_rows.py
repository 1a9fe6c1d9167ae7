"""What a decode step asks of sequences whose keys and values are in CPU memory, whoever attends."""

from __future__ import annotations

from typing import Protocol

import torch

from offload.kernels.call import Launchable
from offload.kernels.scores import Scores
from offload.models.fused.padding import Padding
from offload.models.specs.spec import LayerSpec


class Staging(Launchable, Protocol):
    """Takes what a step adds to a layer; its launch sends that on its way to CPU memory."""

    @property
    def staged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where to write it: queries [rows, 1, heads, head_dim], and keys and values as a cache
        of one column, [rows, kv_heads, 1, head_dim].
        """


class CpuRows(Protocol):
    """The last rows of a session's batch: `HostRows`, to which CPU cores attend, or `StreamedRows`,
    which come up to the compute device.

    In each layer a step fills what `staging` gives and launches it, then `starting`, where there is
    such a call, and then `attention`; what it issues between the last two runs meanwhile.
    """

    @property
    def column(self) -> torch.Tensor:
        """int32 [1] on the compute device: the column of the staged keys and values, 0."""

    def expect(self, padding: Padding | None) -> None:
        """The next steps' padding, of all rows of the batch."""

    def staging(self, index: int, spec: LayerSpec) -> Staging:
        """What takes the new queries, keys and values of the layer `index`."""

    def starting(self, index: int, spec: LayerSpec, scores: Scores) -> Launchable | None:
        """The call that sets CPU cores to work on the layer `index`; None where none attend."""

    def attention(
        self, index: int, spec: LayerSpec, scores: Scores, out: torch.Tensor
    ) -> Launchable:
        """The call that puts the attention of the layer `index` in out [rows, width]."""

    def settle(self) -> None:
        """Return when CPU cores are at work on nothing, also after a step that broke off."""
