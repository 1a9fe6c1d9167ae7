"""A module's weight, as an expression over the tensors that are stored for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.checkpoint.expressions import Coded, Deferred, Expression, Pieces
from offload.models.quantized.coded import Decoder, decoder_of

T = TypeVar("T")
Fill = Callable[[int], None]  # fills what it was made for, on the stream of that number


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A weight of a module: an expression over stored tensors that are the module's parameters."""

    key: str  # the attribute that the module's forward reads
    parts: tuple[str, ...]  # keys of `_parameters`, in the order of the leaves' own
    expression: Expression
    placeholder: nn.Parameter

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return self.placeholder.nbytes

    @property
    def beside(self) -> int:
        """Bytes that filling it takes besides."""
        return _beside(self.expression)

    @property
    def formats(self) -> set[str]:
        """The names of the formats that it is stored in."""
        decoders = map(decoder_of, leaves_of(self.expression) or [])
        return {decoder.form.name for decoder in decoders if decoder is not None}

    @property
    def decoder(self) -> Decoder | None:
        """How it is made, where it is stored as one weight: not joined of several, nor turned."""
        return decoder_of(self.expression)

    @property
    def stored(self) -> dict[str, Expression]:
        """What a weight that is stored as one is made of, by the ends of its parts' names."""
        return dict(self.expression.parts) if isinstance(self.expression, Coded) else {}

    def by_end(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Of `tensors`, those that such a weight is stored in, likewise."""
        return {end: tensors[part] for end, part in zip(self.stored, self.parts, strict=True)}

    def make(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight, in memory of its own, on the device of `stored` (in the order of `parts`)."""
        return _evaluate(self.expression, self._leaves(stored)).contiguous()

    def filler(self, stored: Sequence[torch.Tensor], out: torch.Tensor) -> Fill:
        """A function that makes the weight in `out`; `stored` must stay where they are."""
        fills = list(_fills(self.expression, self._leaves(stored), out))
        return fills[0] if len(fills) == 1 else partial(_in_turn, fills)

    def _leaves(self, stored: Sequence[torch.Tensor]) -> list[_Leaf]:
        given = iter(stored)
        found = []
        for leaf in leaves_of(self.expression) or []:
            found.append(_Leaf(leaf, {end: next(given) for end, _ in parts_of(leaf)}))
        return found


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stored tensors of an expression, by the ends of their names."""

    expression: Coded | Pieces
    stored: dict[str, torch.Tensor]

    def value(self) -> torch.Tensor:
        if isinstance(self.expression, Coded):
            return self.expression.decode(self.stored, self.expression.dtype)
        return self.stored["plain"]


def leaves_of(expression: Expression) -> list[Coded | Pieces] | None:
    """The stored tensors that an expression rearranges, once each; None where it does more."""
    if isinstance(expression, (Coded, Pieces)):
        return [expression]
    if not isinstance(expression, Deferred) or expression.func not in _REARRANGING:
        return None
    found: list[Coded | Pieces] = []
    for leaf in tree_leaves((expression.args, expression.kwargs)):
        if isinstance(leaf, Expression):
            inner = leaves_of(leaf)
            if inner is None:
                return None
            found += [x for x in inner if not any(x is y for y in found)]
        elif isinstance(leaf, torch.Tensor):
            return None
    return found


def parts_of(leaf: Coded | Pieces) -> Iterator[tuple[str, Expression]]:
    """The stored tensors of one leaf, by the ends of their names."""
    if isinstance(leaf, Coded):
        yield from leaf.parts
    else:
        yield "plain", leaf


# They only move numbers or round them; the result of any other is worth keeping.
_aten = torch.ops.aten
_REARRANGING = {
    torch.Tensor.to,
    _aten.cat.default,
    _aten.stack.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
    _aten.clone.default,
}


def _joined(expression: Expression) -> tuple[list[Expression], int] | None:
    """What `cat` or `stack` joins, and along which dimension."""
    if not isinstance(expression, Deferred) or expression.output is not None or expression.kwargs:
        return None
    if expression.func not in (_aten.cat.default, _aten.stack.default):
        return None
    tensors, dim = (*expression.args, 0)[:2]
    if not all(isinstance(t, Expression) and t.dtype == expression.dtype for t in tensors):
        return None
    return list(tensors), dim


def _fills(expression: Expression, leaves: Sequence[_Leaf], out: torch.Tensor) -> Iterator[Fill]:
    """The functions that fill `out` with the expression: what is joined is made in its place, what
    is transposed or cast is made apart and copied.
    """
    joined = _joined(expression)
    if joined is not None:
        inner, dim = joined
        stacked = isinstance(expression, Deferred) and expression.func is _aten.stack.default
        sizes = [1 if stacked else x.shape[dim] for x in inner]
        for x, target in zip(inner, out.split(sizes, dim), strict=True):
            yield from _fills(x, leaves, target.squeeze(dim) if stacked else target)
        return
    for leaf in leaves:
        decoder = decoder_of(expression)
        if expression is leaf.expression and decoder is not None:
            yield decoder.filler(leaf.stored, out)
            return
    yield partial(_copy, expression, leaves, out)


def _beside(expression: Expression) -> int:
    joined = _joined(expression)
    if joined is not None:
        return max(map(_beside, joined[0]), default=0)
    nbytes = expression.shape.numel() * expression.dtype.itemsize
    if isinstance(expression, Coded):
        decoder = decoder_of(expression)
        return nbytes if decoder is None or decoder.temporary else 0
    return 0 if isinstance(expression, Pieces) else 2 * nbytes


def _copy(expression: Expression, leaves: Sequence[_Leaf], out: torch.Tensor, stream: int) -> None:
    out.copy_(_evaluate(expression, leaves))


def _in_turn(fills: Sequence[Fill], stream: int) -> None:
    for fill in fills:
        fill(stream)


def _evaluate(expression: Expression, leaves: Sequence[_Leaf]) -> torch.Tensor:
    for leaf in leaves:
        if expression is leaf.expression:
            return leaf.value()
    assert isinstance(expression, Deferred)
    args, kwargs = tree_map_only(
        Expression, lambda e: _evaluate(e, leaves), (expression.args, expression.kwargs)
    )
    result = expression.func(*args, **kwargs)
    return result if expression.output is None else result[expression.output]
