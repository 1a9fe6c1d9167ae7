"""Tensors that stand for bytes elsewhere: loading code renames, stacks and casts them, and nothing
is read.

transformers turns the tensors of a checkpoint into parameters with code of its own (renames, merged
experts, casts, ties), and that code changes with every release. So it is given tensors of this
kind. What comes out still knows which bytes of which files it is made of; where the bytes need no
change they can be streamed from the original files, however many pieces they are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.checkpoint.extent import Extent
from offload.errors import UnsupportedError

aten = torch.ops.aten

# More pieces than this in one tensor would cost more requests than reading and rewriting it once.
MAX_PIECES = 4096


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
    """The result of an operation that is run when the tensor is read, never before."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (self.args, self.kwargs))
        with torch.no_grad():
            result = self.func(*args, **kwargs)
        result = result if self.output is None else result[self.output]
        return result.contiguous()


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor that others are stored for: `decode` makes it of them, in the dtype that is wanted.

    A cast is no operation on it but another dtype, so that it is rounded once.
    """

    parts: tuple[tuple[str, LazyTensor], ...]
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
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (self.args, self.kwargs))
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
            if isinstance(leaf, LazyTensor):
                yield from extents_of(leaf.expression)


class Storage:
    """What a tensor, its aliases and its views share: a change through one is seen by all."""

    __slots__ = ("expression",)

    def __init__(self, expression: Expression) -> None:
        self.expression = expression


class LazyTensor(torch.Tensor):
    """A tensor known by shape, dtype and where its bytes come from (`expression`).

    It claims to be on the CPU. Operations that only rearrange whole runs of bytes are done on the
    extents; any other operation is deferred; an operation that needs a value now (`equal`, `item`)
    reads. A change in place is deferred too: the file keeps its bytes, the tensor and its views
    stand for others from then on.
    """

    _shared: Storage
    _path: tuple[Step, ...]  # from the whole of the storage, contiguous, to this view of it
    _whole: Expression  # the storage's when `_part` was worked out
    _part: Expression

    @staticmethod
    def __new__(cls, expression: Expression, stride: Sequence[int] | None = None) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            expression.shape,
            strides=stride,  # by it torch decides whether a reshape is a view or a copy
            dtype=expression.dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        self._shared = Storage(expression)
        self._path = ()
        self._whole = self._part = expression
        return self

    def __init__(self, expression: Expression, stride: Sequence[int] | None = None) -> None:
        pass

    @property
    def expression(self) -> Expression:
        """What the tensor stands for now."""
        whole = self._shared.expression
        if whole is not self._whole:
            part = LazyTensor(whole)
            for step in self._path:
                part = step(part)
            self._whole, self._part = whole, part.expression
        return self._part

    def _view(self, step: Step, expression: Expression, stride: Sequence[int]) -> LazyTensor:
        """What `step` takes from this tensor: changes of one are seen in both."""
        view = LazyTensor(expression, stride)
        view._shared = self._shared
        view._whole = self._shared.expression
        view._path = self._path if step.func in _ALIASES else (*self._path, step)
        return view

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stand for what `func(tensor, *args, **kwargs)` makes of this tensor in place."""
        changed: Expression = Changed(self._shared.expression, self._path, func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # numbers are drawn in the code's order
            drawn = Held(changed.read())
            changed = Deferred(drawn.read, (), {}, None, drawn.shape, drawn.dtype)
        self._shared.expression = changed

    @classmethod
    def of(cls, extent: Extent) -> LazyTensor:
        """The tensor stored at `extent`."""
        shape = torch.Size(extent.shape)
        if extent.stride is None:
            return cls(Pieces((extent,), shape, extent.dtype))
        return cls(Deferred(extent.read, (), {}, None, shape, extent.dtype))

    def read(self) -> torch.Tensor:
        """The value: a contiguous CPU tensor."""
        return self.expression.read()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = type(self.expression).__name__
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {kind})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            return func(*tree_map_only(LazyTensor, _stand_in, args), **kwargs)
        if func._schema.is_mutable:
            return _change(func, args, kwargs)
        rearranged = _rearrange(func, args, kwargs)
        result = _defer(func, args, kwargs) if rearranged is None else rearranged
        return _views(result, func, args, kwargs) if func.is_view else result


def _views(result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`result`, tied to the first argument, whose bytes it shares."""
    base, *rest = args
    on_meta = func(_meta(base), *rest, **kwargs)
    if isinstance(result, LazyTensor):
        step = Step(func, tuple(rest), kwargs, None)
        return base._view(step, result.expression, on_meta.stride())
    return [
        base._view(Step(func, tuple(rest), kwargs, i), part.expression, m.stride())
        for i, (part, m) in enumerate(zip(result, on_meta, strict=True))
    ]


def _stand_in(x: LazyTensor) -> torch.Tensor:
    """A real tensor of this shape and dtype that takes no memory."""
    return torch.empty((), dtype=x.dtype).expand(x.shape)


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Defer an operation that changes its first argument in place."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    if written.count(True) != 1 or not written[0] or torch.Tag.inplace_view in func.tags:
        raise UnsupportedError(
            f"{func} would change a weight while the model is being built; of weights that stay on "
            f"disk only values can be changed, one at a time and in place"
        )
    target, *rest = args
    if not isinstance(target, LazyTensor):
        values, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (rest, kwargs))
        return func(target, *values, **kwargs)
    rest, kwargs = _as_they_are(rest, kwargs)
    target._change(func, tuple(rest), kwargs)
    return target


def _as_they_are(*arguments: Any) -> Any:
    """These arguments, untouched by later changes of their tensors."""
    return tree_map_only(
        torch.Tensor,
        lambda t: LazyTensor(t.expression) if isinstance(t, LazyTensor) else t.detach().clone(),
        arguments,
    )


def _defer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on shapes only and give lazy tensors; where a value is asked for, read and run."""
    on_meta = tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
    )
    returns_tensors = all("Tensor" in str(r.type) for r in func._schema.returns)
    if not returns_tensors or func is aten._local_scalar_dense.default:
        real = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
        return func(*real[0], **real[1])
    meta_kwargs = {**on_meta[1], **({"device": "meta"} if "device" in on_meta[1] else {})}
    try:
        result = func(*on_meta[0], **meta_kwargs)
    except NotImplementedError:  # the result's shape depends on values
        real = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
        return func(*real[0], **real[1])
    args, kwargs = _as_they_are(args, kwargs)
    single = isinstance(result, torch.Tensor)
    parts = [
        LazyTensor(Deferred(func, args, kwargs, None if single else i, m.shape, m.dtype))
        for i, m in enumerate([result] if single else result)
    ]
    return parts[0] if single else parts


def _rearrange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result where it is a rearrangement of whole byte runs, else None."""
    handler = _REARRANGEMENTS.get(func)
    return None if handler is None else handler(*args, **kwargs)


def _same(x: LazyTensor, *_: Any, **__: Any) -> LazyTensor:
    return LazyTensor(x.expression)


def _to_copy(x: LazyTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is None or dtype == x.dtype:
        return LazyTensor(x.expression)
    if isinstance(x.expression, Coded):
        return LazyTensor(replace(x.expression, dtype=dtype))
    args = (LazyTensor(x.expression), dtype)  # device and pinning are the placement's business
    return LazyTensor(Deferred(torch.Tensor.to, args, {}, None, x.shape, dtype))


def _reshaped(func: Any) -> Callable[..., LazyTensor | None]:
    """The handler of an operation that changes the shape only; torch works the new one out."""

    def handler(x: LazyTensor, *args: Any) -> LazyTensor | None:
        if not isinstance(x.expression, Pieces):
            return None
        return LazyTensor(replace(x.expression, shape=func(_meta(x), *args).shape))

    return handler


def _meta(x: LazyTensor) -> torch.Tensor:
    """A tensor like this without data, on which torch checks arguments and works out shapes."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


_view = _reshaped(aten.view.default)
_unsqueeze = _reshaped(aten.unsqueeze.default)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor | None:
    expressions = [t.expression if isinstance(t, LazyTensor) else None for t in tensors]
    pieces = [e for e in expressions if isinstance(e, Pieces)]
    if len(pieces) != len(tensors) or len({e.dtype for e in pieces}) != 1:
        return None
    shape = torch.cat([torch.empty(e.shape, device="meta") for e in pieces], dim).shape
    outer = math.prod(shape[: dim % len(shape)])
    extents: list[Extent] = []
    for o in range(outer):
        for e in pieces:
            step = math.prod(e.shape) * e.dtype.itemsize // outer
            extents += e.cut(o * step, (o + 1) * step)
        if len(extents) > MAX_PIECES:
            return None
    return LazyTensor(Pieces(tuple(extents), shape, pieces[0].dtype))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyTensor | None:
    rows = [_unsqueeze(t, dim) if isinstance(t, LazyTensor) else None for t in tensors]
    return None if any(r is None for r in rows) else _cat([r for r in rows if r is not None], dim)


def _slice(
    x: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor | None:
    length = aten.slice.Tensor(_meta(x), dim, start, end, step).shape[dim]
    if length == x.shape[dim]:
        return LazyTensor(x.expression)
    if step != 1:
        return None
    return _run(x, dim, slice(start, end).indices(x.shape[dim])[0], length)


def _run(x: LazyTensor, dim: int, start: int, length: int) -> LazyTensor | None:
    """`length` entries of `dim` from `start` on, where they are one run of bytes."""
    dim %= len(x.shape)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if not isinstance(x.expression, Pieces) or math.prod(before) != 1:
        return None
    row = math.prod(after) * x.dtype.itemsize
    extents = x.expression.cut(start * row, (start + length) * row)
    return LazyTensor(Pieces(extents, torch.Size((*before, length, *after)), x.dtype))


def _split(x: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> list[LazyTensor] | None:
    split = aten.split.Tensor if isinstance(sizes, int) else aten.split_with_sizes.default
    parts: list[LazyTensor] = []
    at = 0
    for length in [part.shape[dim] for part in split(_meta(x), sizes, dim)]:
        part = _run(x, dim, at, length)
        if part is None:
            return None
        parts.append(part)
        at += length
    return parts


def _select(x: LazyTensor, dim: int, index: int) -> LazyTensor | None:
    shape = aten.select.int(_meta(x), dim, index).shape
    row = _run(x, dim, index % x.shape[dim], 1)
    return None if row is None else _view(row, shape)


def _unbind(x: LazyTensor, dim: int = 0) -> list[LazyTensor] | None:
    rows: list[LazyTensor] = []
    for index in range(len(aten.unbind.int(_meta(x), dim))):
        row = _select(x, dim, index)
        if row is None:
            return None
        rows.append(row)
    return rows


def _clone(x: LazyTensor, *, memory_format: Any = None) -> LazyTensor:
    return LazyTensor(x.expression)


_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}

# They ask for a shape and a dtype only.
_FACTORIES = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}

_REARRANGEMENTS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
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
