"""torch.ops.offload: opcheck, torch.compile without graph breaks, CUDA graphs, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import random, random_norm
from machines import needs_gpu

from offload.kernels import Norm, QkvLayout, ops, reference
from offload.kernels.dequantize import dequantise
from offload.kernels.ops.format_fields import format_fields
from offload.kernels.ops.norm_fields import norm_fields
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import WeightFormat

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def flat(name: str, norm: Norm | None) -> dict[str, Any]:
    return norm_fields(name, norm)


class Samples:
    """Arguments of every op, small and with odd sizes."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.like: dict[str, Any] = {"dtype": dtype, "device": device}
        self.device = device

    def tensor(self, *shape: int) -> torch.Tensor:
        return random(*shape, **self.like)

    def norm(self, kind: str, width: int) -> Norm:
        norm = random_norm(kind, width, weight_offset=1.0, eps=1e-6, **self.like)
        assert norm is not None
        return norm

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def residual_norm(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, y, z, b = self.tensor(2, 3, 24), self.tensor(2, 3, 24), self.tensor(2, 3, 24), None
        b = self.tensor(24)
        rms, layer = self.norm("rms", 24), self.norm("layer", 24)
        return [
            ((x, y), {"bias": b, **flat("norm", rms)}),
            ((x, y, z), {"bias2": b, **flat("norm", layer), **flat("norm2", rms)}),
            ((x,), {**flat("branch_norm", layer)}),
            ((None, y), {**flat("norm", Norm("layer", None))}),
        ]

    def rotary_append(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        samples = []
        for layout in (QkvLayout.apart(4, 2, 8), QkvLayout.grouped(4, 2, 8)):
            places = [layout.q_offset, layout.k_offset, layout.v_offset]
            places += [layout.q_group_stride, layout.kv_group_stride]
            both = self.tensor(2, 2, 2, 6, 8)
            angles = torch.rand(1, 3, 4, device=self.device)
            arguments = (self.tensor(2, 3, layout.width), both[0], both[1], self.ints(1, 2))
            options = {"bias": self.tensor(layout.width), **flat("q_norm", self.norm("rms", 8))}
            options |= {"cos": angles.cos(), "sin": angles.sin()}
            samples.append(((*arguments, 4, 2, 8, places), options))
        return samples

    def activation(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, b = self.tensor(2, 3, 20), self.tensor(20)
        return [((x, "gelu"), {"bias": b}), ((x, "silu"), {"gated": True}), ((x, None), {})]

    def decode_attention(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        query, both = self.tensor(2, 4, 8), self.tensor(2, 2, 2, 6, 8)
        heads = torch.rand(4, device=self.device)
        arguments = (query, both[0], both[1], self.ints(6, 3), 0.35)
        return [
            (arguments, {}),
            (arguments, {"start": self.ints(2, 0), "slopes": heads, "softcap": 5.0}),
            (arguments, {"sinks": heads, "window": 2, "max_length": 6}),
        ]

    def skinny_gemm(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, w, b, r = self.tensor(2, 1, 24), self.tensor(10, 24), self.tensor(10), None
        r = self.tensor(2, 1, 5)
        return [
            ((x, w), {}),
            ((x, w), {"bias": b, "residual": r, "activation": "silu", "gated": True}),
            ((x, w), flat("norm", self.norm("layer", 24))),
        ]

    def linear(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, w, b = self.tensor(2, 11, 24), self.tensor(24, 10), self.tensor(10)
        layer = flat("norm", self.norm("layer", 24))
        return [
            ((x, w), {"bias": b, "transposed": True, **layer}),
            *self.skinny_gemm(),
        ]

    def dequantize(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        dtype = self.like["dtype"]
        return [(fields, {"dtype": dtype}) for fields in self.stored("int4-g32-zp", "int8-channel")]

    def quant_linear(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, b, r = self.tensor(2, 1, 64), self.tensor(10), self.tensor(2, 1, 5)
        options = {"bias": b, "residual": r, "activation": "silu", "gated": True}
        return [
            ((x, *fields), more)
            for fields, more in zip(self.stored("int4", "mxfp4"), ({}, options), strict=True)
        ]

    def int8_linear(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        x, b, r = self.tensor(2, 3, 64), self.tensor(16), self.tensor(2, 3, 8)
        stored = quantise(self.tensor(16, 64), WeightFormat.parse("w8a8"))
        weight = stored["weight"], stored["weight_scale"]
        options = {"bias": b, "residual": r, "activation": "silu", "gated": True}
        return [((x, *weight), {}), ((x, *weight), options)]

    def stored(self, *names: str) -> list[tuple[Any, ...]]:
        """Weights [10, 64] in formats, as the ops take them."""
        found = []
        for name in names:
            form = WeightFormat.parse(name)
            tensors = quantise(self.tensor(10, 64), form)
            found.append(format_fields(form, tensors, (10, 64)))
        return found


OPS = (
    "linear",
    "residual_norm",
    "rotary_append",
    "activation",
    "decode_attention",
    "skinny_gemm",
    "dequantize",
    "quant_linear",
    "int8_linear",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str, device: str) -> None:
    function = getattr(torch.ops.offload, op).default
    for dtype in (torch.float32, torch.bfloat16):
        for arguments, options in getattr(Samples(device, dtype), op)():
            torch.library.opcheck(function, arguments, options)


def block(s: Samples) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Every op once, in the order of a transformer's layer."""
    width, layout = 24, QkvLayout.apart(4, 2, 8)
    weights = {
        "norm1": s.norm("rms", width),
        "norm2": s.norm("rms", width),
        "qkv": s.tensor(layout.width, width) / 5,
        "out": s.tensor(width, 32) / 5,
        "up": s.tensor(40, width) / 5,
        "down": s.tensor(width, 20) / 5,
        "bias": s.tensor(width),
    }
    scale = 8**-0.5

    def layer(
        x: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        column: torch.Tensor,
        length: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        batch = x.shape[0]
        qkv = ops.skinny_gemm(x, weights["qkv"], norm=weights["norm1"])
        q = ops.rotary_append(
            qkv.view(batch, 1, layout.width), keys, values, column, layout, cos=cos, sin=sin
        )
        a = ops.decode_attention(q.view(batch, 4, 8), keys, values, length, scale)
        o = ops.skinny_gemm(a.view(batch, 32), weights["out"])
        total, h, _ = ops.residual_norm(o, x, bias=weights["bias"], norm=weights["norm2"])
        up = ops.activation(h @ weights["up"].T, "silu", gated=True)
        return ops.linear(up, weights["down"], residual=total)

    angles = torch.rand(1, 1, 4, device=s.device)
    arguments = (
        s.tensor(3, width),
        s.tensor(3, 2, 6, 8),
        s.tensor(3, 2, 6, 8),
        s.ints(2, 4, 5),
        s.ints(3, 5, 6),
        angles.cos(),
        angles.sin(),
    )
    return layer, arguments


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() for x in arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_breaks(backend: str, device: str) -> None:
    layer, arguments = block(Samples(device))
    eager, compiled = copied(arguments), copied(arguments)
    expected = layer(*eager)
    torch._dynamo.reset()
    result = torch.compile(layer, fullgraph=True, backend=backend)(*compiled)
    torch.testing.assert_close(result, expected)
    for ours, theirs in zip(compiled, eager, strict=True):  # the caches were written
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(compiled[1], arguments[1])


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_cuda_graph(device: str) -> None:
    layer, arguments = block(Samples(device, torch.bfloat16))
    inputs, eager = copied(arguments), copied(arguments)
    layer(*copied(arguments))  # cuBLAS takes its own memory outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(*inputs)
    for step in range(3):
        x = torch.randn_like(inputs[0])
        for state in (inputs, eager):
            state[0].copy_(x)
            state[3].fill_(step)  # another column each time, read on the device
            state[4].fill_(step + 1)
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, layer(*eager))
        assert all(torch.equal(a, b) for a, b in zip(inputs, eager, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_functions_are_the_references(device: str) -> None:
    s = Samples(device)
    x, y = s.tensor(5, 24), s.tensor(5, 24)
    norm, norm2 = s.norm("layer", 24), s.norm("rms", 24)
    total, out, nothing = ops.residual_norm(x, y, branch_norm=norm2, norm=norm)
    wanted = reference.residual_norm(branch=x, residual=y, branch_norm=norm2, norm=norm)
    torch.testing.assert_close((total, out), wanted[:2])
    assert nothing.numel() == 0
    torch.testing.assert_close(
        ops.activation(x, "gelu_tanh", gated=True),
        reference.activation(x, kind="gelu_tanh", gated=True),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_stored_weights_by_their_functions(device: str) -> None:
    s = Samples(device, torch.bfloat16)
    form = WeightFormat.parse("int8-g32-zp")
    stored = quantise(s.tensor(10, 64), form)
    weight = dequantise(form, stored, (10, 64), torch.bfloat16)
    assert torch.equal(ops.dequantize(form, stored, (10, 64), torch.bfloat16), weight)
    x = s.tensor(3, 64)
    torch.testing.assert_close(ops.quant_linear(x, form, stored, (10, 64)), x @ weight.T)
    w8a8 = quantise(s.tensor(16, 64), WeightFormat.parse("w8a8"))
    rounded = dequantise(WeightFormat.parse("w8a8"), w8a8, (16, 64), torch.float32)
    codes, scale = reference.int8_rows(x.float())
    wanted = (codes * scale.unsqueeze(-1)) @ rounded.T
    found = ops.int8_linear(x, w8a8["weight"], w8a8["weight_scale"])
    torch.testing.assert_close(found, wanted.to(torch.bfloat16))
    with pytest.raises(ValueError, match="weight_scale is missing"):
        ops.dequantize(form, {"weight_packed": x}, (10, 64), torch.bfloat16)
    with pytest.raises(ValueError, match=r"made of weight_packed, .*, not of 1 tensors"):
        torch.ops.offload.dequantize([x], "int4", "packed", [1, 32], False, False, [10, 64],
                                     dtype=torch.bfloat16)  # fmt: skip


def test_errors_name_the_argument() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="give at least one of residual, branch and branch2"):
        ops.residual_norm()
    with pytest.raises(ValueError, match="norm_weight or norm_bias is given without norm"):
        torch.ops.offload.residual_norm(x, norm_weight=x[0])
    with pytest.raises(ValueError, match=r"branch must have shape \[2, 8\], not \[3, 8\]"):
        ops.residual_norm(x, x[:2])
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.activation(torch.zeros(8, 3).T, "relu")
    with pytest.raises(ValueError, match=r"\[gate, up\] of equal size, not 7 elements"):
        ops.activation(x[:, :7].contiguous(), "silu", gated=True)
    with pytest.raises(ValueError, match="float64 is not supported"):
        ops.activation(x.double(), "relu")
    cache = torch.zeros(1, 1, 4, 2)
    column = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="places must be"):
        torch.ops.offload.rotary_append(x[None], cache, cache.clone(), column, 1, 1, 2, [0, 2])
    with pytest.raises(ValueError, match="cos and sin must be given together"):
        layout = QkvLayout.apart(2, 1, 2)
        ops.rotary_append(x[None], cache, cache.clone(), column, layout, cos=torch.zeros(1, 2, 1))
