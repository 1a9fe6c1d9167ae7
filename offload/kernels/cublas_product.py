"""A product by torch's library, whole or in pieces: of many rows, whichever is quickest here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from offload.kernels import tuning
from offload.kernels.call import on_stream
from offload.kernels.choices import Choice, Key, dtype_name

MEASURED_ROWS = 2048  # products of fewer rows are too short to gain anything
# The least size of a piece, and what sizes are multiples of: no tile of cuBLAS is larger, and
# pieces begin at addresses as aligned as the whole's.
LEAST_PIECE = 2048
GRAIN = 256
ROW_PIECES = (2, 4, 8)
COLUMN_PIECES = (2, 3, 4, 6)
GAIN = 0.99  # of the whole's time: less of a gain is noise
WHOLE = Choice("whole")


class CublasProduct:
    """out = x @ w, or added + x @ w.

    x: [rows, depth], w: [depth, outputs], out: [rows, outputs], views with rows at one stride (w
    may be the transpose of one). added: [outputs], or `out` itself.

    cuBLAS picks its kernel by a heuristic, and for some shapes it picks so much better for a part
    that several products, of parts of the rows or of the outputs, take less time than one. So from
    2048 rows on, on a GPU, the way is looked up in the table of `choices`, for rows up to the next
    power of two. If it is not there, the first launch measures it on the product's own tensors (for
    half a second at most, without more memory). `choice` ("whole", "rows", "columns") forces it. A
    product is not measured, and is computed whole, if it has fewer rows, runs on a CPU, adds to
    `out`, or is captured in a graph before it was measured.
    """

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        added: torch.Tensor | None = None,
        choice: Choice | None = None,
    ) -> None:
        self._x, self._w, self._out, self._added = x, w, out, added
        if choice is None and (not measurable(x) or added is out):
            choice = WHOLE
        self.choice = choice  # None: not looked up yet
        self._calls = None if choice is None else self.calls(choice)

    def launch(self, stream: int = 0) -> None:
        """Issue the product on `stream` (a cudaStream_t as a number; the CPU has none)."""
        with on_stream(self._x.device, stream):
            for call in self._calls or self._look_up():
                call()

    def calls(self, choice: Choice) -> tuple[Callable[[], Any], ...]:
        """torch's products, one a piece."""
        if choice.way == "rows":
            return tuple(self._piece(rows=part) for part in cut(self._out.shape[0], choice.splits))
        if choice.way == "columns":
            parts = cut(self._out.shape[1], choice.splits)
            return tuple(self._piece(columns=part) for part in parts)
        return (_product(self._x, self._w, self._out, self._added),)

    def _piece(self, rows: slice = slice(None), columns: slice = slice(None)) -> Callable[[], Any]:
        out, added = self._out[rows, columns], self._added
        if added is self._out:
            added = out
        elif added is not None:
            added = added[columns]
        return _product(self._x[rows], self._w[:, columns], out, added)

    def _look_up(self) -> tuple[Callable[[], Any], ...]:
        device = self._x.device
        times: dict[Choice, float] = {}

        def candidates() -> tuple[Choice, ...]:
            tried = ways(*self._out.shape)
            found = tuning.time_turns([self._run(way) for way in tried], device)
            times.update(zip(tried, found, strict=False))
            worth = GAIN * times[WHOLE]
            return tuple(way for way, us in times.items() if way == WHOLE or us < worth)

        choice = tuning.pick(self._key(), device, candidates, times.__getitem__, otherwise=WHOLE)
        calls = self.calls(choice)
        if not tuning.captured(device):  # else it may be WHOLE for want of a measurement
            self.choice, self._calls = choice, calls
        return calls

    def _run(self, choice: Choice) -> Callable[[], None]:
        calls = self.calls(choice)

        def run() -> None:
            for call in calls:
                call()

        return run

    def _key(self) -> Key:
        rows, outputs = self._out.shape
        return Key(
            dtype=dtype_name(self._x.dtype),
            outputs=outputs,
            depth=self._x.shape[1],
            rows=1 << (rows - 1).bit_length(),
            transposed=self._w.stride(1) == 1,
            bias=self._added is not None,
        )


def _product(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None
) -> Callable[[], Any]:
    """torch's product. cuBLAS takes tensors with rows at one stride as they are, `out` too, and
    adds to `out` without a copy where `added` is the same tensor.
    """
    if added is None:
        return lambda: torch.mm(x, w, out=out)
    return lambda: torch.addmm(added, x, w, out=out)


def ways(rows: int, outputs: int) -> tuple[Choice, ...]:
    """The ways that may be the quickest, the whole product first."""
    sides: list[tuple[Literal["rows", "columns"], int, tuple[int, ...]]] = [
        ("rows", rows, ROW_PIECES),
        ("columns", outputs, COLUMN_PIECES),
    ]
    return WHOLE, *(
        Choice(way, splits=count)
        for way, size, counts in sides
        for count in counts
        if size >= count * LEAST_PIECE
    )


def cut(size: int, count: int) -> list[slice]:
    """`size` in `count` pieces, or fewer: multiples of `GRAIN`, but for the last one."""
    step = -(-size // (count * GRAIN)) * GRAIN
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def measurable(x: torch.Tensor) -> bool:
    """Whether a product of these rows is worth a measurement."""
    return x.device.type == "cuda" and x.shape[0] >= MEASURED_ROWS
