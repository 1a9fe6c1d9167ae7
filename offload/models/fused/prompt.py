"""Many tokens of every sequence through one layer after another, some sequences at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels.workspace import Workspace
from offload.models.fused.block import Prefill, run_block
from offload.models.fused.layer_weights import LayerWeights
from offload.models.fused.padding import Padding
from offload.models.fused.prefill_attention import PrefillAttention
from offload.models.kv.host_columns import SCALE, HostColumns, quantise_into
from offload.models.kv.layer import KvLayer
from offload.models.specs.spec import Angles, LayerSpec
from offload.row_copies import RowCopies, columns
from offload.scheduler.kv_pieces import evenly

Buffers = tuple[torch.Tensor, torch.Tensor]  # keys, values: [rows, kv_heads, columns, head_dim]
Parts = tuple[torch.Tensor, torch.Tensor | None]  # numbers, or codes and their scales


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The sequences first to last - 1, whose keys and values are all on the compute device, or all
    in CPU memory.
    """

    first: int
    last: int
    on_cpu: bool
    work: Prefill


class Room:
    """Memory on the compute device for what blocks need while they run over many tokens.

    Passes that alternate on one stream, layer by layer, have it in turns: what is in it is of use
    to one layer of one of them.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.workspace = Workspace(device)  # of large products
        self.buffers: dict[str, torch.Tensor] = {}
        self.turn = 0  # which of two stages for keys and values is next
        self.points: list[Any] = [None, None]  # at which each is free again


class Prompt:
    """A pass over `hidden` [batch, tokens, width], contiguous, which becomes the last one's output.

    All of it stays on the compute device; what a block needs between its products is there for one
    chunk at a time, of up to `rows` tokens (None: of all, one sequence at least), and so are the
    keys and values of sequences that keep theirs in CPU memory, the last `on_cpu` ones: they are
    copied down while the next chunk is computed. A layer's weights serve all chunks before the next
    layer's are asked for.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        *,
        past: int,
        padding: Padding | None,
        angles: Mapping[str, Angles],
        on_cpu: int,
        rows: int | None,
        stream: int,
        workspace: Workspace,
        room: Room,
        copies: RowCopies,
    ) -> None:
        batch, tokens, _ = hidden.shape
        self._hidden, self._past, self._end = hidden, past, past + tokens
        self._copies, self._room = copies, room
        at_once = batch if rows is None else max(1, rows // tokens)
        split = batch - on_cpu
        # No chunk has sequences of both kinds: those in CPU memory go by way of a stage.
        spans = [(*span, False) for span in evenly(0, split, at_once)]
        spans += [(*span, True) for span in evenly(split, batch, at_once)]
        column = torch.full((1,), past, dtype=torch.int32, device=hidden.device)
        common = PrefillAttention(past, tokens, None)
        self._chunks = [
            _Chunk(
                first,
                last,
                below,
                Prefill(
                    attention=common
                    if padding is None
                    else PrefillAttention(past, tokens, _of(padding, first, last), 1 / len(spans)),
                    column=column,
                    end=self._end,
                    angles={name: _rows_of(pair, first, last) for name, pair in angles.items()},
                    stream=stream,
                    workspace=workspace,
                    buffers=room.buffers,
                ),
            )
            for first, last, below in spans
        ]

    def run(self, spec: LayerSpec, weights: LayerWeights, kv: KvLayer | None) -> None:
        """Run one layer. `kv`, which has room for the tokens, gets their keys and values; None:
        they are not kept.
        """
        for chunk in self._chunks:
            hidden = self._hidden[chunk.first : chunk.last]
            if kv is None:
                self._copies.wait(self._room.points[0])
                run_block(spec, weights, hidden, *self._stage(spec, chunk, 0), chunk.work)
            elif chunk.on_cpu:
                self._through_stage(spec, weights, chunk, hidden, kv)
            else:
                assert kv.key_buffer is not None and kv.value_buffer is not None
                rows = slice(chunk.first, chunk.last)
                kept = kv.key_buffer[rows], kv.value_buffer[rows]
                run_block(spec, weights, hidden, *kept, chunk.work)

    def finish(self) -> None:
        """What is computed from now on comes after the last copy, as the stages' memory is given
        back.
        """
        for point in self._room.points:
            self._copies.wait(point)

    def _through_stage(
        self,
        spec: LayerSpec,
        weights: LayerWeights,
        chunk: _Chunk,
        hidden: torch.Tensor,
        kv: KvLayer,
    ) -> None:
        """A chunk whose keys and values are in CPU memory."""
        assert kv.host_keys is not None and kv.host_values is not None
        room = self._room
        turn, room.turn = room.turn, 1 - room.turn
        self._copies.wait(room.points[turn])
        skip = self._hidden.shape[0] - kv.host_keys.shape[0]
        rows = slice(chunk.first - skip, chunk.last - skip)
        kept = kv.host_keys[rows], kv.host_values[rows]
        # Codes that are made of it leave, and then it is free again at once.
        int8 = kv.host_keys.scales is not None
        stage = self._stage(spec, chunk, 0 if int8 else turn)
        plain: list[Parts] = [(staged, None) for staged in stage]
        sent = self._codes(stage, chunk, turn) if int8 else plain
        if self._past:  # what earlier turns left is seen, too; it was there when they finished
            for staged, parts, own in zip(stage, sent, kept, strict=True):
                for part, place in _pairs(parts, own):
                    self._copies.up(columns(part, 0, self._past), columns(place, 0, self._past))
                codes, scales = (x if x is None else x[:, :, : self._past] for x in parts)
                if codes is not None and scales is not None:
                    torch.mul(codes, scales[..., None], out=staged[:, :, : self._past])
        run_block(spec, weights, hidden, *stage, chunk.work)
        kv.common.writes.changes += 1
        for staged, parts, own in zip(stage, sent, kept, strict=True):
            codes, scales = parts
            if scales is not None:
                quantise_into(staged, codes, scales, chunk.work.stream)
            for part, place in _pairs(parts, own):
                # Noted at once: a pass that breaks off leaves copies on their way.
                kv.common.writes.arriving = room.points[turn] = self._copies.down(
                    columns(place, self._past, self._end), columns(part, self._past, self._end)
                )

    def _stage(self, spec: LayerSpec, chunk: _Chunk, turn: int) -> Buffers:
        """Memory on the compute device for a chunk's keys and values, of any content."""
        layout = spec.layout
        shape = (chunk.last - chunk.first, layout.kv_heads, self._end, layout.head_dim)
        keys, values = (
            chunk.work.scratch(f"staged {name} {turn}", shape, self._hidden)
            for name in ("keys", "values")
        )
        return keys, values

    def _codes(self, stage: Buffers, chunk: _Chunk, turn: int) -> list[Parts]:
        """The same for what stands for them in int8."""
        device = self._hidden.device
        found: list[Parts] = []
        for name, staged in zip(("keys", "values"), stage, strict=True):
            codes, scales = (
                chunk.work.scratch(f"{what} of {name} {turn}", tuple(shape), like)
                for what, shape, like in (
                    ("codes", staged.shape, torch.empty(0, dtype=torch.int8, device=device)),
                    ("scales", staged.shape[:-1], torch.empty(0, dtype=SCALE, device=device)),
                )
            )
            found.append((codes, scales))
        return found


def _of(padding: Padding, first: int, last: int) -> Padding:
    return Padding(padding.start[first:last], padding.end[first:last], padding.at_end)


def _rows_of(angles: Angles, first: int, last: int) -> Angles:
    cos, sin = angles
    if cos.shape[0] > 1:
        cos, sin = cos[first:last], sin[first:last]
    return cos.contiguous(), sin.contiguous()


def _pairs(parts: Parts, own: HostColumns) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What goes where, on the compute device and in CPU memory."""
    for part, place in zip(parts, (own.stored, own.scales), strict=True):
        if part is not None and place is not None:
            yield part, place
