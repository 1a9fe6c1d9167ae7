"""Stored weights of the formats that are read and not written, made from codes by the letter of
their definitions: one word, one code at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from offload.kernels.weight_format import WeightFormat

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, gemm_pack_order


@dataclass
class Numbers:
    """What a weight is made of: unsigned codes [N, K], zeros and scales [N, G], the group of every
    column [K].
    """

    code: np.ndarray
    zero: np.ndarray
    scale: torch.Tensor
    index: np.ndarray

    @classmethod
    def draw(cls, n: int, k: int, group: int, bits: int, seed: int, order: bool) -> Numbers:
        random = np.random.default_rng(seed)
        groups = math.ceil(k / group) if group else 1
        index = np.arange(k) // (group or k)
        return cls(
            random.integers(0, 1 << bits, (n, k)),
            random.integers(0, 1 << bits, (n, groups)),
            torch.from_numpy(random.uniform(0.01, 0.3, (n, groups))).half(),
            random.permutation(index) if order else index,
        )

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The value, in float64 until it is rounded."""
        difference = self.code - self.zero[:, self.index]
        exact = torch.from_numpy(difference).double() * self.scale.double()[:, self.index]
        return exact.float().to(dtype)  # 9 bits of a code and 11 of a scale are exact in float32


def pack_rows(codes: np.ndarray, bits: int) -> torch.Tensor:
    """[r, c] -> int32 [r bits / 32, c]: code i of a word belongs to row i of its rows."""
    per = 32 // bits
    words = np.zeros((codes.shape[0] // per, codes.shape[1]), np.uint32)
    for i in range(per):
        words |= codes[i::per].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(numbers: Numbers, bits: int, form: WeightFormat) -> dict[str, torch.Tensor]:
    """As AutoGPTQ (`gptq`: zeros less one) and GPTQModel (`gptq_v2`) save a Linear."""
    zero = numbers.zero - (1 if form.layout == "gptq" else 0)
    stored = {
        "qweight": pack_rows(numbers.code.T, bits),
        "qzeros": pack_rows(zero % (1 << bits), bits).T.contiguous(),
        "scales": numbers.scale.T.contiguous(),
    }
    if form.act_order:
        stored["g_idx"] = torch.from_numpy(numbers.index.astype(np.int32))
    return stored


def awq(numbers: Numbers) -> dict[str, torch.Tensor]:
    """As AutoAWQ's WQLinear_GEMM saves a Linear."""

    def interleave(codes: np.ndarray) -> torch.Tensor:  # [N, c] -> int32 [c, N / 8]
        n, columns = codes.shape
        words = np.zeros((columns, n // 8), np.uint32)
        for m in range(n // 8):
            for i, output in enumerate(AWQ_ORDER):
                words[:, m] |= codes[8 * m + output].astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(words.view(np.int32).copy())

    return {
        "qweight": interleave(numbers.code),
        "qzeros": interleave(numbers.zero),
        "scales": numbers.scale.T.contiguous(),
    }
