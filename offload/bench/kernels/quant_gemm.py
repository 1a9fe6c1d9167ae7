"""Products of a few rows with quantised weights, beside cuBLAS in bfloat16 and torch's int4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, Rates, copies, launches, seconds
from offload.kernels.call import Call, current_stream
from offload.kernels.dequantize import dequantise
from offload.kernels.panels import in_rows
from offload.kernels.quant_gemm import QuantGemm
from offload.kernels.random_weight import random_stored, stored_bytes
from offload.kernels.weight_format import WeightFormat

OP = "quant_gemm"
DTYPE = torch.bfloat16
ROWS = (1, 4, 8, 16, 64)
# depth, outputs: OPT-13B, Llama-2-70B (in int4: 52, 52, 117 and 235 MB).
SHAPES = ((5120, 20480), (20480, 5120), (28672, 8192), (8192, 57344))
QUICK = SHAPES[:1]
Shapes = tuple[tuple[int, int], ...]
LAYER: Shapes = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))  # Llama-7B
TINY = (256, 384)  # for a CPU
FORMS = ("int4", "int4-g128", "int4-zp", "int8")
SWEPT = ("int4", "int4-zp", "int4-g32-zp", "int4-g128", "int8")


class Weights:
    """Copies of matrices that are read back to back, more than L2 holds, and their inputs."""

    def __init__(self, text: str, shapes: Shapes, device: torch.device) -> None:
        """In panels of the format that is named so."""
        named = WeightFormat.parse(text)
        self.form = WeightFormat(named.kind, "panels", named.block, named.zero_points)
        self.shapes, self.device = shapes, device
        first = self._stored()
        self.nbytes = sum(map(stored_bytes, first))
        self.count = copies(self.nbytes, device)
        self.every = [first, *(self._stored() for _ in range(self.count - 1))]

    def _stored(self) -> list[dict[str, torch.Tensor]]:
        return [random_stored(self.form, (n, k), self.device, DTYPE) for k, n in self.shapes]

    def inputs(self, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Input and output of each matrix."""
        like: dict[str, Any] = {"dtype": DTYPE, "device": self.device}
        return [
            (torch.randn(rows, k, **like), torch.empty(rows, n, **like)) for k, n in self.shapes
        ]

    def ours(self, rows: int, early: bool = True) -> Callable[[int], None]:
        """Launches the matrices of copy i."""
        xs = self.inputs(rows)
        early = early and self.device.type == "cuda"

        def calls(stored: list[dict[str, torch.Tensor]]) -> list[QuantGemm]:
            return [
                QuantGemm(
                    x,
                    self.form,
                    one,
                    out,
                    early=early,
                )
                for (x, out), one in zip(xs, stored, strict=True)
            ]

        return launches([_InTurn(calls(stored)) for stored in self.every])

    def cublas(self, rows: int) -> Callable[[int], None]:
        """torch's product with the weights made whole."""
        xs = self.inputs(rows)
        whole = sum(n * k for k, n in self.shapes) * DTYPE.itemsize
        kept = [
            [
                dequantise(self.form, one, (n, k), DTYPE)
                for one, (k, n) in zip(stored, self.shapes, strict=True)
            ]
            for stored in self.every[: copies(whole, self.device)]
        ]

        def run(i: int) -> None:
            for (x, out), weight in zip(xs, kept[i % len(kept)], strict=True):
                torch.mm(x, weight.t(), out=out)

        return run

    def torch_int4(self, rows: int) -> Callable[[int], None]:
        """torch's own int4 product, on weights in its own order."""
        xs = self.inputs(rows)

        def pack(one: dict[str, torch.Tensor], n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows = in_rows(self.form, one)
            codes = rows["weight_packed"].view(torch.uint8).view(n, k // 2)
            scales = rows["weight_scale"].t()
            both = torch.stack((scales, torch.zeros_like(scales)), -1).contiguous()
            return torch.ops.aten._convert_weight_to_int4pack(codes, 8), both

        kept = [
            [pack(one, n, k) for one, (k, n) in zip(stored, self.shapes, strict=True)]
            for stored in self.every
        ]
        group = self.form.block[1]

        def run(i: int) -> None:
            for (x, _), (packed, both) in zip(xs, kept[i], strict=True):
                torch.ops.aten._weight_int4pack_mm(x, packed, group, both)

        return run


class _InTurn:
    """Launches that follow each other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def launch(self, stream: int = 0) -> None:
        for call in self._calls:
            call.launch(stream)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Large matrices, and a layer's back to back, in every format and number of rows."""
    on_gpu = device.type == "cuda"
    large = (QUICK if quick else SHAPES) if on_gpu else (TINY,)
    shapes: list[tuple[str, Shapes]] = [(f"K{k} N{n}", ((k, n),)) for k, n in large]
    if on_gpu:
        shapes.append(("Llama-7B layer", LAYER))
    for name, matrices in shapes:
        for text in FORMS[:1] if quick else FORMS:
            weights = Weights(text, matrices, device)
            for rows in (1, 16) if quick else ROWS:
                peers = {"cuBLAS bf16": weights.cublas(rows)}
                if on_gpu and weights.form.kind == "int4" and not weights.form.zero_points:
                    peers["torch int4"] = weights.torch_int4(rows)
                yield Case(
                    op=OP,
                    shape=f"{name} rows {rows} {text}",
                    bytes=weights.nbytes,
                    flop=2.0 * rows * sum(k * n for k, n in matrices),
                    ours=weights.ours(rows),
                    peers=peers,
                    copies=weights.count,
                    hbm="read",
                )


def sweep(
    device: torch.device, rates: Rates, wanted: Callable[[str], bool], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure large matrices and a layer's back to back in every format and number of rows; prints
    a line for each, returns all of it as data. "late" is without programmatic dependent launch. A
    result that is wrong is said and not measured.
    """
    found: list[dict[str, Any]] = []
    shapes: list[tuple[str, Shapes]] = [(f"K{k} N{n}", ((k, n),)) for k, n in SHAPES]
    for name, matrices in (*shapes, ("Llama-7B layer", LAYER)):
        peers: dict[int, float] = {}  # cuBLAS by rows: the same for all formats
        for text in SWEPT:
            if not wanted(f"{name} {text}"):
                continue
            weights = Weights(text, matrices, device)
            bound = weights.nbytes / rates.read
            say(f"{name} {text}  {weights.nbytes / 1e6:.0f} MB, bound {bound * 1e6:.1f} us")

            def timed(run: Callable[[int], None], weights: Weights = weights) -> float:
                return seconds([run], device, weights.count, 3, 2, 0)[0]

            for rows in ROWS:
                if rows not in peers:
                    peers[rows] = timed(weights.cublas(rows))
                row: dict[str, Any] = {"shape": name, "form": text, "rows": rows, "bound": bound}
                row |= {"bytes": weights.nbytes, "cublas": peers[rows], "error": ""}
                found.append(row)
                try:
                    row["error"] = _problem(weights, rows)
                    row["seconds"] = timed(weights.ours(rows))
                    row["late"] = timed(weights.ours(rows, early=False))
                except RuntimeError as error:
                    row["error"] = " ".join(str(error).split())
                if text == SWEPT[0]:
                    row["torch_int4"] = timed(weights.torch_int4(rows))
                say(_line(row))
    return found


def _line(row: dict[str, Any]) -> str:
    start = f"  rows {row['rows']:2}: "
    if row["error"]:
        return start + row["error"]
    took, peer = row["seconds"], row["cublas"]
    theirs = row.get("torch_int4")
    return (
        f"{start}{took * 1e6:6.1f} us {row['bytes'] / took / 1e9:5.0f} GB/s "
        f"{row['bound'] / took:.3f} of the read rate (late {row['bound'] / row['late']:.3f}), "
        f"cuBLAS bf16 {peer * 1e6:.1f} us x{peer / took:.2f}"
        + (f", torch int4 {row['bound'] / theirs:.3f}" if theirs else "")
    )


def _problem(weights: Weights, rows: int) -> str:
    """What is wrong with the first matrix's product; "" where nothing is."""
    x, out = weights.inputs(rows)[0]
    k, n = weights.shapes[0]
    weight = dequantise(weights.form, weights.every[0][0], (n, k), DTYPE)
    exact = functional.linear(x.double(), weight.double())
    allowed = 2 * (functional.linear(x, weight).double() - exact).abs().max().item()
    out.fill_(torch.nan)
    call = QuantGemm(x, weights.form, weights.every[0][0], out)
    call.launch(current_stream(weights.device))
    error = (out.double() - exact).abs().max().item()
    return "" if error <= allowed else f"wrong by {error:.3g}, allowed {allowed:.3g}"
