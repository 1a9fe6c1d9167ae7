"""Formats of quantised weights, as data: which tensors stand for a weight, and what lies in their
bytes.

A weight is [N, K]: N outputs, K inputs, as `Linear` has it. Its value is

    weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]        g = k // columns of a group

computed in float32 and rounded once to the dtype that is asked for. In what follows "words" are
little-endian int32; of a word that holds 32 / b codes of b bits, code i lies in the bits b * i to
b * i + b - 1, the lowest bits first. G is the number of groups in a row, ceil(K / columns).

`packed` (compressed-tensors `pack-quantized`; int4 and int8)
    weight_packed      int32 [N, ceil(K b / 32)]: row n's words hold its codes along K, each as the
                       unsigned number code + 2^(b-1); what is left of a row's last word is 0.
    weight_scale       fp16, bf16 or fp32 [N, G]; one column for whole rows; one element for all.
    weight_zero_point  (with zero points) int32 [ceil(N b / 32), G]: packed along N: the word
                       [n b // 32, g] holds zero[n, g] + 2^(b-1) as code n % (32 / b).
    weight_g_idx       (act order) int32 [K]: g of every column, in place of k // columns.
    weight_shape       int64 [2]: N and K. Not needed to compute.
`plain` (compressed-tensors `int-quantized`, `float-quantized`, `naive-quantized`; int8 and fp8)
    weight             int8 or float8_e4m3fn [N, K]: the codes themselves.
    weight_scale       [N, G], one column for whole rows, one element for all; in blocks of R rows
                       and C columns [ceil(N / R), ceil(K / C)].
    weight_zero_point  (with zero points) int8, of the scale's shape.
`fp8_block` (DeepSeek, `quant_method` fp8)
    weight             float8_e4m3fn [N, K].
    weight_scale_inv   fp32 (or bf16, fp16, float8_e8m0fnu) [ceil(N / R), ceil(K / C)], which is
                       multiplied with despite its name.
`gptq`, `gptq_v2` (AutoGPTQ, GPTQModel; int4 and int8)
    qweight            int32 [K b / 32, N]: packed along K: the word [k b // 32, n] holds the
                       unsigned code[n, k] as code k % (32 / b).
    qzeros             int32 [G, N b / 32]: packed along N: the word [g, n b // 32] holds the
                       unsigned zero[n, g] as code n % (32 / b); in `gptq` zero - 1 modulo 2^b.
    scales             fp16, bf16 or fp32 [G, N].
    g_idx              (act order) int32 [K]: g of every column, in any order.
`awq` (AutoAWQ's GEMM layout; int4)
    qweight            int32 [K, N / 8]: packed along N and interleaved: the word [k, m] holds the
                       unsigned code[8 m + (0, 2, 4, 6, 1, 3, 5, 7)[i], k] as code i.
    qzeros             int32 [G, N / 8]: zero[n, g], likewise.
    scales             fp16, bf16 or fp32 [G, N].
`panels` (on a compute device alone, no file has it: see `panels`; int4 and int8)
    weight_panels      uint8 [N / 16, K / C, 512], C = 256 / b columns: the codes of 16 rows and C
                       columns, as unsigned numbers, in the order in which tensor cores take them.
    weight_panel_scale fp16 or bf16 [N / 16, G, 8, 2]: those of the rows i and 8 + i of 16.
    weight_panel_zero  (with zero points) uint8, int8 [N / 16, G, 8, 2] likewise; int4
                       [N / 16, G, 8], row i's in the low nibble; without them zero is 2^(b-1).
`mxfp4` (compressed-tensors `mxfp4-pack-quantized`; OCP microscaling)
    weight_packed      uint8 [N, K / 2]: columns 2 j (low nibble) and 2 j + 1 (high) of row n in
                       byte [n, j]; a nibble is sign, two bits of exponent, one of mantissa (e2m1):
                       0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero.
    weight_scale       uint8 [N, K / 32]: e, for a scale of 2^(e - 127) (e8m0; 255 is NaN).
`gpt_oss` (`quant_method` mxfp4): experts [E, K, N], which are multiplied as x @ weight
    blocks             uint8 [E, N, K / 32, 16]: nibbles as above: row n of expert e along K.
    scales             uint8 [E, N, K / 32]: as above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["int4", "int8", "fp8", "mxfp4"]
Layout = Literal[
    "packed", "plain", "fp8_block", "gptq", "gptq_v2", "awq", "panels", "mxfp4", "gpt_oss"
]
Stored = tuple[torch.dtype, tuple[int, ...]]  # a tensor in a file: dtype and shape

SHAPE = "weight_shape"
MX_GROUP = 32
PANEL_ROWS = 16
PANEL_BYTES = 512  # of the codes that lie together
FP8_MAX = 448.0
W8A8 = "w8a8"  # the published name of int8 weights and inputs
GROUPS = (32, 64, 128)  # those that are written
_WORD = 32  # bits
_KINDS: dict[Layout, tuple[Kind, ...]] = {
    "packed": ("int4", "int8"),
    "plain": ("int8", "fp8"),
    "fp8_block": ("fp8",),
    "gptq": ("int4", "int8"),
    "gptq_v2": ("int4", "int8"),
    "awq": ("int4",),
    "panels": ("int4", "int8"),
    "mxfp4": ("mxfp4",),
    "gpt_oss": ("mxfp4",),
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_TEXT = re.compile(r"(int4|int8)(?:-(?:g(\d+)|(channel)))?(-zp)?|(fp8)(?:-(channel|block|tensor))?")


@dataclass(frozen=True)
class WeightFormat:
    """How one weight is stored. `block` is (rows, columns) of the weight that share a scale; 0
    stands for all of them: (1, 64) is a group of 64, (1, 0) a channel, (0, 0) the tensor.
    `inputs`: what it is multiplied with: as it comes (""), or rounded to int8 with a scale a row,
    of that row's largest magnitude ("int8").

    Raises ValueError for a combination that no layout has.
    """

    kind: Kind
    layout: Layout
    block: tuple[int, int]
    zero_points: bool = False
    act_order: bool = False
    inputs: Literal["", "int8"] = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS.get(self.layout, ()):
            raise ValueError(f"no weight of kind {self.kind!r} is stored as {self.layout!r}")
        rows, columns = self.block
        if rows < 0 or columns < 0:
            raise ValueError(f"block must be numbers of rows and columns, got {self.block}")
        if rows != 1 and self.layout not in ("plain", "fp8_block") and self.block != (0, 0):
            raise ValueError(f"{self.layout!r} has no scale for {rows} rows together")
        if self.zero_points and self.kind not in ("int4", "int8"):
            raise ValueError(f"{self.kind} has no zero points")
        if self.layout == "panels" and (rows != 1 or columns % MX_GROUP):
            raise ValueError(
                f"panels share a scale among the columns of a row, or a multiple of {MX_GROUP} of "
                f"them, not among {self.block}"
            )
        if self.zero_points and self.layout == "packed" and self.block == (0, 0):
            raise ValueError("one packed zero point for a whole tensor has no published layout")
        if self.act_order and self.layout not in ("packed", "gptq", "gptq_v2"):
            raise ValueError(f"{self.layout!r} has no act order")
        if self.inputs not in ("", "int8"):
            raise ValueError(f"inputs are left as they are or rounded to int8, not {self.inputs!r}")
        one_a_row = self.block in ((1, 0), (0, 0)) and not self.zero_points
        if self.inputs and (self.kind, self.layout, one_a_row) != ("int8", "plain", True):
            raise ValueError(
                "inputs in int8 are multiplied with int8 weights stored as 'plain', with one scale "
                f"a row or for all and no zero points, not with {self.kind} ({self.layout}, block "
                f"{self.block}, zero points {self.zero_points})"
            )
        if self.kind == "mxfp4" and self.block != (1, MX_GROUP):
            raise ValueError(f"mxfp4 shares a scale among {MX_GROUP} columns, not {self.block}")

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 4 if self.kind in ("int4", "mxfp4") else 8

    @property
    def per_word(self) -> int:
        """Codes in an int32."""
        return _WORD // self.bits

    @property
    def panel_columns(self) -> int:
        """Columns whose codes lie together in `panels`."""
        return PANEL_BYTES * 8 // (PANEL_ROWS * self.bits)

    @property
    def by_rows(self) -> bool:
        """Whether every row of each stored tensor but weight_shape belongs to that output alone."""
        return (
            self.layout in ("packed", "plain", "mxfp4")
            and self.block[0] == 1
            and not self.act_order
            and not (self.zero_points and self.layout == "packed")
        )

    @property
    def name(self) -> str:
        """As `parse` takes it, with the layout where that is none it writes."""
        rows, columns = self.block
        if self.kind == "mxfp4":
            shared = ""
        elif (rows, columns) == (0, 0):
            shared = "-tensor"
        elif (rows, columns) == (1, 0):
            shared = "-channel"
        elif rows != 1:
            shared = "-block" if (rows, columns) == (128, 128) else f"-block{rows}x{columns}"
        else:
            shared = f"-g{columns}"
        if self.inputs:
            return W8A8 if self.block == (1, 0) else f"{W8A8}{shared}"
        text = f"{self.kind}{shared}" + ("-zp" if self.zero_points else "")
        written = self.layout == _LAYOUTS[self.kind] and not self.act_order
        return text if written else f"{text} ({self.layout})"

    @classmethod
    def parse(cls, text: str) -> WeightFormat:
        """A format that is written, by its name:

        int4, int8     symmetric groups of 64 columns; int4-g32, int4-g128, int4-channel, and each
                       with zero points: int4-g64-zp
        fp8            e4m3, a scale a row; fp8-block one a 128 x 128 block, fp8-tensor one for all
        mxfp4          e2m1 in groups of 32 with scales that are powers of two
        w8a8           int8, a scale a row, and inputs rounded to int8, a scale a row as well
        """
        if text == W8A8:
            return cls("int8", "plain", (1, 0), inputs="int8")
        if text == "mxfp4":
            return _written("mxfp4", (1, MX_GROUP), False)
        match = _TEXT.fullmatch(text)
        if match is None or (match[2] and int(match[2]) not in GROUPS):
            raise ValueError(
                f"{text!r} is no format for weights; use int4, int8 (with -g32, -g64, -g128 or "
                "-channel, -zp for zero points: int4-g128-zp, and -clip at the end for ranges "
                "chosen by their error), fp8, fp8-block, fp8-tensor, mxfp4 or w8a8"
            )
        if match[5]:
            shared = {"block": (128, 128), "tensor": (0, 0)}.get(match[6] or "", (1, 0))
            return _written("fp8", shared, False)
        kind: Kind = "int4" if match[1] == "int4" else "int8"
        columns = 0 if match[3] else int(match[2] or 64)
        return _written(kind, (1, columns), bool(match[4]))

    def groups(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the grid of scales of a weight [N, K]."""
        (n, k), (rows, columns) = shape[-2:], self.block
        if self.layout == "gpt_oss":
            n, k = k, n
        return (
            1 if rows == 0 else math.ceil(n / rows),
            1 if columns == 0 else math.ceil(k / columns),
        )

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError where a weight of this shape cannot be stored so."""
        if len(shape) != (3 if self.layout == "gpt_oss" else 2) or 0 in shape:
            raise ValueError(f"a weight of shape {list(shape)} cannot be {self.name}")
        n, k = shape[-2:]
        if self.layout == "gpt_oss":
            n, k = k, n
        columns = self.block[1]
        if columns and k % columns and self.layout in _WHOLE_GROUPS:
            raise ValueError(
                f"{k} inputs do not divide into groups of {columns} ({self.name}); choose a group "
                "that divides them, one scale a row (-channel), or leave this weight as it is"
            )
        per = self.per_word
        if self.layout in ("gptq", "gptq_v2", "awq") and n % per:
            raise ValueError(f"{n} outputs do not divide into words of {per} codes ({self.name})")
        if self.layout in ("gptq", "gptq_v2") and k % per:
            raise ValueError(f"{k} inputs do not divide into words of {per} codes ({self.name})")
        if self.layout == "panels" and (n % PANEL_ROWS or k % self.panel_columns):
            raise ValueError(
                f"{n} outputs and {k} inputs do not divide into panels of {PANEL_ROWS} and "
                f"{self.panel_columns} ({self.name})"
            )

    def stored(
        self, shape: tuple[int, ...], scale: torch.dtype = torch.bfloat16
    ) -> dict[str, Stored]:
        """Every tensor that stands for a weight of `shape`, by the end of its name (what follows
        the module's name and a dot; of `gpt_oss` the weight's name and "_"), in the order above.
        """
        self.check_shape(shape)
        grid, per = self.groups(shape), self.per_word
        g = grid[1]
        if self.layout == "gpt_oss":
            e, k, n = shape
            blocks = (e, n, k // MX_GROUP)
            return {"blocks": (torch.uint8, (*blocks, 16)), "scales": (torch.uint8, blocks)}
        n, k = shape
        found: dict[str, Stored] = {}
        if self.layout == "packed":
            found["weight_packed"] = torch.int32, (n, math.ceil(k / per))
            found["weight_scale"] = scale, (1,) if self.block == (0, 0) else grid
            if self.zero_points:
                found["weight_zero_point"] = torch.int32, (math.ceil(grid[0] / per), g)
            if self.act_order:
                found["weight_g_idx"] = torch.int32, (k,)
            found[SHAPE] = torch.int64, (2,)
        elif self.layout == "plain":
            code = torch.int8 if self.kind == "int8" else torch.float8_e4m3fn
            found["weight"] = code, (n, k)
            found["weight_scale"] = scale, (1,) if self.block == (0, 0) else grid
            if self.zero_points:
                found["weight_zero_point"] = torch.int8, found["weight_scale"][1]
        elif self.layout == "fp8_block":
            found["weight"] = torch.float8_e4m3fn, (n, k)
            found["weight_scale_inv"] = scale, grid
        elif self.layout == "panels":
            tiles = n // PANEL_ROWS
            found["weight_panels"] = torch.uint8, (tiles, k // self.panel_columns, PANEL_BYTES)
            found["weight_panel_scale"] = scale, (tiles, g, PANEL_ROWS // 2, 2)
            if self.zero_points:
                pair = () if self.bits == 4 else (2,)
                found["weight_panel_zero"] = torch.uint8, (tiles, g, PANEL_ROWS // 2, *pair)
        elif self.layout == "mxfp4":
            found["weight_packed"] = torch.uint8, (n, k // 2)
            found["weight_scale"] = torch.uint8, (n, k // MX_GROUP)
        else:
            gptq = self.layout != "awq"
            found["qweight"] = torch.int32, (k // per, n) if gptq else (k, n // per)
            found["qzeros"] = torch.int32, (g, n // per)
            found["scales"] = scale, (g, n)
            if self.act_order:
                found["g_idx"] = torch.int32, (k,)
        return found

    @property
    def scale_name(self) -> str:
        """The end of the name of the tensor that holds the scales."""
        if self.layout == "fp8_block":
            return "weight_scale_inv"
        if self.layout == "panels":
            return "weight_panel_scale"
        return "weight_scale" if self.layout in ("packed", "plain", "mxfp4") else "scales"

    @property
    def _scale_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.kind == "mxfp4":
            return (torch.uint8,)
        if self.layout == "fp8_block":
            return (*_FLOATS, torch.float8_e8m0fnu)
        return _FLOATS[:2] if self.layout == "panels" else _FLOATS

    def check_stored(self, found: Mapping[str, Stored], shape: tuple[int, ...]) -> None:
        """Raise ValueError, naming the tensor, where `found` (by the ends of names) is not what a
        weight of `shape` is made of. Dimensions of size 1 of scales and zero points do not matter.
        """
        if self.scale_name not in found:
            raise ValueError(f"{self.scale_name} is missing")
        wanted = self.stored(shape, found[self.scale_name][0])
        for name, (dtype, size) in wanted.items():
            if name not in found:
                raise ValueError(f"{name} is missing")
            has_dtype, has_size = found[name]
            if name == self.scale_name and has_dtype not in self._scale_dtypes:
                raise ValueError(f"{name} holds {has_dtype}, which is no dtype of such scales")
            same = has_size == size or (
                name in ("weight_scale", "weight_scale_inv", "weight_zero_point")
                and [x for x in has_size if x != 1] == [x for x in size if x != 1]
            )
            if has_dtype != dtype or not same:
                raise ValueError(
                    f"{name} is {has_dtype} {list(has_size)}, but a weight of {list(shape)} in "
                    f"{self.name} is stored as {dtype} {list(size)}"
                )


def _written(kind: Kind, block: tuple[int, int], zero_points: bool) -> WeightFormat:
    return WeightFormat(kind, _LAYOUTS[kind], block, zero_points)


# A row has no group that is shorter than the others.
_WHOLE_GROUPS = ("packed", "awq", "panels", "mxfp4", "gpt_oss")
_LAYOUTS: dict[Kind, Layout] = {  # in which each kind is written
    "int4": "packed",
    "int8": "packed",
    "fp8": "plain",
    "mxfp4": "mxfp4",
}
