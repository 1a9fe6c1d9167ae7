"""What a two-dimensional attention mask says: where each row's tokens begin."""

from __future__ import annotations

import torch


def left_padding(mask: torch.Tensor) -> tuple[torch.Tensor | None, str | None]:
    """Where the tokens of each row begin, int32 [batch], or None where nothing is padded there.

    mask: [batch, columns], zero where a column is padding. Padding behind a row's tokens needs no
    start: what is causal never sees it. With a hole in a row, or a row without tokens, the second
    value says so. Waits for the mask's values once.
    """
    seen = mask != 0
    count = seen.sum(1)
    columns = seen.shape[1]
    first = seen.int().argmax(1)  # of several equal ones the first
    end = columns - seen.flip(1).int().argmax(1)
    holes = ((end - first != count) | (count == 0)).any()
    some_holes, some_padding = torch.stack([holes, (first > 0).any()]).tolist()
    if some_holes:
        return None, "an attention mask with holes"
    return (first.int() if some_padding else None), None
