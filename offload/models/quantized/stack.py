"""Weights that act as one, and that are one weight as they are stored, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.kernels.weight_format import WeightFormat
from offload.models.adjacent import joined
from offload.models.quantized.coded import Decoder
from offload.models.quantized.panels import panel_weights
from offload.models.quantized.whole import WholeWeight

# Of their stored tensors, each row belongs to one output, or to some that lie together.
_BY_ROWS = ("packed", "plain", "fp8_block", "panels", "mxfp4")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A product's weight as it is stored, in tensors that stay in place, by the ends of names."""

    form: WeightFormat
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stack:
    """Weights of one format that act as one where what is stored for them lies together.

    parts: by the ends of their names, the stored tensors of each weight, as the layer names them.
    """

    form: WeightFormat
    shape: tuple[int, int]  # of all of them together
    parts: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, weights: Mapping[str, WholeWeight]) -> Stack | None:
        """The stack of these weights, by their names in the layer; None where they differ in
        format, are not stored row by row, or are computed from more than what is stored.
        """
        found: list[tuple[Decoder, dict[str, tuple[torch.dtype, torch.Size]]]] = []
        for weight in weights.values():
            if weight.decoder is None:
                return None
            stored = {end: (t.dtype, t.shape[1:]) for end, t in weight.stored.items()}
            found.append((weight.decoder, stored))
        first, stored = found[0]
        rows = [decoder.shape[0] for decoder, _ in found]
        if len(found) > 1:
            same = all(d.form == first.form and s == stored for d, s in found)
            if not same or not _stackable(first.form, rows):
                return None
        return cls(
            first.form,
            (sum(rows), first.shape[-1]),
            dict(zip(stored, _parts(weights), strict=True)),
        )

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        """The stack's tensors in one piece, from the layer's `tensors`."""
        return StoredWeight(
            self.form,
            {end: joined([tensors[n] for n in names]) for end, names in self.parts.items()},
        )


def stored_together(weights: Mapping[str, WholeWeight]) -> list[tuple[str, ...]]:
    """Groups of tensors that are stored for weights of a layer, by their names in it, that are to
    lie without a gap. Empty where the weights are no stack, and become none in panels.
    """
    if Stack.of(weights) is None and panel_weights(weights) is None:
        return []
    return _parts(weights)


def _parts(weights: Mapping[str, WholeWeight]) -> list[tuple[str, ...]]:
    """The stored tensors of weights of one format, as the layer names them, like ones together."""
    named = (
        [f"{name.removesuffix(weight.key)}{part}" for part in weight.parts]
        for name, weight in weights.items()
    )
    return list(zip(*named, strict=True))


def _stackable(form: WeightFormat, rows: Sequence[int]) -> bool:
    """Whether weights of so many rows, one behind the other, are one weight of this format."""
    if form.layout not in _BY_ROWS or form.act_order or form.block[0] == 0:
        return False
    zeros = form.per_word if form.zero_points and form.layout == "packed" else 1
    return all(count % math.lcm(form.block[0], zeros) == 0 for count in rows[:-1])
