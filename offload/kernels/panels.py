"""Weights in `panels`, the order in which tensor cores take their codes: that order in torch's own
operations, both ways.

The weights are the 16-row operand A of `mma.sync.m16n8k16`, whose lane 4 g + t, g below 8 and t
below 4, holds of every 16 columns 4 in the rows g and g + 8. 16 rows and 256 / b columns of codes
of b bits are 512 bytes, 16 a lane, lane after lane: 4 little-endian words.

int4: the word 2 h + s is the operand of one product: the columns 32 h + 8 t + 4 s + (0, 1, 2, 3)
      of the 64. Its nibbles, the lowest first, are column 0 of the rows g and g + 8, column 2 of
      both, column 1, column 3: so that `word >> 4 i & 0x000f000f` are the operand's four registers.
int8: the word 2 j + p holds of the row g + 8 p the columns 8 t + 4 j + (0, 2, 1, 3) of the 32, in
      this order: two registers are `word >> 8 i & 0x00ff00ff`.

So a lane's activations are 8 neighbours, one load for two products. Panels of weights that act as
one are those of each, one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels.packing import pack_words, unpack_awq, unpack_words
from offload.kernels.weight_format import PANEL_BYTES, PANEL_ROWS, WeightFormat

# What each stored tensor becomes, of as many bytes.
RENAMED = {
    "weight_packed": "weight_panels",
    "weight_scale": "weight_panel_scale",
    "weight_zero_point": "weight_panel_zero",
    "qweight": "weight_panels",
    "scales": "weight_panel_scale",
    "qzeros": "weight_panel_zero",
}
_ROWS = PANEL_ROWS // 2  # a lane has one of the first half, and one of the second


def panels_of(form: WeightFormat, shape: tuple[int, ...]) -> WeightFormat | None:
    """The format of a weight [N, K] once it is arranged in panels; None where it cannot be."""
    if form.layout not in ("packed", "gptq", "gptq_v2", "awq"):
        return None
    if form.act_order or form.block[0] != 1 or len(shape) != 2:
        return None
    zeros = form.zero_points or form.layout != "packed"
    try:
        panels = WeightFormat(form.kind, "panels", form.block, zeros)
        panels.check_shape(shape)
    except ValueError:
        return None
    return panels


def rows_of(form: WeightFormat) -> WeightFormat:
    """The format of a weight in panels once it lies in rows again."""
    return WeightFormat(form.kind, "packed", form.block, form.zero_points)


def in_panels(form: WeightFormat, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the same weight as `panels_of` has it, by the ends of their names."""
    return {"weight_panels": codes_in_panels(form, stored), **scales_in_panels(form, stored)}


def codes_in_panels(form: WeightFormat, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of `in_panels` the codes; `Arrange` does the same at HBM's rate."""
    if form.layout == "awq":
        words = pack_words(unpack_awq(stored["qweight"]).T.contiguous(), form.bits)
    else:
        words = stored["weight_packed"] if form.layout == "packed" else stored["qweight"].T
    return pack_panels(words, form.bits)


def scales_in_panels(
    form: WeightFormat, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of `in_panels` all but the codes."""
    scales = _scales(form, stored)
    found = {"weight_panel_scale": pair_rows(scales)}
    zeros = _zeros(form, stored, *scales.shape)
    if zeros is not None:
        pairs = pair_rows(zeros)
        found["weight_panel_zero"] = pairs[..., 0] | pairs[..., 1] << 4 if form.bits == 4 else pairs
    return found


def in_rows(form: WeightFormat, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, by the ends of their names, of a weight in panels as `rows_of` has it."""
    found = {"weight_packed": unpack_panels(stored["weight_panels"], form.bits)}
    found["weight_scale"] = unpair_rows(stored["weight_panel_scale"])
    if form.zero_points:
        zeros = panel_zeros(stored["weight_panel_zero"])
        found["weight_zero_point"] = pack_words(zeros.T, form.bits).T.contiguous()
    return found


def pack_panels(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `bits` (4 or 8) bits along the columns, int32 [N, K bits / 32] -> uint8
    [N / 16, K / C, 512].
    """
    # A row's words of a panel are h, t of int4 and t, j of int8.
    tiles = words.reshape(-1, 2, _ROWS, words.shape[1] // 8, *((2, 4) if bits == 4 else (4, 2)))
    if bits == 4:
        first, second = tiles.permute(1, 0, 3, 2, 5, 4)  # tile, panel, g, t, h
        pairs = [_spread(first >> 16 * s) | _spread(second >> 16 * s) << 4 for s in range(2)]
        lanes = torch.stack(pairs, -1)
    else:
        lanes = _swap(tiles.permute(0, 3, 2, 4, 5, 1).contiguous())  # tile, panel, g, t, j, p
    return lanes.view(torch.uint8).reshape(tiles.shape[0], -1, PANEL_BYTES)


def unpack_panels(panels: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N / 16, K / C, 512] -> the codes along the columns, int32 [N, K bits / 32]."""
    lanes = panels.contiguous().view(torch.int32).unflatten(-1, (_ROWS, 4, 2, 2))
    if bits == 4:  # tile, panel, g, t, h, s
        low, high = lanes.unbind(-1)
        rows = [_gather(low >> 4 * p) | _gather(high >> 4 * p) << 16 for p in range(2)]
        ordered = torch.stack(rows, 1).permute(0, 1, 3, 2, 5, 4)
    else:  # tile, panel, g, t, j, p
        ordered = _swap(lanes).permute(0, 5, 2, 1, 3, 4)
    return ordered.reshape(PANEL_ROWS * panels.shape[0], -1)


def _spread(codes: torch.Tensor) -> torch.Tensor:
    """4 codes of 4 bits in the low half of a word -> a byte each, in the order of a panel."""
    return (codes & 0x0F0F) | (codes & 0xF0F0) << 12


def _gather(word: torch.Tensor) -> torch.Tensor:
    """The same back, of the low halves of a word's bytes."""
    return (word & 0x0F0F) | (word >> 12 & 0xF0F0)


def _swap(word: torch.Tensor) -> torch.Tensor:
    """4 codes of 8 bits in the order of a panel, or back: the two in the middle change places."""
    return (word & -0xFFFF01) | (word & 0xFF00) << 8 | (word >> 8 & 0xFF00)


def pair_rows(grid: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [N / 16, G, 8, 2]: of 16 rows the first and second half beside each other."""
    tiles = grid.reshape(-1, 2, _ROWS, grid.shape[1])
    return tiles.permute(0, 3, 2, 1).contiguous()


def unpair_rows(pairs: torch.Tensor) -> torch.Tensor:
    """[N / 16, G, 8, 2] -> [N, G]."""
    return pairs.permute(0, 3, 2, 1).reshape(-1, pairs.shape[1])


def panel_zeros(stored: torch.Tensor) -> torch.Tensor:
    """The zeros of panels, [N / 16, G, 8] of int4 or [N / 16, G, 8, 2] -> uint8 [N, G]."""
    if stored.dim() == 3:
        stored = torch.stack((stored & 15, stored >> 4), -1)
    return unpair_rows(stored)


def _scales(form: WeightFormat, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Its scales, [N, G]."""
    if form.layout != "packed":
        return stored["scales"].T
    scales = stored["weight_scale"]
    return scales.reshape(scales.shape[0], -1)


def _zeros(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], outputs: int, groups: int
) -> torch.Tensor | None:
    """Its zero points as they count, uint8 [N, G]; None where it has none."""
    if form.layout == "awq":
        return unpack_awq(stored["qzeros"]).T
    if form.layout != "packed":
        zeros = unpack_words(stored["qzeros"], form.bits, outputs).T
        return (zeros + 1) & ((1 << form.bits) - 1) if form.layout == "gptq" else zeros
    if not form.zero_points:
        return None
    words = stored["weight_zero_point"].reshape(-1, groups)
    return unpack_words(words.T, form.bits, outputs).T
