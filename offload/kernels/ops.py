"""The ops as `torch.ops.offload.*`: functions of tensors that torch.compile and CUDA graphs take.

They return new tensors (`rotary_append` also writes into the caches it is given); on a CPU they run
the reference, on a GPU the kernels library, on torch's current stream. The functions here have the
same names and take a `Norm` where an op takes its fields. A loop that runs one call many times is
better off with the ops' classes, which check and fill in their arguments once. No op has a
gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.kernels.activation import Activation, Kind
from offload.kernels.attention import DecodeAttention
from offload.kernels.call import Call, current_stream
from offload.kernels.dequantizer import Dequantize
from offload.kernels.gemm import SkinnyGemm
from offload.kernels.int8_linear import Int8Linear
from offload.kernels.linear import Linear
from offload.kernels.norm import Norm
from offload.kernels.qkv import QkvLayout
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.kernels.weight_format import SHAPE, WeightFormat
from offload.kernels.workspace import Workspace

__all__ = [
    "activation",
    "decode_attention",
    "dequantize",
    "int8_linear",
    "linear",
    "quant_linear",
    "residual_norm",
    "rotary_append",
    "skinny_gemm",
]

_library = torch.library.Library("offload", "DEF")


def _define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Make an op of `run`, whose outputs on fake tensors are those of `shape`."""
    name = schema[: schema.index("(")]
    # The kernels read what they are given where it lies: no compiler may change the strides.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _library.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"offload::{name}", shape, lib=_library)


def _launch(call: Call, device: torch.device) -> None:
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        call.launch(current_stream(device))


class _Scratch(Workspace):
    """Memory of one call's own, taken where a graph is captured: there it is the graph's."""

    def partials(self, nbytes: int) -> torch.Tensor:
        return torch.empty(-(-nbytes // 4), dtype=torch.float32, device=self.device)

    def counters(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device=self.device)


_workspaces: dict[tuple[int | None, int], Workspace] = {}


def _workspace(device: torch.device) -> Workspace:
    """Scratch for a call on torch's current stream, which runs one call after another."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return _Scratch(device)
    key = device.index, current_stream(device)
    return _workspaces.setdefault(key, Workspace(device))


def _norm_schema(name: str) -> str:
    return (
        f"str? {name}=None, Tensor? {name}_weight=None, Tensor? {name}_bias=None, "
        f"float {name}_eps=1e-05, float {name}_weight_offset=0.0"
    )


def _norm_fields(name: str, norm: Norm | None) -> dict[str, Any]:
    if norm is None:
        return {}
    return {
        name: norm.kind,
        f"{name}_weight": norm.weight,
        f"{name}_bias": norm.bias,
        f"{name}_eps": norm.eps,
        f"{name}_weight_offset": norm.weight_offset,
    }


def _norm_of(name: str, fields: dict[str, Any]) -> Norm | None:
    """Takes the fields of norm `name` out of an op's arguments."""
    kind = fields.pop(name, None)
    rest = {
        field: fields.pop(f"{name}_{field}")
        for field in ("weight", "bias", "eps", "weight_offset")
        if f"{name}_{field}" in fields
    }
    if kind is not None:
        return Norm(kind, rest.pop("weight", None), **rest)
    if rest.get("weight") is not None or rest.get("bias") is not None:
        raise ValueError(f"{name}_weight or {name}_bias is given without {name}")
    return None


# residual_norm


def _first(*tensors: torch.Tensor | None) -> torch.Tensor:
    given = next((x for x in tensors if x is not None), None)
    if given is None:
        raise ValueError("residual_norm: give at least one of residual, branch and branch2")
    return given


def _residual_norm_outputs(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    *,
    norm: str | None = None,
    norm2: str | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    like = _first(residual, branch, branch2)

    def output(wanted: bool) -> torch.Tensor:
        return like.new_empty(like.shape if wanted else (0,))

    return output(True), output(norm is not None), output(norm2 is not None)


def _residual_norm(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = _residual_norm_outputs(branch, residual, branch2, **options)
    branch_norm, norm, norm2 = (_norm_of(n, options) for n in ("branch_norm", "norm", "norm2"))
    total, out, out2 = outputs
    call = ResidualNorm(
        branch=branch,
        residual=residual,
        branch2=branch2,
        sum_out=total,
        out=None if norm is None else out,
        out2=None if norm2 is None else out2,
        branch_norm=branch_norm,
        norm=norm,
        norm2=norm2,
        **options,
    )
    _launch(call, total.device)
    return outputs


_define(
    "residual_norm(Tensor? branch=None, Tensor? residual=None, Tensor? branch2=None, *, "
    "Tensor? bias=None, Tensor? bias2=None, "
    + ", ".join(map(_norm_schema, ("branch_norm", "norm", "norm2")))
    + ") -> (Tensor, Tensor, Tensor)",
    _residual_norm,
    _residual_norm_outputs,
)


def residual_norm(
    branch: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    branch2: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    branch_norm: Norm | None = None,
    norm: Norm | None = None,
    norm2: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sum = residual + branch_norm(branch + bias) + (branch2 + bias2), norm(sum), norm2(sum).

    What is not asked for is an empty tensor. See `ResidualNorm` for shapes, dtypes and errors.
    """
    _first(residual, branch, branch2)  # without a tensor there is no device to dispatch to
    return torch.ops.offload.residual_norm(
        branch,
        residual,
        branch2,
        bias=bias,
        bias2=bias2,
        **_norm_fields("branch_norm", branch_norm),
        **_norm_fields("norm", norm),
        **_norm_fields("norm2", norm2),
    )


# rotary_append


def _rotary_query(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return qkv.new_empty(*qkv.shape[:2], heads, head_dim)


def _rotary_append(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    places: list[int],
    **options: Any,
) -> torch.Tensor:
    if len(places) != 5:
        raise ValueError(
            "rotary_append: places must be [q_offset, k_offset, v_offset, q_group_stride, "
            f"kv_group_stride], not {places}"
        )
    layout = QkvLayout(heads, kv_heads, head_dim, qkv.shape[-1], *places)
    query = _rotary_query(qkv, key_cache, value_cache, column, heads, kv_heads, head_dim)
    call = RotaryAppend(
        qkv,
        layout=layout,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        column=column,
        q_norm=_norm_of("q_norm", options),
        k_norm=_norm_of("k_norm", options),
        **options,
    )
    _launch(call, qkv.device)
    return query


_define(
    "rotary_append(Tensor qkv, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor column, "
    "SymInt heads, SymInt kv_heads, SymInt head_dim, SymInt[] places, *, Tensor? bias=None, "
    "Tensor? cos=None, Tensor? sin=None, bool interleaved=False, "
    + ", ".join(map(_norm_schema, ("q_norm", "k_norm")))
    + ") -> Tensor",
    _rotary_append,
    _rotary_query,
)


def rotary_append(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    column: torch.Tensor,
    layout: QkvLayout,
    *,
    bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> torch.Tensor:
    """Append qkv's keys and values to the caches; the queries [batch, tokens, heads, head_dim].

    See `RotaryAppend` for shapes, dtypes and errors.
    """
    return torch.ops.offload.rotary_append(
        qkv,
        key_cache,
        value_cache,
        column,
        layout.heads,
        layout.kv_heads,
        layout.head_dim,
        [
            layout.q_offset,
            layout.k_offset,
            layout.v_offset,
            layout.q_group_stride,
            layout.kv_group_stride,
        ],
        bias=bias,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        **_norm_fields("q_norm", q_norm),
        **_norm_fields("k_norm", k_norm),
    )


# activation


def _activation_output(
    input: torch.Tensor,
    kind: str | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    if gated and input.shape[-1] % 2:
        raise ValueError(
            f"activation: a row of input must be [gate, up] of equal size, not {input.shape[-1]} "
            "elements"
        )
    return input.new_empty(*input.shape[:-1], input.shape[-1] // (2 if gated else 1))


def _activation(
    input: torch.Tensor,
    kind: Kind | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    out = _activation_output(input, kind, gated=gated)
    _launch(Activation(input, out, kind=kind, bias=bias, gated=gated), input.device)
    return out


_define(
    "activation(Tensor input, str? kind, *, Tensor? bias=None, bool gated=False) -> Tensor",
    _activation,
    _activation_output,
)


def activation(
    input: torch.Tensor,
    kind: Kind | None,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(input + bias), or act(gate + bias) * (up + bias); see `Activation`."""
    return torch.ops.offload.activation(input, kind, bias=bias, gated=gated)


# decode_attention


def _attention_output(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


def _decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    out = _attention_output(query)
    call = DecodeAttention(
        query,
        key_cache,
        value_cache,
        out,
        length=length,
        scale=scale,
        workspace=_workspace(query.device),
        **options,
    )
    _launch(call, query.device)
    return out


_define(
    "decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor length, "
    "float scale, *, Tensor? start=None, Tensor? slopes=None, Tensor? sinks=None, "
    "float softcap=0.0, SymInt window=0, SymInt? max_length=None) -> Tensor",
    _decode_attention,
    _attention_output,
)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    length: torch.Tensor,
    scale: float,
    *,
    start: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    max_length: int | None = None,
) -> torch.Tensor:
    """One query a sequence against its cache, [batch, heads, head_dim]; see `DecodeAttention`."""
    return torch.ops.offload.decode_attention(
        query,
        key_cache,
        value_cache,
        length,
        scale,
        start=start,
        slopes=slopes,
        sinks=sinks,
        softcap=softcap,
        window=window,
        max_length=max_length,
    )


# skinny_gemm, linear


def _linear_output(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    transposed: bool = False,
    **_: Any,
) -> torch.Tensor:
    products = weight.shape[1 if transposed else 0]
    return input.new_empty(*input.shape[:-1], products // (2 if gated else 1))


def _skinny_gemm(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    out = _linear_output(input, weight, **options)
    norm = _norm_of("norm", options)
    call = SkinnyGemm(input, weight, out, norm=norm, workspace=_workspace(input.device), **options)
    _launch(call, input.device)
    return out


def _linear(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    out = _linear_output(input, weight, **options)
    norm = _norm_of("norm", options)
    guard = torch.cuda.device(input.device) if input.is_cuda else contextlib.nullcontext()
    with guard:
        call = Linear(input, weight, out, norm=norm, workspace=_workspace(input.device), **options)
        call.launch(current_stream(input.device))
    return out


_PRODUCT = (
    "(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? residual=None, "
    f"{_norm_schema('norm')}, str? activation=None, bool gated=False"
)
_define(f"skinny_gemm{_PRODUCT}) -> Tensor", _skinny_gemm, _linear_output)
_define(f"linear{_PRODUCT}, bool transposed=False) -> Tensor", _linear, _linear_output)


def skinny_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: Kind | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(norm(input) @ weight.T + bias) + residual for up to 16 rows; see `SkinnyGemm`."""
    return torch.ops.offload.skinny_gemm(
        input,
        weight,
        bias=bias,
        residual=residual,
        activation=activation,
        gated=gated,
        **_norm_fields("norm", norm),
    )


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: Kind | None = None,
    gated: bool = False,
    transposed: bool = False,
) -> torch.Tensor:
    """act(norm(input) @ weight.T + bias) + residual for any number of rows; see `Linear`."""
    return torch.ops.offload.linear(
        input,
        weight,
        bias=bias,
        residual=residual,
        activation=activation,
        gated=gated,
        transposed=transposed,
        **_norm_fields("norm", norm),
    )


# dequantize, quant_linear


_STORED = (
    "Tensor[] stored, str kind, str layout, SymInt[] block, bool zero_points, bool act_order, "
    "SymInt[] shape"
)


def _format_of(
    stored: list[torch.Tensor],
    kind: Any,
    layout: Any,
    block: list[int],
    zero_points: bool,
    act_order: bool,
    shape: list[int],
) -> tuple[WeightFormat, dict[str, torch.Tensor]]:
    """The format, and its tensors by the ends of their names."""
    form = WeightFormat(kind, layout, (block[0], block[1]), zero_points, act_order)
    names = [name for name in form.stored(tuple(shape)) if name != SHAPE]
    if len(stored) != len(names):
        raise ValueError(
            f"a weight in {form.name} is made of {', '.join(names)}, not of {len(stored)} tensors"
        )
    found = dict(zip(names, stored, strict=True))
    if SHAPE in form.stored(tuple(shape)):
        found[SHAPE] = torch.tensor(shape)
    return form, found


def _format_fields(
    form: WeightFormat, stored: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[Any, ...]:
    """The reverse: arguments of an op."""
    names = [name for name in form.stored(shape) if name != SHAPE]
    missing = [name for name in names if name not in stored]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    tensors = [stored[name] for name in names]
    return (
        tensors, form.kind, form.layout, form.block, form.zero_points, form.act_order, shape
    )  # fmt: skip


def _dequantize_output(stored: list[torch.Tensor], *form: Any, dtype: torch.dtype) -> torch.Tensor:
    shape = form[-1]
    if len(shape) == 3:  # experts [E, K, N], in memory as [E, N, K]
        return stored[0].new_empty((shape[0], shape[2], shape[1]), dtype=dtype).transpose(1, 2)
    return stored[0].new_empty(shape, dtype=dtype)


def _dequantize(stored: list[torch.Tensor], *form: Any, dtype: torch.dtype) -> torch.Tensor:
    described, found = _format_of(stored, *form)
    out = _dequantize_output(stored, *form, dtype=dtype)
    memory = out.transpose(1, 2) if out.dim() == 3 else out
    _launch(Dequantize(described, found, memory), out.device)
    return out


_define(f"dequantize({_STORED}, *, ScalarType dtype) -> Tensor", _dequantize, _dequantize_output)


def dequantize(
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight of `shape` that `stored` stands for, as `dtype`; see `Dequantize`."""
    return torch.ops.offload.dequantize(*_format_fields(form, stored, shape), dtype=dtype)


def _quant_linear_output(
    input: torch.Tensor, stored: list[torch.Tensor], *form: Any, gated: bool = False, **_: Any
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], form[-1][0] // (2 if gated else 1))


def _quant_linear(
    input: torch.Tensor, stored: list[torch.Tensor], *form: Any, **options: Any
) -> torch.Tensor:
    described, found = _format_of(stored, *form)
    out = _quant_linear_output(input, stored, *form, **options)
    guard = torch.cuda.device(input.device) if input.is_cuda else contextlib.nullcontext()
    with guard:
        call = QuantLinear(
            input, described, found, out, workspace=_workspace(input.device), **options
        )
        call.launch(current_stream(input.device))
    return out


_define(
    f"quant_linear(Tensor input, {_STORED}, *, Tensor? bias=None, Tensor? residual=None, "
    "str? activation=None, bool gated=False) -> Tensor",
    _quant_linear,
    _quant_linear_output,
)


def quant_linear(
    input: torch.Tensor,
    form: WeightFormat,
    stored: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Kind | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(input @ weight.T + bias) + residual with a stored weight; see `QuantLinear`."""
    return torch.ops.offload.quant_linear(
        input,
        *_format_fields(form, stored, shape),
        bias=bias,
        residual=residual,
        activation=activation,
        gated=gated,
    )


# int8_linear


def _int8_linear_output(
    input: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    gated: bool = False,
    **_: Any,
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], codes.shape[0] // (2 if gated else 1))


def _int8_linear(
    input: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, **options: Any
) -> torch.Tensor:
    out = _int8_linear_output(input, codes, scale, **options)
    form = WeightFormat("int8", "plain", (0 if scale.numel() == 1 else 1, 0), inputs="int8")
    stored = {"weight": codes, form.scale_name: scale}
    guard = torch.cuda.device(input.device) if input.is_cuda else contextlib.nullcontext()
    with guard:
        call = Int8Linear(input, form, stored, out, workspace=_workspace(input.device), **options)
        call.launch(current_stream(input.device))
    return out


_define(
    "int8_linear(Tensor input, Tensor codes, Tensor scale, *, Tensor? bias=None, "
    "Tensor? residual=None, str? activation=None, bool gated=False) -> Tensor",
    _int8_linear,
    _int8_linear_output,
)


def int8_linear(
    input: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Kind | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """act(x @ (codes * scale).T + bias) + residual, where x is the input rounded to int8 with a
    scale a row. codes: int8 [outputs, depth], scale: one a row of it, or one; see `Int8Linear`.
    """
    return torch.ops.offload.int8_linear(
        input, codes, scale, bias=bias, residual=residual, activation=activation, gated=gated
    )
