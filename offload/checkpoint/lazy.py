"""Tensors that stand for bytes elsewhere: loading code renames, stacks and casts them, and nothing
is read.

transformers turns the tensors of a checkpoint into parameters with code of its own (renames, merged
experts, casts, ties), and that code changes with every release. So it is given tensors of this
kind. What comes out still knows which bytes of which files it is made of; where the bytes need no
change they can be streamed from the original files, however many pieces they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from offload.checkpoint.expressions import Changed, Deferred, Expression, Held, Step, stored_at
from offload.checkpoint.extent import Extent
from offload.checkpoint.rearranged import rearranged
from offload.errors import UnsupportedError

aten = torch.ops.aten


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
        return cls(stored_at(extent))

    def read(self) -> torch.Tensor:
        """The value: a contiguous CPU tensor."""
        return self.expression.read()

    def on_meta(self) -> torch.Tensor:
        """A tensor like this without data, on which torch checks arguments and works out shapes."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

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
        found = rearranged(func, args, kwargs)
        if found is None:
            result = _defer(func, args, kwargs)
        else:
            result = [cls(e) for e in found] if isinstance(found, list) else cls(found)
        return _views(result, func, args, kwargs) if func.is_view else result


def _views(result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`result`, tied to the first argument, whose bytes it shares."""
    base, *rest = args
    on_meta = func(base.on_meta(), *rest, **kwargs)
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
    """These arguments as an expression takes them, untouched by later changes of their tensors."""
    return tree_map_only(
        torch.Tensor,
        lambda t: t.expression if isinstance(t, LazyTensor) else t.detach().clone(),
        arguments,
    )


def _defer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on shapes only and give lazy tensors; where a value is asked for, read and run."""
    returns_tensors = all("Tensor" in str(r.type) for r in func._schema.returns)
    if not returns_tensors or func is aten._local_scalar_dense.default:
        return _run_now(func, args, kwargs)
    meta_args, meta_kwargs = tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
    )
    if "device" in meta_kwargs:
        meta_kwargs["device"] = "meta"
    try:
        result = func(*meta_args, **meta_kwargs)
    except NotImplementedError:  # the result's shape depends on values
        return _run_now(func, args, kwargs)
    args, kwargs = _as_they_are(args, kwargs)
    single = isinstance(result, torch.Tensor)
    parts = [
        LazyTensor(Deferred(func, args, kwargs, None if single else i, m.shape, m.dtype))
        for i, m in enumerate([result] if single else result)
    ]
    return parts[0] if single else parts


def _run_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
    return func(*args, **kwargs)


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
