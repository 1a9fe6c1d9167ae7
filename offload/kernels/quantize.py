"""Weights -> stored weights, rounded to nearest, in the formats that are written."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.kernels.packing import decode_e2m1, encode_e2m1, pack_nibbles, pack_words
from offload.kernels.weight_format import FP8_MAX, MX_GROUP, SHAPE, WeightFormat

# Elements that are worked on at once; the search for a clip holds about ten float32 of each.
CHUNK = 1 << 20
_ROWS = 128  # chunks begin at multiples: a block of rows, a word of packed rows are not cut
_NEAR = 0.86  # of the largest number; an mxfp4 above 7 / 8 of it would be rounded to infinity
# Shares of a group's range that are tried where clipping is asked for.
CLIPS = tuple(1 - i / 40 for i in range(21))


def quantise(
    weight: torch.Tensor, form: WeightFormat, *, clip: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors (`form.stored`) that stand for `weight`, [N, K] of fp16, bf16, fp32 or fp64.

    Scales have the weight's dtype where it has 16 bits, else float32; codes are chosen for the
    scale as it is stored. Symmetric int scales are max |w| / (2^b - 1) * 2, as compressed-tensors
    has them: the positive end saturates by half a step. With zero points the range is that of the
    group and zero. `clip` makes the range of every group smaller (or an mxfp4 scale a power of two
    larger or smaller) where that lowers the group's squared error.

    Raises ValueError for a shape that does not divide, and for weights that are NaN, infinite or
    near it.
    """
    form.check_shape(tuple(weight.shape))
    if form.layout not in ("packed", "mxfp4", "plain") or (
        form.layout == "plain" and form.zero_points
    ):
        raise ValueError(f"{form.name} is read, but not written")
    rows, columns = weight.shape
    dtype = weight.dtype if weight.dtype.itemsize == 2 else torch.float32
    stored = {
        name: torch.empty(size, dtype=kind, device=weight.device)
        for name, (kind, size) in form.stored((rows, columns), dtype).items()
    }
    if SHAPE in stored:
        stored[SHAPE] = torch.tensor([rows, columns])
    whole = _largest(weight) if form.block[0] == 0 else None
    limit = _NEAR * min(torch.finfo(weight.dtype).max, torch.finfo(torch.float32).max)
    step = max(_ROWS, CHUNK // columns // _ROWS * _ROWS)
    for low in range(0, rows, step):
        high = min(low + step, rows)
        part = weight[low:high].float()
        if not torch.isfinite(part).all():
            count = int((~torch.isfinite(part)).sum())
            raise ValueError(f"it holds NaN or infinity ({count} in rows {low} to {high - 1})")
        if part.numel() and float(_largest(part)) > limit:
            raise ValueError(
                f"it holds {float(_largest(part)):.6g}, so near the largest {weight.dtype} that "
                "its rounded value may be infinite"
            )
        if form.kind == "mxfp4":
            _mxfp4(part, stored, slice(low, high), clip)
        elif form.kind == "fp8":
            _fp8(part, form, stored, slice(low, high), whole)
        else:
            _integers(part, form, stored, slice(low, high), whole, clip)
    return stored


def _largest(weight: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(weight)
    return torch.maximum(-low.float(), high.float())


def _scale(size: torch.Tensor, steps: float, dtype: torch.dtype) -> torch.Tensor:
    """size / steps as it is stored: never 0, so that codes can be divided by it."""
    # Divided by a tensor: on a GPU a division by a number is a product with 1 / steps, and a folder
    # that is written there would have other bytes.
    size = size / torch.full_like(size, steps)
    size = torch.where(size == 0, 1.0, size)
    return size.to(dtype).clamp(min=2.0**-24 if dtype == torch.float16 else 2.0**-126)


def _integers(
    part: torch.Tensor,
    form: WeightFormat,
    stored: dict[str, torch.Tensor],
    at: slice,
    whole: torch.Tensor | None,
    clip: bool,
) -> None:
    """Fill the rows `at` of a `packed` or `plain` weight from part, float32 [n, K]."""
    n, columns = part.shape
    bits, dtype = form.bits, stored["weight_scale"].dtype
    x = part.unflatten(1, (-1, form.block[1] or columns))  # [n, G, columns of a group]
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    if whole is not None:
        low, high = -whole.expand(n, 1), whole.expand(n, 1)

    def ranges() -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for share in CLIPS if clip and whole is None else (1.0,):
            yield low * share, high * share

    code, scale, zero = _best(
        x, (_affine(x, a, b, bits, dtype, form.zero_points) for a, b in ranges())
    )
    offset = 1 << (bits - 1)
    if form.layout == "plain":
        stored["weight"][at] = code.to(torch.int8).flatten(1)
    else:
        stored["weight_packed"][at] = pack_words((code + offset).to(torch.uint8).flatten(1), bits)
    if whole is not None:
        stored["weight_scale"][0] = scale[0, 0]
    else:
        stored["weight_scale"][at] = scale
    if form.zero_points:
        words = slice(at.start // form.per_word, -(-at.stop // form.per_word))
        packed = pack_words((zero + offset).to(torch.uint8).T, bits)
        stored["weight_zero_point"][words] = packed.T


_Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _affine(
    x: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
    zero_points: bool,
) -> _Found:
    """Codes [n, G, c], scales and zeros [n, G] for the ranges low <= 0 <= high [n, G]."""
    steps, least, most = (1 << bits) - 1, -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if zero_points:
        scale = _scale(high / 2 - low / 2, steps / 2, dtype)  # high - low may overflow
        zero = (least - low / scale.float()).round().clamp(least, most)
    else:
        scale = _scale(torch.maximum(-low, high), steps / 2, dtype)
        zero = torch.zeros_like(low)
    code = (x / scale.float()[..., None] + zero[..., None]).clamp(least, most).round()
    return code, scale, zero


def _best(x: torch.Tensor, candidates: Iterable[_Found]) -> _Found:
    """For every group the candidate with the least squared error; of equals the first."""
    best: _Found | None = None
    least: torch.Tensor | None = None
    for found in candidates:  # one at a time: each is as large as x
        if best is None:
            best = found
            continue
        least = _error(x, best) if least is None else least
        error = _error(x, found)
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better[..., None], found[0], best[0]),
            torch.where(better, found[1], best[1]),
            torch.where(better, found[2], best[2]),
        )
    assert best is not None
    return best


def _error(x: torch.Tensor, found: _Found) -> torch.Tensor:
    code, scale, zero = found
    return ((code - zero[..., None]) * scale.float()[..., None] - x).square().sum(-1)


def _fp8(
    part: torch.Tensor,
    form: WeightFormat,
    stored: dict[str, torch.Tensor],
    at: slice,
    whole: torch.Tensor | None,
) -> None:
    """Fill the rows `at` of a `plain` fp8 weight from part, float32 [n, K]."""
    n, columns = part.shape
    dtype = stored["weight_scale"].dtype
    high = form.block[0] or n
    wide = form.block[1] or columns
    padded = torch.nn.functional.pad(part, (0, -columns % wide, 0, -n % high))
    x = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))  # [blocks, high, blocks, wide]
    size = x.abs().amax((1, 3)) if whole is None else whole.expand(1, 1)
    scale = _scale(size, FP8_MAX, dtype)
    code = (x / scale.float()[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    code = code.flatten(2).flatten(0, 1)[:n, :columns]
    stored["weight"][at] = code.to(torch.float8_e4m3fn)
    if whole is not None:
        stored["weight_scale"][0] = scale[0, 0]
    else:
        stored["weight_scale"][at.start // high : -(-at.stop // high)] = scale


def _mxfp4(part: torch.Tensor, stored: dict[str, torch.Tensor], at: slice, clip: bool) -> None:
    """Fill the rows `at` of an `mxfp4` weight from part, float32 [n, K]."""
    x = part.unflatten(1, (-1, MX_GROUP))
    mantissa, exponent = torch.frexp(x.abs().amax(-1))  # [0.5, 1), and 2 to the power of
    # 6 = 1.5 * 2^2 is the largest code. From 7 / 4 on, the next power of two errs less.
    base = exponent - 3 + (mantissa >= 7 / 8) + 127

    def candidates() -> Iterable[_Found]:
        for step in (0, -1, 1) if clip else (0,):
            e = torch.where(mantissa == 0, 127, base + step).clamp(0, 254)
            scale = torch.ldexp(torch.ones_like(mantissa), e - 127)
            octets = pack_nibbles(encode_e2m1(x / scale[..., None]))
            yield decode_e2m1(octets), scale, torch.zeros_like(scale)

    value, scale, _ = _best(x, candidates())
    stored["weight_packed"][at] = pack_nibbles(encode_e2m1(value)).flatten(1)
    stored["weight_scale"][at] = (torch.frexp(scale)[1] - 1 + 127).to(torch.uint8)
