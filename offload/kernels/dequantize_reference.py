"""Stored weights -> weights in torch's own operations: the reference for every format that is read
or written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.kernels.packing import decode_e2m1, decode_e8m0, unpack_awq, unpack_words
from offload.kernels.panels import panel_zeros, unpack_panels, unpair_rows
from offload.kernels.weight_format import PANEL_ROWS, WeightFormat

# Elements that are worked on at once: their float32 stays in a processor's cache.
CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24  # on a GPU: enough to fill it
_ROWS = 32  # chunks begin at multiples: no word of packed rows is cut, nor a panel


def dequantise_reference(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], out: torch.Tensor
) -> None:
    """Fill out, [N, K] (of `gpt_oss` [E, K, N]), with the weight that `stored` stands for.

    Computed in float32 and rounded once to the dtype of `out`. Nothing is checked.
    """
    if form.layout == "gpt_oss":
        for expert, target in enumerate(out):
            part = {name: tensor[expert] for name, tensor in stored.items()}
            _fill(form, part, target.transpose(0, 1))
    else:
        _fill(form, stored, out)


def _fill(form: WeightFormat, stored: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Fill out [N, K] chunk by chunk of its rows."""
    rows, columns = out.shape
    elements = CHUNK if out.device.type == "cpu" else DEVICE_CHUNK
    step = max(_ROWS, elements // columns // _ROWS * _ROWS)
    index = stored.get("g_idx", stored.get("weight_g_idx")) if form.act_order else None
    for low in range(0, rows, step):
        high = min(low + step, rows)
        code, zero, scale = _rows(form, stored, low, high, columns)
        value = code.float()
        if index is None and columns % scale.shape[1] == 0 and columns % (form.block[1] or 1) == 0:
            value = value.unflatten(1, (scale.shape[1], -1))
            zero, scale = zero[..., None] if zero is not None else None, scale[..., None]
        else:
            zero = _spread(zero, form, columns, index) if zero is not None else None
            scale = _spread(scale, form, columns, index)
        if zero is not None:
            value = value - zero
        out[low:high] = (value * scale).reshape(high - low, columns)


def _spread(
    grid: torch.Tensor, form: WeightFormat, columns: int, index: torch.Tensor | None
) -> torch.Tensor:
    """[n, G] -> [n, columns]: to every column the value of its group."""
    if index is not None:
        return grid[:, index.long()]
    return grid.repeat_interleave(form.block[1], 1)[:, :columns]


def _rows(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], low: int, high: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Of the rows [low, high): codes [n, K], zeros [n, G] in the same numbers or None, and scales
    [n, G] in float32.
    """
    layout, bits, per, n = form.layout, form.bits, form.per_word, high - low
    zero: torch.Tensor | None = None
    words: slice | torch.Tensor
    if layout in ("gptq", "gptq_v2", "awq"):
        words = slice(low // per, -(-high // per))
        scale = stored["scales"][:, low:high].T
        if layout == "awq":
            code = unpack_awq(stored["qweight"][:, words])[:, :n].T
            zero = unpack_awq(stored["qzeros"][:, words])[:, :n].T
        else:
            code = unpack_words(stored["qweight"][:, low:high].T, bits, columns)
            zero = unpack_words(stored["qzeros"][:, words], bits, n).T
            if layout == "gptq":
                zero = (zero + 1) & ((1 << bits) - 1)
        return code, zero, scale.float()
    if layout == "panels":
        tiles = slice(low // PANEL_ROWS, high // PANEL_ROWS)
        scale = unpair_rows(stored["weight_panel_scale"][tiles]).float()
        zero = torch.full_like(scale, 1 << (bits - 1))
        if form.zero_points:
            zero = panel_zeros(stored["weight_panel_zero"][tiles])
        words = unpack_panels(stored["weight_panels"][tiles], bits)
        return unpack_words(words, bits, columns), zero, scale
    if form.kind == "mxfp4":
        packed = stored["blocks" if layout == "gpt_oss" else "weight_packed"][low:high].flatten(1)
        return decode_e2m1(packed), None, decode_e8m0(stored[form.scale_name][low:high])
    scale = _grid_rows(form, stored[form.scale_name], low, high).float()
    if layout == "packed":
        code = unpack_words(stored["weight_packed"][low:high], bits, columns)
        if form.zero_points:
            words = stored["weight_zero_point"].reshape(-1, scale.shape[1])
            zero = unpack_words(words[low // per : -(-high // per)].T, bits, n).T
        else:
            zero = torch.full_like(scale, 1 << (bits - 1))
        return code, zero, scale
    if form.zero_points:
        zero = _grid_rows(form, stored["weight_zero_point"], low, high)
    return stored["weight"][low:high], zero, scale


def _grid_rows(form: WeightFormat, grid: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Of a grid of values for blocks, those of the rows [low, high): [n, G]."""
    rows = form.block[0]
    if rows == 0:
        return grid.reshape(1, -1).expand(high - low, -1)
    if rows == 1:
        return grid.reshape(grid.shape[0], -1)[low:high]
    part = grid.reshape(-1, grid.shape[-1])[low // rows : -(-high // rows)]
    start = low // rows * rows
    return part.repeat_interleave(rows, 0)[low - start : high - start]
