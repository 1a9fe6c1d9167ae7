"""Tensors that act as one where they lie one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lie_together(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors lie one behind the other in one piece of memory."""
    storage = tensors[0].untyped_storage().data_ptr()
    at = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or tensor.untyped_storage().data_ptr() != storage:
            return False
        at += tensor.nbytes
    return all(tensor.is_contiguous() for tensor in tensors)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One view of tensors [n, ...] that lie together, along their first dimension."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if not lie_together(tensors):
        raise ValueError("tensors that act as one must lie one behind the other")
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
