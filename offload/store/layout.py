"""A layer as the stream moves it: one run of bytes in which every tensor has a fixed, aligned
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from offload.checkpoint.expressions import Expression

ALIGNMENT = 256  # bytes; what CUDA's own allocator and vector loads of any width are content with


def align(n: int, to: int = ALIGNMENT) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


def _nbytes(source: Expression) -> int:
    return source.shape.numel() * source.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a layer: what it is, where its bytes come from, and its place in the layer's
    slot.
    """

    name: str  # as the model names it: model.layers.3.mlp.up_proj.weight
    source: Expression
    shape: torch.Size
    dtype: torch.dtype
    offset: int  # bytes from the slot's start
    nbytes: int

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """This tensor inside `slot` (uint8, [>= offset + nbytes])."""
        raw = slot[self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """What moves at once: a block of the model, or a module outside the blocks that was given a
    tier of its own.
    """

    name: str
    places: tuple[TensorPlace, ...]
    nbytes: int  # of a slot that holds it, padding included

    @classmethod
    def lay_out(
        cls,
        name: str,
        tensors: Iterable[tuple[str, Expression]],
        adjacent: Iterable[Sequence[str]] = (),
    ) -> Layer:
        """Give every tensor its aligned place; the places are in the order given.

        Tensors named together in `adjacent` lie one behind the other in that order without a gap,
        so that one view covers them all; only the first of them is aligned.
        """
        sources = dict(tensors)
        group_of = {member: tuple(group) for group in adjacent for member in group}
        offsets: dict[str, int] = {}
        at = 0
        for tensor_name in sources:
            if tensor_name in offsets:
                continue
            for member in group_of.get(tensor_name, (tensor_name,)):
                if member in sources:
                    offsets[member] = at
                    at += _nbytes(sources[member])
            at = align(at)
        places = [
            TensorPlace(n, source, source.shape, source.dtype, offsets[n], _nbytes(source))
            for n, source in sources.items()
        ]
        return cls(name, tuple(places), at)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone: what crosses a link."""
        return sum(p.nbytes for p in self.places)

    def with_sources(self, sources: dict[str, Expression]) -> Layer:
        """The same layer whose tensors `sources` names come from somewhere else now."""
        places = (replace(p, source=sources.get(p.name, p.source)) for p in self.places)
        return replace(self, places=tuple(places))

    def parameters(
        self, slot: torch.Tensor, like: Sequence[nn.Parameter] | None = None
    ) -> list[nn.Parameter]:
        """Parameters that lie in `slot`, one a place; made once a slot and used for every pass.

        They require gradients as those of `like` do: torch picks kernels by that flag.
        """
        flags = [p.requires_grad for p in like] if like is not None else [False] * len(self.places)
        with torch.inference_mode(False):
            return [
                nn.Parameter(place.view(slot), requires_grad=flag)
                for place, flag in zip(self.places, flags, strict=True)
            ]
