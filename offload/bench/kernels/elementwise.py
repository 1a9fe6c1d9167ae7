"""Norms, rotary appends and activations on the rows of real models: prompts, and decode steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, Rates, copies, launches, seconds
from offload.kernels import Activation, Norm, QkvLayout, ResidualNorm, RotaryAppend, reference
from offload.kernels.activation import Kind

OPS = ("residual_norm", "rotary_append", "activation")
PROMPT = (64, 512)  # sequences, tokens: everything is larger than 256 MB
QUICK_PROMPT = (32, 512)
TINY_PROMPT = (2, 3)  # for a CPU
# What the C header's packs_per_thread and variant may be.
NORM_VARIANTS = (0, 1, 2, 4, 102, 104, 204, 404, 504, 24, 124, 224, 222)
ROTARY_VARIANTS = (0, 1, 101, 201, 12, 212, 22, 122, 222, 322, 23, 223)
SPARE = 16  # columns that a cache has beyond the tokens
COLUMN = 3  # where the tokens go
PATTERN = "pattern"  # the peer that only copies, see streams.py


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every op on every model's rows."""
    prompt = (QUICK_PROMPT if quick else PROMPT) if device.type == "cuda" else TINY_PROMPT
    for norm in NORMS[:3] if quick else NORMS:
        yield norm.case(device, prompt[0] * prompt[1])
    for activation in ACTIVATIONS[:3] if quick else ACTIVATIONS:
        yield activation.case(device, prompt[0] * prompt[1])
    for rotary in ROTARIES[:3] if quick else ROTARIES:
        yield rotary.case(device, *prompt)
    for batch in (1, 16):
        for norm in NORMS[:2]:
            yield norm.case(device, batch)
        for activation in ACTIVATIONS[:2]:
            yield activation.case(device, batch)
        for rotary in ROTARIES[:2]:
            yield rotary.case(device, batch, 1)


def sweep(device: torch.device) -> None:
    """Print every norm's and every rotary append's share of its bound in each variant."""
    rates = Rates.measure(device, 0.3)
    print(f"shares of copy, {rates.copy / 1e12:.3f} TB/s")
    many = PROMPT[0] * PROMPT[1]
    norms = [(norm, many if norm.width > 1024 else 4 * many) for norm in NORMS]
    norms += [(NORMS[0], rows) for rows in (2048, 1024, 512)]
    _sweep(device, rates, NORM_VARIANTS, (norm.case(device, n, NORM_VARIANTS) for norm, n in norms))
    rotaries = [(rotary, PROMPT) for rotary in ROTARIES]
    rotaries += [(ROTARIES[0], (batch, 1)) for batch in (2048, 1024, 512)]
    _sweep(
        device,
        rates,
        ROTARY_VARIANTS,
        (
            rotary.case(device, batch, tokens, ROTARY_VARIANTS)
            for rotary, (batch, tokens) in rotaries
        ),
    )


def _sweep(
    device: torch.device, rates: Rates, variants: Sequence[int], cases: Iterable[Case]
) -> None:
    print("  copy" + "".join(f"{each:>6}" for each in variants), "  copy: no math; 0: our choice")
    for case in cases:
        ways = dict(case.peers)
        try:
            if PATTERN in ways:
                ways[PATTERN](0)
        except Exception as error:  # Triton needs a compiler: ours have none to wait for
            print(f"no copy of the pattern: {type(error).__name__}: {error}")
            del ways[PATTERN]
        missing = "" if PATTERN in ways else "     -"
        took = seconds(list(ways.values()), device, case.copies, rounds=5)
        shares = missing + "".join(f"{rates.bound(case) / each:6.3f}" for each in took)
        print(f"{shares}  {case.op} {case.shape}", flush=True)


def _variants(
    calls: Sequence[ResidualNorm | RotaryAppend], field: str, variants: Sequence[int]
) -> dict[str, Callable[[int], Any]]:
    """A way to run the calls for each variant, which `field` of their arguments picks."""

    def way(variant: int) -> Callable[[int], None]:
        launch = launches(calls)

        def run(i: int) -> None:
            setattr(calls[i].arguments, field, variant)
            launch(i)

        return run

    return {str(variant): way(variant) for variant in variants}


def _pattern(device: torch.device, copy: str, *arguments: Any) -> dict[str, Callable[[int], Any]]:
    """The copy of streams.py of that name as a peer, where there is a GPU and Triton."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return {}
    from offload.bench.kernels import streams

    return {PATTERN: streams.of_copies(getattr(streams, copy), *arguments)}


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _peers(
    eager: Callable[..., Any], *inputs: list[torch.Tensor]
) -> dict[str, Callable[[int], Any]]:
    """`eager` of every input's copy i, as it is and compiled once for all copies."""

    def of_copies(function: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda i: function(*(each[i] for each in inputs))

    return {"eager": of_copies(eager), "compile": of_copies(torch.compile(eager, dynamic=False))}


@dataclass(frozen=True)
class Rows:
    """Residual sum and norm of one model's rows."""

    model: str
    width: int
    kind: str
    branches: int = 1  # 0: no sum, a norm alone
    bias: bool = False
    norms: int = 1  # outputs
    sandwich: bool = False  # the branch is normalised too
    dtype: torch.dtype = torch.bfloat16

    def case(self, device: torch.device, rows: int, variants: Sequence[int] = ()) -> Case:
        """Beside its peers, or beside the library's own `variants`."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": device}
        tensors = (1 + self.branches) + (self.branches > 0) + self.norms
        size = rows * self.width * self.dtype.itemsize
        count = copies(tensors * size, device)

        def norm() -> Norm:
            weight = _random(self.width, **like)
            if self.kind == "layer":
                return Norm("layer", weight, _random(self.width, **like))
            return Norm("rms", weight)

        norms = [norm() for _ in range(self.norms)]
        branch_norm = norm() if self.sandwich else None
        bias = _random(self.width, **like) if self.bias else None
        residual, *branches = (
            [_random(rows, self.width, **like) for _ in range(count)]
            for _ in range(1 + self.branches)
        )
        outs = [[torch.empty(rows, self.width, **like) for _ in range(count)] for _ in norms]
        calls = [
            ResidualNorm(
                residual=residual[i],
                branch=branches[0][i] if branches else None,
                branch2=branches[1][i] if len(branches) > 1 else None,
                bias=bias,
                branch_norm=branch_norm,
                norm=norms[0],
                norm2=norms[1] if len(norms) > 1 else None,
                sum_out=residual[i] if branches else None,
                out=outs[0][i],
                out2=outs[1][i] if len(norms) > 1 else None,
                early=_is_small(rows),
            )
            for i in range(count)
        ]

        # A pair a stream: what is read, and what is written.
        read = [branches[0], residual, *branches[1:]] if branches else [residual]
        written = [residual, *outs] if branches else outs
        pattern = _pattern(
            device,
            "copy_streams",
            list(zip(*read, strict=True)),
            list(zip(*written, strict=True)),
        )

        def eager(total: torch.Tensor, *added: torch.Tensor) -> Any:
            for j, branch in enumerate(added):
                if j == 0:
                    branch = branch if bias is None else branch + bias
                    branch = branch if branch_norm is None else _torch_norm(branch, branch_norm)
                total = total + branch
            return total, [_torch_norm(total, one) for one in norms]

        what = ["norm" if not branches else f"{self.branches}-branch sum, norm"]
        what += ["bias"] if self.bias else []
        what += ["twice"] if self.norms > 1 else []
        what += ["of a normed branch"] if self.sandwich else []
        return Case(
            op="residual_norm",
            shape=f"{self.model} {rows} x {self.width} {self.kind} {_short(self.dtype)}: "
            + ", ".join(what),
            bytes=tensors * size,
            flop=0.0,
            ours=launches(calls),
            peers=pattern
            | (
                _variants(calls, "packs_per_thread", variants) or _peers(eager, residual, *branches)
            ),
            copies=count,
        )


@dataclass(frozen=True)
class Inner:
    """The activation of one model's MLP."""

    model: str
    width: int
    kind: Kind
    gated: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def case(self, device: torch.device, rows: int) -> Case:
        like: dict[str, Any] = {"dtype": self.dtype, "device": device}
        row = self.width * (2 if self.gated else 1)
        size = rows * (row + self.width) * self.dtype.itemsize
        count = copies(size, device)
        inputs = [_random(rows, row, **like) for _ in range(count)]
        outs = [torch.empty(rows, self.width, **like) for _ in range(count)]
        bias = _random(row, **like) if self.bias else None
        options: dict[str, Any] = {"kind": self.kind, "bias": bias, "gated": self.gated}
        calls = [
            Activation(x, out, early=_is_small(rows), **options)
            for x, out in zip(inputs, outs, strict=True)
        ]

        def eager(x: torch.Tensor) -> torch.Tensor:
            x = x if bias is None else x + bias
            if not self.gated:
                return reference.activate(x, self.kind)
            gate, up = x.chunk(2, -1)
            return reference.activate(gate, self.kind) * up

        what = f"{'gated ' if self.gated else ''}{self.kind}{', bias' if self.bias else ''}"
        return Case(
            op="activation",
            shape=f"{self.model} {rows} x {self.width} {_short(self.dtype)}: {what}",
            bytes=size,
            flop=0.0,
            ours=launches(calls),
            peers=_peers(eager, inputs),
            copies=count,
        )


@dataclass(frozen=True)
class Heads:
    """The QKV rows of one model's layer."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    grouped: bool = False
    interleaved: bool = False
    bias: bool = False
    normed: bool = False
    weight_offset: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def case(
        self, device: torch.device, batch: int, tokens: int, variants: Sequence[int] = ()
    ) -> Case:
        """Beside its peers, or beside the library's own `variants`."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": device}
        make = QkvLayout.grouped if self.grouped else QkvLayout.apart
        layout = make(self.heads, self.kv_heads, self.head_dim)
        rows = batch * tokens
        size = 2 * rows * layout.width * self.dtype.itemsize
        count = copies(size, device)
        capacity = tokens + SPARE
        qkv = [_random(batch, tokens, layout.width, **like) for _ in range(count)]
        queries, keys, values = (
            [torch.empty(shape, **like) for _ in range(count)]
            for shape in (
                (batch, tokens, self.heads, self.head_dim),
                (batch, self.kv_heads, capacity, self.head_dim),
                (batch, self.kv_heads, capacity, self.head_dim),
            )
        )
        bias = _random(layout.width, **like) if self.bias else None
        norm = None
        if self.normed:
            weight = _random(self.head_dim, **like)
            norm = Norm("rms", weight, weight_offset=self.weight_offset)
        cos = sin = None
        if self.rotary_dim:
            angles = torch.rand(1, tokens, self.rotary_dim // 2, device=device)
            cos, sin = angles.cos(), angles.sin()
        layouts, columns = [layout] * count, [COLUMN] * count
        pattern = _pattern(device, "split_heads", qkv, layouts, queries, keys, values, columns)
        column = torch.full((1,), COLUMN, dtype=torch.int32, device=device)
        calls = [
            RotaryAppend(
                qkv[i],
                layout=layout,
                query=queries[i],
                key_cache=keys[i],
                value_cache=values[i],
                column=column,
                bias=bias,
                cos=cos,
                sin=sin,
                interleaved=self.interleaved,
                q_norm=norm,
                k_norm=norm,
                early=_is_small(rows),
            )
            for i in range(count)
        ]

        def turned(x: torch.Tensor) -> torch.Tensor:
            """As transformers does it: normalised and rotated in the model's dtype."""
            if norm is not None:
                x = _torch_norm(x, norm)
            if cos is None or sin is None:
                return x
            x, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
            if self.interleaved:
                c, s = (t.repeat_interleave(2, -1).to(x.dtype).unsqueeze(2) for t in (cos, sin))
                other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            else:
                c, s = (torch.cat((t, t), -1).to(x.dtype).unsqueeze(2) for t in (cos, sin))
                a, b = x.chunk(2, -1)
                other = torch.cat((-b, a), -1)
            x = x * c + other * s
            return torch.cat((x, rest), -1) if rest.shape[-1] else x

        def eager(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            x = x if bias is None else x + bias
            d = self.head_dim
            if self.grouped:
                x = x.view(batch, tokens, self.kv_heads, layout.group + 2, d)
                q = x[..., :-2, :].reshape(batch, tokens, self.heads, d)
                k, v = x[..., -2, :], x[..., -1, :]
            else:
                parts = x.split([n * d for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
                q, k, v = (part.view(batch, tokens, -1, d) for part in parts)
            key[:, :, COLUMN : COLUMN + tokens] = turned(k).transpose(1, 2)
            value[:, :, COLUMN : COLUMN + tokens] = v.transpose(1, 2)
            return turned(q)

        what = [f"{self.heads}/{self.kv_heads} x {self.head_dim}", f"rotary {self.rotary_dim}"]
        flags = ("interleaved", "grouped", "bias", "normed")
        what += [name for name in flags if getattr(self, name)]
        return Case(
            op="rotary_append",
            shape=f"{self.model} {batch} x {tokens} {_short(self.dtype)}: {', '.join(what)}",
            bytes=size,
            flop=0.0,
            ours=launches(calls),
            peers=pattern
            | (_variants(calls, "variant", variants) or _peers(eager, qkv, keys, values)),
            copies=count,
        )


def _is_small(rows: int) -> bool:
    """Decode steps are launched early, as the engine does it."""
    return rows <= 64


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]


def _torch_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    weight = norm.weight
    if weight is not None and norm.weight_offset:
        weight = weight + norm.weight_offset
    if norm.kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.eps)
    return functional.rms_norm(x, x.shape[-1:], weight, norm.eps)


NORMS = (
    Rows("Llama-7B", 4096, "rms"),
    Rows("OPT-13B", 5120, "layer", bias=True),
    Rows("Llama-70B", 8192, "rms", branches=0),
    Rows("GPT-NeoX-20B", 6144, "layer", branches=2, bias=True, norms=2),
    Rows("Gemma-2-9B", 3584, "rms", sandwich=True),
    Rows("Bloom-176B", 14336, "layer"),
    Rows("SmolLM2-135M", 576, "rms"),
    Rows("Llama-7B", 4096, "rms", dtype=torch.float32),
    Rows("OPT-13B", 5120, "layer", dtype=torch.float16),
)
ACTIVATIONS = (
    Inner("Llama-7B", 11008, "silu", gated=True),
    Inner("OPT-13B", 20480, "relu", bias=True),
    Inner("GPT-NeoX-20B", 24576, "gelu", bias=True),
    Inner("GPT-J-6B", 16384, "gelu_tanh", bias=True),
    Inner("Gemma-2-9B", 14336, "gelu_tanh", gated=True),
    Inner("GPT-NeoX-20B", 24576, "gelu", bias=True, dtype=torch.float16),
    Inner("Llama-7B", 11008, "silu", gated=True, dtype=torch.float32),
)
ROTARIES = (
    Heads("Llama-7B", 32, 32, 128, 128),
    Heads("Llama-70B", 64, 8, 128, 128),
    Heads("Qwen3-14B", 40, 8, 128, 128, normed=True),
    Heads("GPT-NeoX-20B", 64, 64, 96, 24, grouped=True, bias=True),
    Heads("GPT-J-6B", 16, 16, 256, 64, interleaved=True),
    Heads("OPT-13B", 40, 40, 128, 0, bias=True),
    Heads("Gemma-3-12B", 16, 8, 256, 256, normed=True, weight_offset=1.0),
    Heads("Llama-7B", 32, 32, 128, 128, dtype=torch.float32),
)

if __name__ == "__main__":
    sweep(torch.device("cuda"))
