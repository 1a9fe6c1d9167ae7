"""The kernel calls of one layer for one token a sequence, in the order of their launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels import Norm
from offload.kernels.attention import DecodeAttention
from offload.kernels.call import Call, Launchable
from offload.kernels.int8_linear import Int8Linear
from offload.kernels.linear import Linear
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.kernels.rotation import Rotation
from offload.kernels.scores import Scores
from offload.kernels.workspace import Workspace
from offload.models.fused.cpu_rows import CpuRows
from offload.models.fused.entry import Entry
from offload.models.fused.layer_weights import LayerWeights, Product
from offload.models.quantized.layer import Filling
from offload.models.specs.spec import LayerSpec, ModelSpec


class Rows:
    """Memory of [batch, width] by name and width, the same for every layer."""

    def __init__(self, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.batch, self._dtype, self._device = batch, dtype, device
        self._memory: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, name: str, width: int) -> torch.Tensor:
        found = self._memory.get((name, width))
        if found is None:
            found = torch.empty(self.batch, width, dtype=self._dtype, device=self._device)
            self._memory[name, width] = found
        return found


@dataclass(frozen=True)
class LayerCalls:
    """Makes them for the rows `part` of a session's batch, on the session's buffers. `keys`,
    `values`: a layer's, [rows, kv_heads, capacity, head_dim], of the first rows of `part`, whose
    keys and values lie on the compute device; the others' are `on_cpu`. `start`: int32 [batch], the
    first column of each row; None: 0.
    """

    spec: ModelSpec
    part: slice
    entry: Entry
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    start: torch.Tensor | None
    slopes: dict[tuple[float, ...], torch.Tensor]
    on_cpu: CpuRows | None
    rows: Rows
    workspace: Workspace

    @property
    def _count(self) -> int:
        """Rows of the part."""
        return self.part.stop - self.part.start

    @property
    def _hidden(self) -> torch.Tensor:
        return self.entry.hidden[self.part]

    def _memory(self, name: str, width: int) -> torch.Tensor:
        return self.rows(name, width)[self.part]

    def layer(
        self, index: int, weights: LayerWeights, ahead: Launchable | None
    ) -> tuple[list[Launchable], list[Launchable]]:
        """The calls of a layer, in the order of their launch, behind the call `ahead`: those up to
        where attention to the rows in CPU memory begins, if there are any, and all others.
        """
        spec, layout = self.spec.layers[index], self.spec.layers[index].layout
        qkv = self._memory("qkv", layout.width)
        attended = self._memory("attended", layout.heads * layout.head_dim)
        chain = Chain(ahead)
        self._multiply(chain, self._hidden, weights.qkv, qkv, norm=weights.attention_norm)
        below = attended[self.keys[index].shape[0] :]
        if self.on_cpu is not None:  # first of all, for that takes longest
            self._send(chain, index, weights, qkv)
        self._attend(chain, index, weights, qkv, attended)
        inner = self._memory("inner", weights.mlp_in.outputs // (2 if spec.gated else 1))
        if spec.parallel:  # the MLP reads what came in, before anything is added to it
            self._widen(chain, spec, weights, inner, None)
        first: list[Launchable] = []
        if self.on_cpu is not None:
            scores = self._scores(spec)
            start = self.on_cpu.starting(index, spec, scores)
            if start is not None:
                chain.put(start)
            first, chain = chain.calls, Chain(None)
            # Meanwhile the compute device has nothing else to do.
            wide = () if spec.parallel else (weights.mlp_in,)
            for product in (weights.attention_out, *wide, weights.mlp_out):
                self._make_whole(chain, product)
            chain.put(self.on_cpu.attention(index, spec, scores, below))
        norms = weights.attention_norm_out, weights.attention_sum_norm
        next_norm = None if spec.parallel else weights.mlp_norm
        normed = self._add(chain, attended, weights.attention_out, *norms, next_norm)
        if not spec.parallel:
            self._widen(chain, spec, weights, inner, normed)
        self._add(chain, inner, weights.mlp_out, weights.mlp_norm_out, weights.mlp_sum_norm)
        return first, chain.calls

    def _send(self, chain: Chain, index: int, weights: LayerWeights, qkv: torch.Tensor) -> None:
        """Send off new queries, keys and values of the rows in CPU memory."""
        assert self.on_cpu is not None
        spec, split = self.spec.layers[index], self.keys[index].shape[0]
        staging = self.on_cpu.staging(index, spec)
        below = slice(split, None)
        self._append(chain, spec, weights, qkv, below, staging.staged, self.on_cpu.column)
        chain.put(staging)

    def _attend(
        self,
        chain: Chain,
        index: int,
        weights: LayerWeights,
        qkv: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """Attention of the rows whose keys and values are on the compute device."""
        spec, layout = self.spec.layers[index], self.spec.layers[index].layout
        keys, values = self.keys[index], self.values[index]
        split = keys.shape[0]
        if not split:
            return
        own, heads = slice(None, split), (split, layout.heads, layout.head_dim)
        query = self._memory("query", layout.heads * layout.head_dim)[own].view(heads)
        into = query[:, None], keys, values
        self._append(chain, spec, weights, qkv, own, into, self.entry.column)
        chain.add(
            DecodeAttention,
            query,
            keys,
            values,
            attended[own].view(heads),
            length=self.entry.length[self.part][own],
            start=None if self.start is None else self.start[self.part][own],
            scores=self._scores(spec),
            workspace=self.workspace,
            even=self.start is None,
        )

    def _scores(self, spec: LayerSpec) -> Scores:
        slopes = None if spec.slopes is None else self.slopes[spec.slopes]
        return Scores(spec.scale, spec.softcap, spec.window, slopes)

    def _append(
        self,
        chain: Chain,
        spec: LayerSpec,
        weights: LayerWeights,
        qkv: torch.Tensor,
        rows: slice,
        into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        column: torch.Tensor,
    ) -> None:
        """Queries, and one column more of keys and values, of some rows of a QKV product."""
        query, keys, values = into
        rotation = None
        if spec.rotary is not None:
            cos, sin = (angles[self.part][rows] for angles in self.entry.angles[spec.rotary])
            rotation = Rotation(cos, sin, spec.interleaved)
        chain.add(
            RotaryAppend,
            qkv[rows, None],
            layout=spec.layout,
            query=query,
            key_cache=keys,
            value_cache=values,
            column=column,
            bias=weights.qkv.bias,
            rotation=rotation,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
        )

    def _widen(
        self,
        chain: Chain,
        spec: LayerSpec,
        weights: LayerWeights,
        inner: torch.Tensor,
        normed: torch.Tensor | None,
    ) -> None:
        """inner = the first half of the MLP: of `normed`, if its norm was computed already, else of
        `hidden` with the norm in the product.
        """
        self._multiply(
            chain,
            self._hidden if normed is None else normed,
            weights.mlp_in,
            inner,
            bias=weights.mlp_in.bias,
            norm=weights.mlp_norm if normed is None else None,
            activation=spec.activation,
            gated=spec.gated,
        )

    def _add(
        self,
        chain: Chain,
        into: torch.Tensor,
        product: Product,
        branch_norm: Norm | None,
        sum_norm: Norm | None,
        next_norm: Norm | None = None,
    ) -> torch.Tensor | None:
        """hidden = sum_norm(hidden + branch_norm(product of `into`)).

        Returns `next_norm` of the new hidden, if a kernel that runs here anyway can compute it;
        else None.
        """
        hidden = self._hidden
        if branch_norm is None and sum_norm is None:
            bias = product.bias
            self._multiply(chain, into, product, hidden, bias=bias, residual=hidden)
            return None
        branch = self._memory("branch", hidden.shape[1])
        self._multiply(chain, into, product, branch)
        normed = None
        if sum_norm is None and next_norm is not None:
            normed = self._memory("normed", hidden.shape[1])
        chain.add(
            ResidualNorm,
            residual=hidden,
            branch=branch,
            bias=product.bias,
            branch_norm=branch_norm,
            norm=next_norm if sum_norm is None else sum_norm,
            sum_out=hidden if sum_norm is None else None,
            out=normed if sum_norm is None else hidden,
        )
        return normed

    def _multiply(
        self,
        chain: Chain,
        into: torch.Tensor,
        product: Product,
        out: torch.Tensor,
        norm: Norm | None = None,
        **around: Any,
    ) -> None:
        """out = product of `into`, to which `norm` is applied first; `into` is `hidden` then."""
        stored = product.as_stored(self._count)
        if stored is not None:
            if norm is not None:
                normed = self._memory("normed", into.shape[1])
                chain.add(ResidualNorm, residual=into, norm=norm, out=normed)
                into = normed
            weight = stored.form, stored.tensors
            if product.int8:
                chain.add(Int8Linear, into, *weight, out, workspace=self.workspace, **around)
            else:
                around |= {"scratch": product.weight, "workspace": self.workspace}
                chain.add(QuantLinear, into, *weight, out, **around)
            return
        self._make_whole(chain, product)
        chain.add(
            Linear,
            into,
            product.weight,
            out,
            norm=norm,
            transposed=product.transposed,
            workspace=self.workspace,
            **around,
        )

    def _make_whole(self, chain: Chain, product: Product) -> None:
        """What a product with its whole weight takes before; nothing if that was put earlier."""
        if product.filling is not None and product.as_stored(self._count) is None:
            chain.fill(product.filling)


class Chain:
    """Calls that run one behind the other; each may begin before the kernel ahead has ended.

    That holds where weights are in place before: within a layer, and from one resident layer to
    the next (`ahead`). It needs a kernel of the project's own ahead, so nothing begins early behind
    a product of cuBLAS; nor behind what makes a weight whole, which the next call reads.
    """

    def __init__(self, ahead: Launchable | None) -> None:
        self.calls: list[Launchable] = []
        self._ahead = ahead

    def add(self, kind: Callable[..., Call], *args: Any, **kwargs: Any) -> None:
        """Make the call and put it last."""
        call = kind(*args, **kwargs, early=self._behind_own())
        self.calls.append(call)
        self._ahead = call

    def fill(self, filling: Filling) -> None:
        """Make a weight whole; a kernel that reads the one before has ended then."""
        self.calls.append(filling)
        self._ahead = None

    def put(self, call: Launchable) -> None:
        """What is no kernel: nothing begins early behind it."""
        self.calls.append(call)
        self._ahead = None

    def _behind_own(self) -> bool:
        if isinstance(self._ahead, (Linear, QuantLinear)):
            return self._ahead.own
        return self._ahead is not None
