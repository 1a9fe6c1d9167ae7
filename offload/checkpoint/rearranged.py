"""Operations that only rearrange whole runs of bytes, done on the extents of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from offload.checkpoint.expressions import Coded, Deferred, Expression, Pieces
from offload.checkpoint.extent import Extent

aten = torch.ops.aten

# More pieces than this in one tensor would cost more requests than reading and rewriting it once.
MAX_PIECES = 4096


class Lazy(Protocol):
    """A tensor that stands for an expression."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def expression(self) -> Expression: ...
    def on_meta(self) -> torch.Tensor: ...


def rearranged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` makes of lazy tensors: an expression, or a list of them; None where that is more
    than a rearrangement of whole runs of bytes.
    """
    handler = _HANDLERS.get(func)
    return None if handler is None else handler(*args, **kwargs)


def _same(x: Lazy, *_: Any, **__: Any) -> Expression:
    return x.expression


def _to_copy(x: Lazy, *, dtype: torch.dtype | None = None, **_: Any) -> Expression:
    if dtype is None or dtype == x.dtype:
        return x.expression
    if isinstance(x.expression, Coded):
        return replace(x.expression, dtype=dtype)
    args = (x.expression, dtype)  # device and pinning are the placement's business
    return Deferred(torch.Tensor.to, args, {}, None, x.shape, dtype)


def _reshaped(func: Any) -> Callable[..., Pieces | None]:
    """The handler of an operation that changes the shape only; torch works the new one out."""

    def handler(x: Lazy, *args: Any) -> Pieces | None:
        if not isinstance(x.expression, Pieces):
            return None
        return replace(x.expression, shape=func(x.on_meta(), *args).shape)

    return handler


def _pieces(tensors: Sequence[torch.Tensor]) -> list[Pieces] | None:
    """What all of `tensors` stand for, if that is plain bytes of one dtype."""
    expressions = [getattr(t, "expression", None) for t in tensors]
    pieces = [e for e in expressions if isinstance(e, Pieces)]
    one_dtype = len({e.dtype for e in pieces}) == 1
    return pieces if one_dtype and len(pieces) == len(tensors) else None


def _joined(pieces: Sequence[Pieces], dim: int) -> Pieces | None:
    shape = torch.cat([torch.empty(e.shape, device="meta") for e in pieces], dim).shape
    outer = math.prod(shape[: dim % len(shape)])
    extents: list[Extent] = []
    for o in range(outer):
        for e in pieces:
            step = math.prod(e.shape) * e.dtype.itemsize // outer
            extents += e.cut(o * step, (o + 1) * step)
        if len(extents) > MAX_PIECES:
            return None
    return Pieces(tuple(extents), shape, pieces[0].dtype)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Pieces | None:
    pieces = _pieces(tensors)
    return None if pieces is None else _joined(pieces, dim)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Pieces | None:
    pieces = _pieces(tensors)
    if pieces is None:
        return None
    shapes = [torch.empty(e.shape, device="meta").unsqueeze(dim).shape for e in pieces]
    return _joined([replace(e, shape=s) for e, s in zip(pieces, shapes, strict=True)], dim)


def _slice(
    x: Lazy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Expression | None:
    length = aten.slice.Tensor(x.on_meta(), dim, start, end, step).shape[dim]
    if length == x.shape[dim]:
        return x.expression
    if step != 1:
        return None
    return _run(x, dim, slice(start, end).indices(x.shape[dim])[0], length)


def _run(x: Lazy, dim: int, start: int, length: int) -> Pieces | None:
    """`length` entries of `dim` from `start` on, where they are one run of bytes."""
    dim %= len(x.shape)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if not isinstance(x.expression, Pieces) or math.prod(before) != 1:
        return None
    row = math.prod(after) * x.dtype.itemsize
    extents = x.expression.cut(start * row, (start + length) * row)
    return Pieces(extents, torch.Size((*before, length, *after)), x.dtype)


def _split(x: Lazy, sizes: int | Sequence[int], dim: int = 0) -> list[Pieces] | None:
    split = aten.split.Tensor if isinstance(sizes, int) else aten.split_with_sizes.default
    parts: list[Pieces] = []
    at = 0
    for length in [part.shape[dim] for part in split(x.on_meta(), sizes, dim)]:
        part = _run(x, dim, at, length)
        if part is None:
            return None
        parts.append(part)
        at += length
    return parts


def _select(x: Lazy, dim: int, index: int) -> Pieces | None:
    shape = aten.select.int(x.on_meta(), dim, index).shape
    row = _run(x, dim, index % x.shape[dim], 1)
    return None if row is None else replace(row, shape=shape)


def _unbind(x: Lazy, dim: int = 0) -> list[Pieces] | None:
    rows: list[Pieces] = []
    for index in range(len(aten.unbind.int(x.on_meta(), dim))):
        row = _select(x, dim, index)
        if row is None:
            return None
        rows.append(row)
    return rows


_HANDLERS: dict[Any, Callable[..., Expression | Sequence[Expression] | None]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to_copy,
    aten.view.default: _reshaped(aten.view.default),
    aten._unsafe_view.default: _reshaped(aten.view.default),
    aten.unsqueeze.default: _reshaped(aten.unsqueeze.default),
    aten.squeeze.default: _reshaped(aten.squeeze.default),
    aten.squeeze.dim: _reshaped(aten.squeeze.dim),
    aten.squeeze.dims: _reshaped(aten.squeeze.dims),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.select.int: _select,
}
