"""Where a decode step's token comes in: fixed places that a graph reads, and what is made of it."""

from __future__ import annotations

import torch

from offload.models.fused.around import Ahead
from offload.models.specs.spec import Angles


class Entry:
    """The ids and positions of a step, and what the layers read: `hidden` [batch, width], `angles`
    by table, the `column` of the new token (int32 [1]) and the columns that count then, `length`
    (int32 [batch]).

    `take` copies in what is new, as does a call that writes to `ids` and `positions` (int64 [batch,
    1]) and says so by `taken`; `run` computes the rest and nothing but that, so that it may be
    replayed.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        batch, device = hidden.shape[0], hidden.device
        self.hidden = hidden
        self.angles: dict[str, Angles] = {}
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._counters = torch.zeros(1 + batch, dtype=torch.int32, device=device)
        self.column, self.length = self._counters[:1], self._counters[1:]
        self.past = 0  # columns ahead of the new token's, as the host knows
        self._at: int | None = None  # what `column` is, as far as is known

    def take(self, ids: torch.Tensor | None, positions: torch.Tensor | None, past: int) -> None:
        """The next token goes to column `past`; int64 [batch, 1] and [1 or batch, 1].

        Positions that are None are `past`.
        """
        if ids is not None:
            self.ids.copy_(ids)
        if positions is None:
            self.positions.fill_(past)
        else:
            self.positions.copy_(positions)
        self.taken(past)

    def taken(self, past: int) -> None:
        """Ids and positions of the token for column `past` are in their places."""
        self.past = past
        at, self._at = self._at, None
        if at != past - 1:  # otherwise `run` counts on from the step before
            self.column.fill_(past - 1)
            self.length.fill_(past)

    def run(self, ahead: Ahead, embeddings: torch.Tensor | None = None) -> None:
        """From what was taken in, or from `embeddings` [batch, 1, width] and its positions."""
        hidden = ahead.hidden(self.ids, embeddings, self.positions)
        self.hidden.copy_(hidden[:, 0])
        for table, given in ahead.angles(self.positions).items():
            if table not in self.angles:
                shape, device = (self.hidden.shape[0], 1, given[0].shape[-1]), self.hidden.device
                with torch.inference_mode(False):
                    self.angles[table] = (
                        torch.empty(shape, dtype=torch.float32, device=device),
                        torch.empty(shape, dtype=torch.float32, device=device),
                    )
            for mine, new in zip(self.angles[table], given, strict=True):
                mine.copy_(new)
        self._counters.add_(1)

    def passed(self, past: int) -> None:
        """`run` was issued once for the column `past`."""
        self._at = past
