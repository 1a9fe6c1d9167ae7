"""What a two-dimensional attention mask says: where each row's tokens begin and end."""

from __future__ import annotations

import ctypes
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


class PaddingCheck:
    """Whether masks have just this padding on the left and nothing else.

    The answer is on its way to the host when `ask` returns, so that work can be issued before
    `holds` waits for it: decoding expects the padding that it found before. Another call may give
    the answer in its place: between `begin` and `asked` it sets `answer` to False where the mask
    is not zero before `start` (int32 [batch]; None: 0) and nonzero from there on.
    """

    def __init__(self, padding: Padding | None, columns: int, device: torch.device) -> None:
        """For masks [batch, up to `columns`] on `device`."""
        self.start = None if padding is None else padding.start
        self._expected: torch.Tensor | None = None
        with torch.inference_mode(False):
            if padding is not None:
                column = torch.arange(columns, device=device)
                self._expected = column >= padding.start[:, None]
            self._found = torch.empty((), dtype=torch.bool, device=device)
            self.answer = self._found  # in host memory
            self._event: torch.cuda.Event | None = None
            if device.type == "cuda":
                self.answer = torch.empty((), dtype=torch.bool, pin_memory=True)
                self._event = torch.cuda.Event()
        self._flag = ctypes.c_bool.from_address(self.answer.data_ptr())

    def ask(self, mask: torch.Tensor) -> None:
        """Issue the check of mask [batch, columns], zero where a column is padding."""
        if self._expected is None:
            torch.all(mask, out=self._found)
        else:
            as_expected = (mask != 0) == self._expected[:, : mask.shape[1]]
            torch.all(as_expected, out=self._found)
        if self._event is not None:
            self.answer.copy_(self._found, non_blocking=True)
            self._event.record()

    def begin(self) -> None:
        """A call that gives the answer is about to be issued."""
        self._flag.value = True

    def asked(self, stream: torch.cuda.Stream | None) -> None:
        """It was issued, on `stream`."""
        if self._event is not None:
            self._event.record(stream)

    def holds(self) -> bool:
        """Of the mask asked last. Waits for what was issued before the check, not for what came
        after it.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._flag.value
