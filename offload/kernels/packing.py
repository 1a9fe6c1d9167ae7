"""Codes of a few bits in words and bytes, as the formats of `weight_format` lay them."""

from __future__ import annotations

import torch

# e2m1 by its nibble: a sign, two bits of exponent, one of mantissa (OCP microscaling formats 1.0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# AutoAWQ's order: code i of a word belongs to output AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] of `bits` (4 or 8) bits -> int32 [..., ceil(n bits / 32)]; what is left of the
    last word is 0.
    """
    per = 32 // bits
    short = -codes.shape[-1] % per
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    if bits == 4:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return _bytes_as(codes, torch.int32)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [..., w] -> the first `count` codes of every row, uint8 [..., count]."""
    octets = _bytes_as(words, torch.uint8)
    return octets[..., :count] if bits == 8 else unpack_nibbles(octets)[..., :count]


def _bytes_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of every row as another dtype."""
    # Where a dimension has one element, `contiguous` keeps a stride that `view` refuses.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(dtype).unflatten(0, (*tensor.shape[:-1], -1))


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2 n] below 16 -> uint8 [..., n], the even ones in the low halves."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n]: low half, high half."""
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 [k, m] -> uint8 [k, 8 m], in the order of the outputs."""
    codes = unpack_words(words, 4, 8 * words.shape[-1]).unflatten(-1, (-1, 8))
    at = [AWQ_ORDER.index(i) for i in range(8)]
    return codes[..., at].flatten(-2)


def decode_e2m1(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] of two nibbles -> float32 [..., 2 n]."""
    value = torch.tensor(E2M1, device=octets.device)
    pairs = torch.stack((value.repeat(16), value.repeat_interleave(16)), -1)  # by the whole byte
    return pairs[octets.int()].flatten(-2)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 -> the nearest e2m1, uint8 of the same shape; ties go to the even mantissa, and what
    is above 6 becomes 6.
    """
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (size >= middle) if i % 2 else (size > middle)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """uint8 -> 2^(e - 127) in float32; 255 is NaN."""
    bits = scale.int() << 23
    value = bits.view(torch.float32)  # the exponent of a float32 has the same bias
    value = torch.where(scale == 0, 2.0**-127, value)
    return torch.where(scale == 255, torch.nan, value)
