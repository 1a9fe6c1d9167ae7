"""A layer's parameters as the fused block uses them: weights that act as one are one view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels import Norm
from offload.models.spec import LayerSpec, LinearSpec, NormSpec


@dataclass(frozen=True, slots=True)
class Product:
    """The operands of a product: weight [outputs, inputs] (or `transposed`), bias [outputs]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool

    @property
    def outputs(self) -> int:
        """Elements of a row that comes out."""
        return self.weight.shape[1 if self.transposed else 0]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The tensors of one layer, where they lie for good: in a slot, or resident."""

    qkv: Product
    attention_out: Product
    mlp_in: Product
    mlp_out: Product
    attention_norm: Norm | None
    mlp_norm: Norm | None
    attention_norm_out: Norm | None
    mlp_norm_out: Norm | None
    attention_sum_norm: Norm | None
    mlp_sum_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None

    @classmethod
    def of(cls, spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> LayerWeights:
        """From a layer's tensors by their names in the layer."""
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        fields: dict[str, Any] = {n: _product(x, tensors) for n, x in spec.linears().items()}
        fields |= {n: make_norm(x, tensors) for n, x in spec.norms().items()}
        return cls(**fields)


def make_norm(spec: NormSpec | None, tensors: Mapping[str, torch.Tensor]) -> Norm | None:
    """The kernels' normalisation with these parameters."""
    if spec is None:
        return None
    weight = None if spec.weight is None else tensors[spec.weight]
    bias = None if spec.bias is None else tensors[spec.bias]
    return Norm(spec.kind, weight, bias, spec.eps, spec.weight_offset)


def _product(spec: LinearSpec, tensors: Mapping[str, torch.Tensor]) -> Product:
    weight = joined([tensors[name] for name in spec.weights])
    bias = joined([tensors[name] for name in spec.biases]) if spec.biases else None
    return Product(weight, bias, spec.transposed)


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
