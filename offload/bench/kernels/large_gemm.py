"""The products of a prompt's many rows with a model's weights, in every way that is tried."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from offload.bench.kernels.case import Case
from offload.bench.shapes import shape_config
from offload.kernels.call import current_stream
from offload.kernels.choices import Choice
from offload.kernels.cublas_product import CublasProduct, ways
from offload.models.shape import MLP_ROWS, ModelShape

OP = "large_gemm"
DTYPE = torch.float16
SHAPES = ("llama-2-13b", "opt-13b", "qwen2.5-14b", "llama-2-70b")
TINY = "tiny"  # for a CPU
ROWS = 64 * 512  # prompts of a batch
TINY_ROWS = 16


@dataclass
class Product:
    """One of a block's products, on tensors that are made when it first runs."""

    rows: int
    depth: int
    outputs: int
    device: torch.device

    @functools.cached_property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [rows, depth], w [depth, outputs] (the transpose of how it lies), out."""

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=DTYPE, device=self.device)

        # Real sizes: with zeros the matrix units draw less power, and run faster.
        x, w = new(self.rows, self.depth).normal_(), new(self.outputs, self.depth).normal_(std=0.02)
        return x, w.t(), new(self.rows, self.outputs)

    def run(self, choice: Choice | None) -> Callable[[int], None]:
        """A function that runs it in that way, or in the one that the table says."""
        made: list[CublasProduct] = []

        def run(i: int) -> None:
            if not made:
                made.append(CublasProduct(*self.operands, choice=choice))
            made[0].launch(current_stream(self.device))

        return run


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every product of each model's block: the way that is chosen, beside all of them."""
    on_gpu = device.type == "cuda"
    for name in (SHAPES[:1] if quick else SHAPES) if on_gpu else (TINY,):
        rows = ROWS if on_gpu else TINY_ROWS
        for what, count, depth, outputs in products(name, rows):
            product = Product(count, depth, outputs, device)
            yield Case(
                op=OP,
                shape=f"{name} {what} N{outputs} K{depth} rows {count}",
                bytes=DTYPE.itemsize * (count * (depth + outputs) + depth * outputs),
                flop=2.0 * count * depth * outputs,
                ours=product.run(None),
                peers={named(way): product.run(way) for way in ways(count, outputs)},
            )


def products(name: str, rows: int) -> Iterator[tuple[str, int, int, int]]:
    """Of the model's block as it takes `rows` of a prompt: what, rows at once, depth, outputs."""
    config = shape_config(name, DTYPE)
    shape = ModelShape.of(config)
    gated = 1 if config.model_type == "opt" else 2
    few = min(rows, MLP_ROWS)
    yield "qkv", rows, shape.hidden, shape.hidden + shape.kv_width
    yield "out", rows, shape.hidden, shape.hidden
    yield "mlp in", few, shape.hidden, gated * shape.intermediate
    yield "mlp out", few, shape.intermediate, shape.hidden


def named(way: Choice) -> str:
    """As the table of results calls it."""
    return f"{way.splits} of {way.way}" if way.splits else way.way
