"""The compute device's part of a decode step for sequences in CPU memory: it attends to their keys
and values as they come up, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from offload.kernels.attention import DecodeAttention
from offload.kernels.qkv import QkvLayout
from offload.kernels.scores import Scores
from offload.kernels.workspace import Workspace
from offload.models.fused.entry import Entry
from offload.models.fused.padding import Padding
from offload.models.kv.host_columns import HostColumns, halves, halves_bytes, quantise_into
from offload.models.kv.layer import KvLayer
from offload.models.kv.streamed_kv import Pairs, StreamedKv, Wanted, piece_bytes
from offload.models.specs.spec import LayerSpec, ModelSpec
from offload.row_copies import columns
from offload.scheduler.kv_pieces import Piece, pieces_of
from offload.store.layout import ALIGNMENT

Halves = tuple[HostColumns, HostColumns]  # keys, values
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _MadeForPlaces(Generic[K, V]):
    """Objects made for the places of `streamed`; all are dropped when the places move."""

    def __init__(self, streamed: StreamedKv) -> None:
        self._streamed = streamed
        self._places: list[torch.Tensor] = []
        self._made: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The object for the key, made with `make` the first time."""
        if self._places is not self._streamed.places:
            self._places = self._streamed.places
            self._made.clear()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class StreamedRows:
    """`CpuRows` to which the compute device attends: new keys and values go down, and those of all
    columns come up through the places of `streamed`.

    One set of buffers for what is new serves all layers of a shape: a layer is done when its own
    have left.
    """

    def __init__(
        self,
        layers: Sequence[KvLayer],
        spec: ModelSpec,
        entry: Entry,
        start: torch.Tensor | None,
        streamed: StreamedKv,
        workspace: Workspace,
    ) -> None:
        """`start`: int32 [batch] on the compute device, the first column of each row; None: 0."""
        common = layers[0].common
        assert common.host is not None
        self.count = layers[0].rows_on_cpu
        self.streamed, self.entry, self.workspace = streamed, entry, workspace
        self.copies = common.host.copies
        # Not `common` itself: it holds the session, which holds this.
        self.writes = common.writes
        self.kept = [_halves_of(layer) for layer in layers]
        split = layers[0].batch_size - self.count
        self.length = entry.length[split:]
        self.start = None if start is None else start[split:]
        self.column = torch.zeros(1, dtype=torch.int32, device=entry.hidden.device)
        keys, _ = self.kept[0]
        self._dtype, self.int8 = keys.dtype, keys.scales is not None
        self._windows = [layer.window for layer in spec.layers]
        self._pieces: dict[torch.Size, list[Piece]] = {}
        self._news: dict[tuple[int, int, int], _New] = {}
        self._sendings: dict[int, Sending] = {}
        # By layer, number of the piece, and place.
        self._columns: _MadeForPlaces[tuple[int, int, int], Halves] = _MadeForPlaces(streamed)
        self._owner = object()
        shapes = [tuple(kept.shape[1:]) for kept, _ in self.kept]
        for capacity in {shape[1] for shape in shapes}:
            alike = [(heads, width) for heads, size, width in shapes if size == capacity]
            streamed.reserve(*piece_bytes(self.count, alike, capacity, self._dtype, self.int8))

    def expect(self, padding: Padding | None) -> None:
        """Nothing to do: `start` is on the compute device, and follows the padding."""

    @property
    def arriving(self) -> Any:
        """The point at which all that was sent down has arrived."""
        return self.writes.arriving

    def staging(self, index: int, spec: LayerSpec) -> Sending:
        """What takes the new keys and values of a layer down."""
        if index not in self._sendings:  # one for all slots
            layout = spec.layout
            key = layout.heads, layout.kv_heads, layout.head_dim
            if key not in self._news:
                self._news[key] = _New.empty(*key, self.count, self.entry.hidden, self.int8)
            self._sendings[index] = Sending(self, self.kept[index], self._news[key])
        return self._sendings[index]

    def starting(self, index: int, spec: LayerSpec, scores: Scores) -> None:
        """No core attends."""

    def attention(
        self, index: int, spec: LayerSpec, scores: Scores, out: torch.Tensor
    ) -> Attending:
        return Attending(self, index, self.staging(index, spec), spec.layout, scores, out)

    def settle(self) -> None:
        """Nothing to do."""

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of a layer."""
        shape = self.kept[index][0].shape
        if shape not in self._pieces:
            head_bytes = 2 * HostColumns.nbytes((1, 1, *shape[2:]), self._dtype, self.int8)
            self._pieces[shape] = pieces_of(self.count, shape[1], head_bytes)
        return self._pieces[shape]

    def wanted(self, index: int, number: int) -> Wanted:
        """What identifies a piece in the step under way."""
        return Wanted(self._owner, index, number, self.entry.past, self.writes.changes)

    def following(self, index: int, number: int) -> Iterator[Wanted]:
        """What is wanted after a piece of this step: its other pieces and, of the next step, if
        that follows, the pieces of layers whose new column was sent down already.
        """
        at, past, last = index, self.entry.past, len(self.kept) - 1
        while True:
            number += 1
            if number == len(self.pieces(index)):
                index, number = index + 1, 0
            if index > last:
                index, past = 0, past + 1
            if past > self.entry.past and (index > at or past > self.entry.past + 1):
                return
            yield Wanted(self._owner, index, number, past, self.writes.changes)

    def first(self, index: int, past: int) -> int:
        """The first column of a layer that any row sees when column `past` is the newest."""
        window = self._windows[index]
        return max(0, past + 1 - window) if window else 0

    def in_place(self, index: int, number: int, place: int) -> Halves:
        """The columns of a piece in a place, [rows, kv_heads, capacity, head_dim]."""

        def made() -> Halves:
            shape = self._shape(index, self.pieces(index)[number])
            with torch.inference_mode(False):
                memory = self.streamed.places[place]
                return halves(memory, shape, self._dtype, self.int8, ALIGNMENT)

        return self._columns.get((index, number, place), made)

    def whole(self, index: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a piece in int8 is converted to numbers, in the same shape."""
        shape = self._shape(index, piece)
        keys, values = halves(self.streamed.whole, shape, self._dtype, False, ALIGNMENT)
        return keys.stored, values.stored

    def _shape(self, index: int, piece: Piece) -> tuple[int, ...]:
        rows, heads = (part.stop - part.start for part in piece)
        return rows, heads, *self.kept[index][0].shape[2:]

    def pairs(self, wanted: Wanted, place: int) -> Pairs:
        """(target, source) of the copies that bring a piece into a place."""
        index, number, past = wanted.layer, wanted.number, wanted.past
        piece, first = self.pieces(index)[number], self.first(index, past)
        found = []
        for kept, up in zip(self.kept[index], self.in_place(index, number, place), strict=True):
            for source, target in kept.part(*piece).beside(up):
                found.append((columns(target, first, past), columns(source, first, past)))
        return found


@dataclass(frozen=True, slots=True)
class _New:
    """What a step adds to a layer. `stored` is what is kept of `staged`: the same, or int8."""

    query: torch.Tensor  # [rows, 1, heads, head_dim]
    staged: Halves  # [rows, kv_heads, 1, head_dim]
    stored: Halves

    @classmethod
    def empty(
        cls, heads: int, kv_heads: int, width: int, rows: int, like: torch.Tensor, int8: bool
    ) -> _New:
        shape = rows, kv_heads, 1, width

        def made(int8: bool) -> Halves:
            size = halves_bytes(shape, like.dtype, int8)
            memory = torch.empty(size, dtype=torch.uint8, device=like.device)
            return halves(memory, shape, like.dtype, int8, ALIGNMENT)

        with torch.inference_mode(False):
            staged = made(False)
            query = torch.empty(rows, 1, heads, width, dtype=like.dtype, device=like.device)
            return cls(query, staged, made(True) if int8 else staged)


class Sending:
    """Sends new keys and values of a layer down, on a queue of their own."""

    def __init__(self, rows: StreamedRows, kept: Halves, new: _New) -> None:
        self._rows, self._kept, self.new = rows, kept, new
        keys, values = new.staged
        self.staged = new.query, keys.stored, values.stored
        self.point: Any = None

    def launch(self, stream: int = 0) -> None:
        rows, new = self._rows, self.new
        past = rows.entry.past
        for kept, staged, stored in zip(self._kept, new.staged, new.stored, strict=True):
            if stored.scales is not None:
                quantise_into(staged.stored, stored.stored, stored.scales, stream)
            for target, source in kept.beside(stored):
                # Noted at once: a pass that breaks off leaves copies on their way.
                self.point = rows.writes.arriving = rows.copies.down(
                    columns(target, past, past + 1), columns(source, 0, 1)
                )


class Attending:
    """Takes a layer's pieces one after the other, completes each with what is new, and attends."""

    def __init__(
        self,
        rows: StreamedRows,
        index: int,
        sending: Sending,
        layout: QkvLayout,
        scores: Scores,
        out: torch.Tensor,
    ) -> None:
        self._rows, self._index, self._sending = rows, index, sending
        self._group, self._scores = layout.group, scores
        self._out = out.view(rows.count, layout.heads, layout.head_dim)
        # By piece and place.
        self._calls: _MadeForPlaces[tuple[int, int], DecodeAttention]
        self._calls = _MadeForPlaces(rows.streamed)

    def launch(self, stream: int = 0) -> None:
        """Issue all of it; the host waits for nothing."""
        rows, index = self._rows, self._index
        for number in range(len(rows.pieces(index))):
            place = rows.streamed.take(rows.wanted(index, number), rows)
            rows.streamed.ahead(rows.following(index, number), rows)
            self._attend(number, place, stream)
            rows.streamed.give_back()
            rows.streamed.ahead(rows.following(index, number), rows)
        # What was sent has left: the next layer's are put there, or others get the memory.
        rows.copies.wait(self._sending.point)

    def _attend(self, number: int, place: int, stream: int) -> None:
        rows, index = self._rows, self._index
        past, piece = rows.entry.past, rows.pieces(index)[number]
        seen = slice(rows.first(index, past), past + 1)
        found = rows.in_place(index, number, place)
        whole = rows.whole(index, piece) if rows.int8 else (None, None)
        for up, new, wide in zip(found, self._sending.new.stored, whole, strict=True):
            for target, source in up.beside(new.part(*piece)):
                target[:, :, past].copy_(source[:, :, 0])
            if wide is not None and up.scales is not None:
                codes, scales = up.stored[:, :, seen], up.scales[:, :, seen]
                torch.mul(codes, scales[..., None], out=wide[:, :, seen])
        call = self._calls.get((number, place), lambda: self._make(number, place))
        call.launch(stream)

    def _make(self, number: int, place: int) -> DecodeAttention:
        rows, index = self._rows, self._index
        piece = batch, heads = rows.pieces(index)[number]
        keys, values = (up.stored for up in rows.in_place(index, number, place))
        if rows.int8:
            keys, values = rows.whole(index, piece)
        queries = slice(heads.start * self._group, heads.stop * self._group)
        with torch.inference_mode(False):
            return DecodeAttention(
                self._sending.new.query[batch, 0, queries],
                keys,
                values,
                self._out[batch, queries],
                length=rows.length[batch],
                start=None if rows.start is None else rows.start[batch],
                scores=self._scores.of_heads(queries),
                workspace=rows.workspace,
                even=rows.start is None,
            )


def _halves_of(layer: KvLayer) -> Halves:
    assert layer.host_keys is not None and layer.host_values is not None
    return layer.host_keys, layer.host_values
