"""What a lazy tensor stands for: bytes of files, tensors in memory, and operations that have not
been run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.checkpoint.extent import Extent
from offload.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Pieces:
    """A contiguous tensor whose bytes are these extents, one after the other."""

    extents: tuple[Extent, ...]
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """The tensor, read now."""
        if not self.extents:
            return torch.empty(self.shape, dtype=self.dtype)
        if len(self.extents) == 1:
            return self.extents[0].read().view(self.dtype).reshape(self.shape)
        flat = [e.read().reshape(-1).view(torch.uint8) for e in self.extents]
        return torch.cat(flat).view(self.dtype).reshape(self.shape)

    def cut(self, start: int, stop: int) -> tuple[Extent, ...]:
        """The extents of the bytes `[start, stop)` of this tensor."""
        out = []
        at = 0
        for e in self.extents:
            low, high = max(start - at, 0), min(stop - at, e.nbytes)
            if low < high:
                out.append(_byte_range(e, low, high))
            at += e.nbytes
        return tuple(out)


def _byte_range(e: Extent, low: int, high: int) -> Extent:
    if (low, high) == (0, e.nbytes):
        return e
    return replace(
        e, offset=e.offset + low, nbytes=high - low, dtype=torch.uint8, shape=(high - low,)
    )


class Held:
    """A tensor in memory: a live model's weight, or one that loading code made itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def read(self) -> torch.Tensor:
        """The tensor, contiguous and on the CPU."""
        if self._tensor is None:
            raise UnsupportedError("this weight was moved to the store and its memory given back")
        return self._tensor.detach().cpu().contiguous()

    def release(self) -> None:
        """Let the tensor's memory go; its bytes are elsewhere now."""
        self._tensor = None


@dataclass(frozen=True, slots=True)
class Deferred:
    """The result of an operation that is run when the tensor is read, never before. Among its
    arguments, expressions stand for tensors.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        args, kwargs = _read((self.args, self.kwargs))
        with torch.no_grad():
            result = self.func(*args, **kwargs)
        result = result if self.output is None else result[self.output]
        return result.contiguous()


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor that others are stored for: `decode` makes it of them, in the dtype that is wanted.

    A cast is no operation on it but another dtype, so that it is rounded once.
    """

    parts: tuple[tuple[str, Expression], ...]
    decode: Callable[[Mapping[str, torch.Tensor], torch.dtype], torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        return self.decode({name: part.read() for name, part in self.parts}, self.dtype)


@dataclass(frozen=True, slots=True)
class Step:
    """How a view is taken: `func(tensor, *args, **kwargs)`, of several results the one wanted."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None

    def __call__(self, tensor: torch.Tensor) -> Any:
        result = self.func(tensor, *self.args, **self.kwargs)
        return result if self.output is None else result[self.output]


@dataclass(frozen=True, slots=True)
class Changed:
    """`whole` after `func` has changed, in place, the view of it that `path` leads to."""

    whole: Expression
    path: tuple[Step, ...]
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self) -> torch.Tensor:
        args, kwargs = _read((self.args, self.kwargs))
        whole = self.whole.read()
        if not isinstance(self.whole, (Pieces, Changed)):  # it may be somebody's
            whole = whole.clone()
        with torch.no_grad():
            part = whole
            for step in self.path:
                part = step(part)
            self.func(part, *args, **kwargs)
        return whole


Expression = Pieces | Held | Deferred | Coded | Changed


def _read(arguments: Any) -> Any:
    """The arguments of an operation, with values for the expressions among them."""
    return tree_map_only(Expression, lambda e: e.read(), arguments)


def stored_at(extent: Extent) -> Expression:
    """The tensor whose bytes lie there."""
    shape = torch.Size(extent.shape)
    if extent.stride is None:
        return Pieces((extent,), shape, extent.dtype)
    return Deferred(extent.read, (), {}, None, shape, extent.dtype)


def extents_of(expression: Expression) -> Iterator[Extent]:
    """Every range of a file that a tensor is made of."""
    if isinstance(expression, Pieces):
        yield from expression.extents
        return
    if isinstance(expression, Changed):
        yield from extents_of(expression.whole)
    if isinstance(expression, (Changed, Deferred)):
        owner = getattr(expression.func, "__self__", None)
        if isinstance(owner, Extent):
            yield owner
        for leaf in tree_leaves((expression.args, expression.kwargs)):
            if isinstance(leaf, Expression):
                yield from extents_of(leaf)
