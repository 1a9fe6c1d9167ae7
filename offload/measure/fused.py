"""Rates of the fused engine's own parts: products of few rows and attention on the compute device,
and the host's time for a layer of a prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload.kernels.attention import DecodeAttention
from offload.kernels.call import current_stream
from offload.kernels.choices import dtype_name
from offload.kernels.linear import Linear
from offload.kernels.norm import Norm
from offload.kernels.qkv import QkvLayout
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.random_weight import random_stored, stored_bytes
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.kernels.scores import Scores
from offload.kernels.weight_format import WeightFormat
from offload.kernels.workspace import Workspace
from offload.measure.compute import run_seconds
from offload.scheduler.hardware import Curve

WIDTH = 8192  # of the square weights
ROTATED = 400 << 20  # bytes of weights used in turns: more than any L2 holds
ROWS = (1, 4, 16, 32, 64)
GROUPS = (1, 8)  # queries a KV head
PROMPTS = (128, 512, 4096)  # tokens
DTYPE = torch.bfloat16
# As resident layers keep them.
FORMATS = {name: WeightFormat(name, "panels", (1, 64)) for name in ("int8", "int4")}
ROUNDS, CALLS, PROMPT_CALLS = 5, 1000, 4
# Layers issued in a row, fewer than the driver's queue holds; and how often: over a second, since a
# virtual machine's core may be slow for a good part of one.
LAYERS, LAYER_ROUNDS = 50, 50


# The rates of a `Hardware` that are measured here.
RATES = ("few_rows", "prompt_attention", "gpu_attention", "kernel")


def own_rates(device: torch.device, rows: Sequence[int] = ROWS) -> Iterator[tuple[str, Any]]:
    """`RATES` and their values, each as soon as it is measured, so that callers have some even if
    others fail. `rows`: of the products.
    """
    yield "few_rows", few_rows(device, rows)
    yield "prompt_attention", prompt_attention(device)
    yield "gpu_attention", attention(device)
    yield "kernel", kernel_seconds(device)


def few_rows(device: torch.device, rows: Sequence[int] = ROWS) -> dict[str, Curve]:
    """By the format of the weights: rows -> bytes of weights per second that products of so many
    rows read, in the way that the engine takes here.
    """
    found = {dtype_name(DTYPE): _curve(_plain, None, rows, device)}
    for name, form in FORMATS.items():
        found[name] = _curve(_quantised, form, rows, device)
    return found


def _curve(
    make: Callable[..., tuple[Any, int]], form: Any, rows: Sequence[int], device: torch.device
) -> Curve:
    points = []
    for count in rows:
        input = torch.randn(count, WIDTH, dtype=DTYPE, device=device)
        out = torch.empty_like(input)
        call, nbytes = make(form, input, out)
        calls = [call] + [make(form, input, out)[0] for _ in range(ROTATED // nbytes)]
        points.append((count, len(calls) * nbytes / _seconds(calls, device)))
    return tuple(points)


def _plain(form: None, input: torch.Tensor, out: torch.Tensor) -> tuple[Any, int]:
    weight = torch.randn(WIDTH, WIDTH, dtype=input.dtype, device=input.device)
    return Linear(input, weight, out), weight.nbytes


def _quantised(form: WeightFormat, input: torch.Tensor, out: torch.Tensor) -> tuple[Any, int]:
    stored = random_stored(form, (WIDTH, WIDTH), input.device, input.dtype)
    return QuantLinear(input, form, stored, out), stored_bytes(stored)


def attention(device: torch.device) -> Curve:
    """Queries a KV head -> bytes of keys and values per second that decode attention reads, for
    many sequences.
    """
    return tuple((group, _attention(device, group)) for group in GROUPS)


def _attention(device: torch.device, group: int) -> float:
    batch, kv_heads, length, width = 32, 8, 2048, 128
    query = torch.ones(batch, kv_heads * group, width, dtype=DTYPE, device=device)
    caches = torch.zeros(2, 2, batch, kv_heads, length, width, dtype=DTYPE, device=device)
    workspace = Workspace(device)
    calls = [
        DecodeAttention(
            query,
            cache[0],
            cache[1],
            torch.empty_like(query),
            length=torch.full((batch,), length, dtype=torch.int32, device=device),
            scores=Scores(width**-0.5),
            workspace=workspace,
            even=True,
        )
        for cache in caches
    ]
    return caches.nbytes / _seconds(calls, device)


def prompt_attention(device: torch.device) -> Curve:
    """Tokens of a prompt -> FLOP per second of causal attention within prompts of that length, as
    many at once as make up the rows of a pass. Only half of the scores count, as the others are
    masked.
    """
    rows, heads, width = 8192, 32, 128
    points = []
    for tokens in PROMPTS:
        query, keys, values = torch.randn(
            3, max(1, rows // tokens), heads, tokens, width, dtype=DTYPE, device=device
        )

        def run(query: Any = query, keys: Any = keys, values: Any = values) -> None:
            for _ in range(PROMPT_CALLS):
                functional.scaled_dot_product_attention(query, keys, values, is_causal=True)

        seconds = statistics.median(run_seconds(run, device, ROUNDS)) / PROMPT_CALLS
        points.append((tokens, 2 * query.numel() * tokens / seconds))
    return tuple(points)


def _seconds(calls: Sequence[Any], device: torch.device) -> float:
    """Of all calls, one after the other."""
    stream = current_stream(device)

    def run() -> None:
        for call in calls:
            call.launch(stream)

    return statistics.median(run_seconds(run, device, ROUNDS))


def prompt_layer_seconds(device: torch.device) -> float:
    """Seconds that the host spends on a layer of a prompt: making, checking and launching calls of
    own kernels like a layer's, with torch's products and attention among them. They compute so
    little that the host never waits.
    """
    tokens, heads, head = 16, 4, 64
    width, stream = heads * head, current_stream(device)

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=DTYPE, device=device)

    rows, normed, branch, inner = (new(tokens, n * width) for n in (1, 1, 1, 4))
    qkv, query = new(1, tokens, 3 * width), new(1, tokens, heads, head)
    keys, values = new(1, heads, tokens, head), new(1, heads, tokens, head)
    into_qkv, into_branch = new(3 * width, width), new(width, width)
    into_inner, out_of_inner = new(4 * width, width), new(width, 4 * width)
    column = torch.zeros(1, dtype=torch.int32, device=device)
    layout, norm = QkvLayout.apart(heads, heads, head), Norm("rms", new(width), None, 1e-5)
    workspace = Workspace(device)

    def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **after: Any) -> None:
        Linear(x, weight, out, workspace=workspace, **after).launch(stream)

    def add() -> None:
        call = ResidualNorm(residual=rows, branch=branch, sum_out=rows, norm=norm, out=normed)
        call.launch(stream)

    def layer() -> None:
        ResidualNorm(residual=rows, norm=norm, out=normed).launch(stream)
        multiply(normed, into_qkv, qkv.view(tokens, -1))
        RotaryAppend(
            qkv, layout=layout, query=query, key_cache=keys, value_cache=values, column=column
        ).launch(stream)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, is_causal=True
        )
        multiply(attended.transpose(1, 2).reshape(tokens, width), into_branch, branch)
        add()
        multiply(normed, into_inner, inner, activation="silu")
        multiply(inner, out_of_inner, branch)
        add()

    times = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(LAYER_ROUNDS):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(LAYERS):
                layer()
            times.append((time.perf_counter() - start) / LAYERS)
    torch.cuda.synchronize(device)
    return min(times)


def kernel_seconds(device: torch.device) -> float:
    """Seconds of a small kernel on the compute device right behind another one, in a graph: like
    those between the products of a step.
    """
    rows = torch.zeros(64, 4096, dtype=DTYPE, device=device)
    call = ResidualNorm(residual=rows, branch=rows, sum_out=rows)
    call.launch(current_stream(device))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call.launch(current_stream(device))
    return statistics.median(run_seconds(graph.replay, device, ROUNDS)) / CALLS
