"""What attention makes of a query and the columns that it sees, for every op that attends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload.kernels.call import check


@dataclass(frozen=True)
class Scores:
    """The score of column j for query head h: s = scale * q.k, made softcap * tanh(s / softcap)
    where there is a `softcap`, plus slopes[h] * j (ALiBi, arXiv:2108.12409).

    With a `window`, the last so many columns of a row count alone. sinks[h] adds exp(sinks[h]) to
    the softmax's sum (arXiv:2309.17453). slopes, sinks: float32 [heads].
    """

    scale: float
    softcap: float = 0.0  # 0: none
    window: int = 0  # 0: none
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def check(self, op: str, heads: int, like: torch.Tensor) -> None:
        """Refuse what `op` cannot use for queries like `like` of so many heads."""
        for name, values in (("slopes", self.slopes), ("sinks", self.sinks)):
            if values is not None:
                check(op, name, values, (heads,), like, dtype=torch.float32)
        if not 0 <= self.window < 2**31:
            raise ValueError(f"{op}: window must be 0 (none) or more, not {self.window}")
        if not 0 <= self.softcap < float("inf"):
            raise ValueError(f"{op}: softcap must be 0 (none) or more, not {self.softcap}")

    def of_heads(self, part: slice) -> Scores:
        """Those of some of the query heads."""
        slopes, sinks = (None if x is None else x[part] for x in (self.slopes, self.sinks))
        return replace(self, slopes=slopes, sinks=sinks)

    def on_cpu(self) -> Scores:
        """The same for queries on the CPU."""
        slopes, sinks = (None if x is None else x.cpu() for x in (self.slopes, self.sinks))
        return replace(self, slopes=slopes, sinks=sinks)
