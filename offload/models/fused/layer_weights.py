"""A layer's parameters as the fused block uses them: weights that act as one are one view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels import Norm
from offload.kernels.quant_gemm import MOST_ROWS
from offload.models.adjacent import joined
from offload.models.quantized.layer import Filling, QuantisedLayer
from offload.models.quantized.stack import StoredWeight
from offload.models.specs.spec import LayerSpec, LinearSpec, NormSpec


@dataclass(frozen=True, slots=True)
class Product:
    """The operands of a product: weight [outputs, inputs] (or `transposed`), bias [outputs].

    Of a quantised weight, `weight` holds the numbers once `filling` was launched since the layer
    was entered, and `stored` is the same weight as it is kept: in panels, for products of a few
    rows, or in int8 for any number of rows, which are rounded to int8 too. A weight in int8 is
    never made whole, and its `weight` has no memory.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool
    filling: Filling | None = None
    stored: StoredWeight | None = None

    def as_stored(self, rows: int) -> StoredWeight | None:
        """What so many rows may be multiplied with as it is stored; None: with the whole weight."""
        return self.stored if rows <= MOST_ROWS or self.int8 else None

    @property
    def int8(self) -> bool:
        """Whether rows are rounded to int8, however many there are."""
        return self.stored is not None and self.stored.form.inputs == "int8"

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
    def of(
        cls,
        spec: LayerSpec,
        tensors: Mapping[str, torch.Tensor],
        quantised: QuantisedLayer | None = None,
    ) -> LayerWeights:
        """From a layer's tensors by their names in the layer, those that are stored for `quantised`
        weights among them.
        """
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        fields: dict[str, Any] = {
            name: _product(linear, tensors, quantised) for name, linear in spec.linears().items()
        }
        fields |= {n: make_norm(x, tensors) for n, x in spec.norms().items()}
        return cls(**fields)


def make_norm(spec: NormSpec | None, tensors: Mapping[str, torch.Tensor]) -> Norm | None:
    """The kernels' normalisation with these parameters."""
    if spec is None:
        return None
    weight = None if spec.weight is None else tensors[spec.weight]
    bias = None if spec.bias is None else tensors[spec.bias]
    return Norm(spec.kind, weight, bias, spec.eps, spec.weight_offset)


def _product(
    spec: LinearSpec, tensors: Mapping[str, torch.Tensor], quantised: QuantisedLayer | None
) -> Product:
    bias = joined([tensors[name] for name in spec.biases]) if spec.biases else None
    if quantised is None or spec not in quantised:
        weight = joined([tensors[name] for name in spec.weights])
        return Product(weight, bias, spec.transposed)
    stored = None if spec.transposed else quantised.multiplied_as_it_is(spec, tensors)
    if stored is not None and quantised.in_int8(spec):
        return Product(quantised.nowhere(spec), bias, False, None, stored)
    weight, filling = quantised.whole(spec, tensors)
    return Product(weight, bias, spec.transposed, filling, stored)
