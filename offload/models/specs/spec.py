"""What a decoder's block computes, as data: everything the fused engine knows of a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from offload.errors import UnsupportedError
from offload.kernels.qkv import QkvLayout

Angles = tuple[torch.Tensor, torch.Tensor]  # cos, sin: float32 [1 or batch, tokens, rotary / 2]


class CannotExpress(UnsupportedError):
    """The model asks for something that a block specification has no field for."""


@dataclass(frozen=True)
class NormSpec:
    """A normalisation; `weight` and `bias` are names of parameters of the layer."""

    kind: Literal["layer", "rms"]
    eps: float
    weight: str | None
    bias: str | None = None
    weight_offset: float = 0.0  # 1 where the weight is stored less one

    def names(self) -> Iterator[str]:
        """The parameters it uses."""
        yield from (name for name in (self.weight, self.bias) if name is not None)


@dataclass(frozen=True)
class LinearSpec:
    """A product with one weight, or with several that lie one behind the other and act as one.

    Weights are [outputs, inputs], or [inputs, outputs] where `transposed`.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    transposed: bool = False

    def groups(self) -> Iterator[tuple[str, ...]]:
        """Parameters that must lie without a gap between them."""
        yield from (group for group in (self.weights, self.biases) if len(group) > 1)

    def names(self) -> Iterator[str]:
        """The parameters it uses."""
        yield from (*self.weights, *self.biases)


@dataclass(frozen=True)
class LayerSpec:
    """One block. With x for what comes in:

    h = x + attention_norm_out(attention(attention_norm(x))); h = attention_sum_norm(h)
    y = h + mlp_norm_out(mlp(mlp_norm(h)));                   y = mlp_sum_norm(y)

    A norm that is None is the identity. A `parallel` block computes both from x, and y = x + both.
    """

    qkv: LinearSpec
    layout: QkvLayout
    attention_out: LinearSpec
    mlp_in: LinearSpec  # [gate; up] where `gated`
    mlp_out: LinearSpec
    activation: str  # of offload.kernels.Activation
    gated: bool = False
    attention_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    attention_norm_out: NormSpec | None = None
    mlp_norm_out: NormSpec | None = None
    attention_sum_norm: NormSpec | None = None
    mlp_sum_norm: NormSpec | None = None
    parallel: bool = False
    q_norm: NormSpec | None = None  # over a head, before the rotation
    k_norm: NormSpec | None = None
    rotary: str | None = None  # which of the model's tables; None: no rotation
    interleaved: bool = False
    slopes: tuple[float, ...] | None = None  # ALiBi, one a head
    scale: float = 1.0  # of the scores
    softcap: float = 0.0  # 0: none
    window: int = 0  # 0: everything before is seen

    def norms(self) -> dict[str, NormSpec | None]:
        """Every normalisation by its field."""
        fields = (
            *("attention_norm", "mlp_norm", "attention_norm_out", "mlp_norm_out"),
            *("attention_sum_norm", "mlp_sum_norm", "q_norm", "k_norm"),
        )
        return {name: getattr(self, name) for name in fields}

    def linears(self) -> dict[str, LinearSpec]:
        """Every product by its field."""
        return {n: getattr(self, n) for n in ("qkv", "attention_out", "mlp_in", "mlp_out")}

    def names(self) -> set[str]:
        """Every parameter it uses, named from the layer on."""
        found = {name for linear in self.linears().values() for name in linear.names()}
        for norm in self.norms().values():
            found.update(norm.names() if norm is not None else ())
        return found

    def check(self, name: str, shapes: Mapping[str, tuple[int, ...]], hidden: int) -> None:
        """Refuse shapes of parameters that this block cannot be made of."""
        heads = self.layout.heads * self.layout.head_dim
        inner = self._inner(shapes)
        wanted = {
            "qkv": (self.layout.width, hidden),
            "attention_out": (hidden, heads),
            "mlp_in": ((2 if self.gated else 1) * inner, hidden),
            "mlp_out": (hidden, inner),
        }
        for field, linear in self.linears().items():
            got = _size([shapes[w] for w in linear.weights], linear.transposed)
            biases = sum(shapes[b][0] for b in linear.biases)
            if got != wanted[field] or (linear.biases and biases != got[0]):
                raise CannotExpress(
                    f"{name}: {field} ({', '.join(linear.names())}) is {list(got)} with a bias of "
                    f"{biases}, and the block needs {list(wanted[field])}"
                )

    def _inner(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return _size([shapes[w] for w in self.mlp_out.weights], self.mlp_out.transposed)[1]


def _size(shapes: Sequence[tuple[int, ...]], transposed: bool) -> tuple[int, int]:
    """[outputs, inputs] of weights that act as one; [0, 0] where they do not fit together."""
    if any(len(shape) != 2 for shape in shapes) or (transposed and len(shapes) > 1):
        return 0, 0
    if transposed:
        return shapes[0][1], shapes[0][0]
    inputs = {shape[1] for shape in shapes}
    return (sum(shape[0] for shape in shapes), inputs.pop()) if len(inputs) == 1 else (0, 0)


def _same(module: nn.Module, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return embeddings


def _no_angles(module: nn.Module, positions: torch.Tensor, table: str) -> Angles:
    raise CannotExpress("this model has no rotary embedding")


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: its blocks, and what its module does before and behind them.

    The functions take the module that holds the layers: `embed(module, embeddings, positions)`
    makes the first block's input from [batch, tokens, ...] and int64 [1 or batch, tokens];
    `angles(module, positions, table)` is the rotary table called `LayerSpec.rotary`.
    """

    family: str
    holder: str  # name of the module that holds the layers
    layers: tuple[LayerSpec, ...]
    layer_names: tuple[str, ...]
    hidden: int
    tokens: str  # of the holder: the embedding of token ids
    final_norm: str  # of the holder, where it is not None there
    project_out: str | None = None  # of the holder, likewise
    last_norm: NormSpec | None = None  # what final_norm computes
    embed: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = _same
    angles: Callable[[nn.Module, torch.Tensor, str], Angles] = _no_angles
    positions_from_mask: bool = False  # where none are given: counted over the mask (OPT)
    cache_copies: int = 1  # of each head's keys and values in transformers' cache (Falcon)
    attention: str | None = None  # transformers' implementation, when the model was described
    output: str = "BaseModelOutputWithPast"  # of transformers.modeling_outputs

    @property
    def layer_list(self) -> str:
        """The name, in the holder, of the list of layers."""
        return self.layer_names[0].rpartition(".")[0].removeprefix(f"{self.holder}.")

    @property
    def tables(self) -> tuple[str, ...]:
        """The rotary tables that the layers use."""
        return tuple(dict.fromkeys(x.rotary for x in self.layers if x.rotary is not None))
