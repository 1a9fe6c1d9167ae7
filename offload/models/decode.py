"""Decoding one token a sequence: every kernel call of every layer, made once and launched often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from offload.kernels import Norm
from offload.kernels.attention import DecodeAttention
from offload.kernels.call import Call, current_stream
from offload.kernels.int8_linear import Int8Linear
from offload.kernels.linear import Linear
from offload.kernels.quant_gemm import QuantGemm
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.kernels.step_inputs import StepInputs
from offload.kernels.workspace import Workspace
from offload.models.decode_graph import LaunchGraph
from offload.models.entry import Entry
from offload.models.host_rows import CpuWork, Exchange, HostCall, HostRows
from offload.models.kv_cache import KvLayer
from offload.models.layer_weights import LayerWeights, Product
from offload.models.padding import Padding, PaddingCheck
from offload.models.quantized.layer import Filling
from offload.models.spec import LayerSpec, ModelSpec

Buffers = tuple[torch.Tensor, torch.Tensor]  # keys, values
Launched = Call | Filling | Exchange | HostCall
_KEYS, _VALUES = attrgetter("key_buffer"), attrgetter("value_buffer")


class DecodeSession:
    """The buffers that calls read and write, for one cache as it lies now, and those calls.

    `entry` is where a token comes in; its `hidden` goes from layer to layer. What changes from
    token to token is in its small tensors, so that calls, and graphs of them, stay good.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[KvLayer],
        padded: bool,
        stream: int,
        workspace: Workspace,
        work: CpuWork | None = None,
    ) -> None:
        """`work`: where to count what CPU cores do, for rows whose keys and values are there."""
        self._made_for = (padded, stream)
        # Of stretches of layers, by the first, and whether the entry is in it.
        self.graphs: dict[tuple[int, bool], LaunchGraph] = {}
        self.issued: set[tuple[int, bool]] = set()  # stretches that were launched without one
        self._spec = spec
        self._workspace = workspace
        self._keys = [buffers_of(layer)[0] for layer in layers]
        self._values = [buffers_of(layer)[1] for layer in layers]
        first = self._keys[0]
        self.batch, self.device, self._dtype = layers[0].batch_size, first.device, first.dtype
        self.capacity = min(keys.shape[2] for keys in self._keys)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        self._calls: dict[tuple[int, int | None], list[Launched]] = {}
        self._last_norm: ResidualNorm | None = None
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        with torch.inference_mode(False):
            self.entry = Entry(self._rows("hidden", spec.hidden))
            self._start = torch.zeros_like(self.entry.length) if padded else None
            self._on_cpu: HostRows | None = None
            host = layers[0].common.host
            if layers[0].rows_on_cpu and host is not None:
                self._on_cpu = HostRows(layers, self.entry, padded, host.copies, work or CpuWork())
            self._slopes = {
                slopes: torch.tensor(slopes, dtype=torch.float32, device=self.device)
                for slopes in {layer.slopes for layer in spec.layers}
                if slopes is not None
            }
        self._expect(None)

    @property
    def repeatable(self) -> bool:
        """Whether graphs of its calls do what the calls do."""
        return self._on_cpu is None

    @property
    def padded(self) -> bool:
        """Whether rows may begin behind column 0."""
        return self._made_for[0]

    def serves(self, layers: Sequence[KvLayer], padded: bool, stream: int) -> bool:
        """Whether the calls are good for these buffers as they lie now."""
        return (
            self._made_for == (padded, stream)
            and len(layers) == len(self._keys)
            and all(map(is_, map(_KEYS, layers), self._keys))
            and all(map(is_, map(_VALUES, layers), self._values))
        )

    def expect(self, padding: Padding | None) -> None:
        """The next steps' padding."""
        if padding is self.padding:
            return
        if self._start is not None and padding is not None:
            self._start.copy_(padding.start)
            if self._on_cpu is not None:
                self._on_cpu.expect(padding)
        self._expect(padding)

    def _expect(self, padding: Padding | None) -> None:
        self.padding = padding  # of the step before
        self.check = PaddingCheck(padding, self.capacity, self.device)  # of that padding
        with torch.inference_mode(False):
            entry = self.entry
            self._inputs = StepInputs(entry.ids, entry.positions, self.check.answer)

    def begin(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        past: int,
    ) -> None:
        """Take in the token for column `past`, and issue the check of the mask with it.

        On the stream that the session is for; ids and the rest as `StepInputs.take` has them.
        """
        self.check.begin()
        self._inputs.take(ids, positions, past, mask, self.check.start)
        self._inputs.launch(self._made_for[1])
        if mask is not None:
            self.check.asked(self._stream)
        self.entry.taken(past)

    def launch(self, index: int, slot: int | None, weights: LayerWeights) -> None:
        """Issue a layer whose weights are in `slot`, or resident (None)."""
        calls = self._calls.get((index, slot))
        if calls is None:
            with torch.inference_mode(False):
                # A resident layer comes right behind another one, whatever is issued.
                ahead = self._calls.get((index - 1, None)) if slot is None else None
                calls = self._make(index, weights, ahead[-1] if ahead else None)
            self._calls[index, slot] = calls
        stream = current_stream(self.device)  # another one while a graph is captured
        for call in calls:
            call.launch(stream)

    def normed(self, norm: Norm) -> torch.Tensor:
        """The model's last norm of `entry.hidden`, [batch, width], overwritten by the next step."""
        with torch.inference_mode(False):  # the next step may be in another mode
            out = self._rows("out", self._spec.hidden)
            if self._last_norm is None:
                self._last_norm = ResidualNorm(residual=self.entry.hidden, norm=norm, out=out)
        self._last_norm.launch(current_stream(self.device))
        return out

    def forget(self) -> None:
        """Let go of the weights, and of the graphs that read them."""
        self._calls.clear()
        self._last_norm = None
        self.graphs.clear()
        self.issued.clear()

    def _rows(self, name: str, width: int) -> torch.Tensor:
        """[batch, width] of that name and width, the same for every layer."""
        found = self._memory.get((name, width))
        if found is None:
            found = torch.empty(self.batch, width, dtype=self._dtype, device=self.device)
            self._memory[name, width] = found
        return found

    def _make(self, index: int, weights: LayerWeights, ahead: Launched | None) -> list[Launched]:
        """The calls of a layer, in the order of their launch, behind the call `ahead`."""
        spec, layout = self._spec.layers[index], self._spec.layers[index].layout
        keys, values = self._keys[index], self._values[index]
        qkv = self._rows("qkv", layout.width)
        query = self._rows("query", layout.heads * layout.head_dim)
        attended = self._rows("attended", layout.heads * layout.head_dim)
        chain = _Chain(ahead)
        self._multiply(chain, self.entry.hidden, weights.qkv, qkv, norm=weights.attention_norm)
        split = keys.shape[0]
        join: HostCall | None = None
        if self._on_cpu is not None:  # first of all, for that takes longest
            exchange = self._on_cpu.exchange(layout)
            staged_query, staged_keys, staged_values = (x[:, None] for x in exchange.staged)
            self._append(
                chain,
                spec,
                weights,
                slice(split, None),
                qkv,
                staged_query,
                staged_keys.transpose(1, 2),
                staged_values.transpose(1, 2),
                self._on_cpu.column,
            )
            chain.put(exchange)
            slopes = None if spec.slopes is None else self._slopes[spec.slopes]
            join = self._on_cpu.attention(index, spec, slopes, attended[split:])
        if split:
            own = slice(None, split)
            query = query[:split]
            self._append(
                chain,
                spec,
                weights,
                own,
                qkv,
                query.view(split, 1, layout.heads, layout.head_dim),
                keys,
                values,
                self.entry.column,
            )
            heads = (split, layout.heads, layout.head_dim)
            chain.add(
                DecodeAttention,
                query.view(heads),
                keys,
                values,
                attended[:split].view(heads),
                length=self.entry.length[:split],
                start=None if self._start is None else self._start[:split],
                scale=spec.scale,
                slopes=None if spec.slopes is None else self._slopes[spec.slopes],
                softcap=spec.softcap,
                window=spec.window,
                workspace=self._workspace,
                even=self._start is None,
            )
        inner = self._rows("inner", weights.mlp_in.outputs // (2 if spec.gated else 1))
        if spec.parallel:  # the MLP reads what came in, before anything is added to it
            self._widen(chain, spec, weights, inner, None)
        if join is not None:
            chain.put(join)
        norms = weights.attention_norm_out, weights.attention_sum_norm
        next_norm = None if spec.parallel else weights.mlp_norm
        normed = self._add(chain, attended, weights.attention_out, *norms, next_norm)
        if not spec.parallel:
            self._widen(chain, spec, weights, inner, normed)
        self._add(chain, inner, weights.mlp_out, weights.mlp_norm_out, weights.mlp_sum_norm)
        return chain.calls

    def _append(
        self,
        chain: _Chain,
        spec: LayerSpec,
        weights: LayerWeights,
        rows: slice,
        qkv: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        column: torch.Tensor,
    ) -> None:
        """Queries, and one column more of keys and values, of some rows of a QKV product."""
        cos, sin = self.entry.angles[spec.rotary] if spec.rotary is not None else (None, None)
        chain.add(
            RotaryAppend,
            qkv[rows, None],
            layout=spec.layout,
            query=query,
            key_cache=keys,
            value_cache=values,
            column=column,
            bias=weights.qkv.bias,
            cos=None if cos is None else cos[rows],
            sin=None if sin is None else sin[rows],
            interleaved=spec.interleaved,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
        )

    def _widen(
        self,
        chain: _Chain,
        spec: LayerSpec,
        weights: LayerWeights,
        inner: torch.Tensor,
        normed: torch.Tensor | None,
    ) -> None:
        """inner = the first half of the MLP, of what its norm made of `hidden` if that was done."""
        self._multiply(
            chain,
            self.entry.hidden if normed is None else normed,
            weights.mlp_in,
            inner,
            bias=weights.mlp_in.bias,
            norm=weights.mlp_norm if normed is None else None,
            activation=spec.activation,
            gated=spec.gated,
        )

    def _add(
        self,
        chain: _Chain,
        into: torch.Tensor,
        product: Product,
        branch_norm: Norm | None,
        sum_norm: Norm | None,
        next_norm: Norm | None = None,
    ) -> torch.Tensor | None:
        """hidden = sum_norm(hidden + branch_norm(product of `into`)).

        Returns what `next_norm` makes of it where a kernel passes by that can do it.
        """
        hidden = self.entry.hidden
        if branch_norm is None and sum_norm is None:
            bias = product.bias
            self._multiply(chain, into, product, hidden, bias=bias, residual=hidden)
            return None
        branch = self._rows("branch", hidden.shape[1])
        self._multiply(chain, into, product, branch)
        normed = None
        if sum_norm is None and next_norm is not None:
            normed = self._rows("normed", hidden.shape[1])
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
        chain: _Chain,
        into: torch.Tensor,
        product: Product,
        out: torch.Tensor,
        norm: Norm | None = None,
        **around: Any,
    ) -> None:
        """out = product of `into`, which is `hidden` where a norm comes before."""
        stored = product.as_stored(self.batch)
        if stored is not None:
            if norm is not None:
                normed = self._rows("normed", into.shape[1])
                chain.add(ResidualNorm, residual=into, norm=norm, out=normed)
                into = normed
            weight = stored.form, stored.tensors
            kind = Int8Linear if product.int8 else QuantGemm
            chain.add(kind, into, *weight, out, workspace=self._workspace, **around)
            return
        if product.filling is not None:
            chain.fill(product.filling)
        chain.add(
            Linear,
            into,
            product.weight,
            out,
            norm=norm,
            transposed=product.transposed,
            workspace=self._workspace,
            **around,
        )


class _Chain:
    """Calls that run one behind the other; each may begin before the kernel ahead has ended.

    That holds where weights are in place before: within a layer, and from one resident layer to
    the next (`ahead`). It needs a kernel of the project's own ahead, so nothing begins early behind
    a product of cuBLAS; nor behind what makes a weight whole, which the next call reads.
    """

    def __init__(self, ahead: Launched | None) -> None:
        self.calls: list[Launched] = []
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

    def put(self, call: Exchange | HostCall) -> None:
        """What is no kernel: nothing begins early behind it."""
        self.calls.append(call)
        self._ahead = None

    def _behind_own(self) -> bool:
        if isinstance(self._ahead, Linear):
            return self._ahead.choice is not None and self._ahead.choice.way != "cublas"
        return self._ahead is not None


def buffers_of(layer: KvLayer) -> Buffers:
    """The layer's keys and values, [batch, kv_heads, capacity, head_dim] each."""
    assert layer.key_buffer is not None and layer.value_buffer is not None
    return layer.key_buffer, layer.value_buffer
