"""What a two-dimensional attention mask says: where each row's tokens begin and end."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Padding:
    """Row b's tokens are in columns start[b] <= j < end[b]; int32 [batch], on the mask's device.

    A row without tokens begins and ends behind the last column.
    """

    start: torch.Tensor
    end: torch.Tensor
    at_end: bool  # whether any row ends before the last column


class Holes(ValueError):
    """A mask with padding between a row's tokens."""


def read_padding(mask: torch.Tensor) -> Padding | None:
    """The padding of mask [batch, columns], zero where a column is padding; None where it has none.

    Raises Holes. Waits for the mask's values once.
    """
    seen = mask != 0
    columns = seen.shape[1]
    count = seen.sum(1)
    empty = count == 0
    start = seen.int().argmax(1).masked_fill(empty, columns)  # of equal ones the first
    end = columns - seen.flip(1).int().argmax(1)  # for an empty row: all columns
    holes = (end - start != count).any()
    some = torch.stack([holes, (start > 0).any(), (end < columns).any()]).tolist()
    if some[0]:
        raise Holes("an attention mask with holes")
    if not (some[1] or some[2]):
        return None
    return Padding(start.int(), end.int(), some[2])
