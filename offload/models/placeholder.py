"""The parameter that a module holds while the weight itself is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import UnsupportedError


class Placeholder(torch.Tensor):
    """A meta tensor that refuses to be computed with.

    torch answers a product of a CPU tensor and a plain meta tensor with memory that it never wrote.
    Shapes can be worked out; what needs the weight, or would change it, raises and names it.
    """

    weight: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, weight: str, like: torch.Tensor) -> Placeholder:
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("meta"), requires_grad=False
        )
        self.weight = weight
        return self

    def __init__(self, weight: str, like: torch.Tensor) -> None:
        pass

    @classmethod
    def parameter(cls, weight: str, like: torch.Tensor) -> nn.Parameter:
        """For the weight of that name, of the shape, dtype and gradient flag of `like`."""
        return nn.Parameter(cls(weight, like), requires_grad=like.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.weight!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        weight = next(x.weight for x in tensors if isinstance(x, Placeholder))
        if func._schema.is_mutable or not all(x.is_meta for x in tensors):
            raise _not_here(weight)
        args, kwargs = tree_map_only(
            Placeholder,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"),
            (args, kwargs),
        )
        try:
            result = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as error:  # it asked for a value
            raise _not_here(weight) from error
        return tree_map_only(torch.Tensor, lambda x: cls(weight, x) if x.is_meta else x, result)


def _not_here(weight: str) -> UnsupportedError:
    return UnsupportedError(
        f"{weight} is in the model only while the forward of its layer runs, and no more after "
        "close(): call the layer, not a part of it; state_dict() reads weights; change them before "
        "offload.run"
    )
