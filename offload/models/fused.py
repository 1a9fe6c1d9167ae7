"""The fused engine: a decoder's layers as one config-driven block over the project's kernels."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, modeling_outputs

from offload.kernels import Norm
from offload.kernels.call import current_stream
from offload.kernels.gemm import MOST_ROWS
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.workspace import Workspace
from offload.models.block import Prefill, run_block
from offload.models.decode import DecodeSession, buffers_of
from offload.models.decode_graph import LaunchGraph
from offload.models.describe import is_foreign
from offload.models.hooked import LayerForward, NotCopied, PassForward, PassOwner
from offload.models.kv_cache import KvCommon, KvLayer, adopt, common_of, layers_of
from offload.models.layer_weights import LayerWeights, lie_together, make_norm
from offload.models.parts import ModelParts, Part
from offload.models.placeholder import Placeholder
from offload.models.prefill_attention import PrefillAttention
from offload.models.request import Request, Unserved
from offload.models.spec import LayerSpec, ModelSpec
from offload.scheduler.stream import Stream

Held = tuple[dict[str, Any], str, Any]  # a module's parameters, a key, and what is there


class FusedEngine(NotCopied):
    """Runs the layers of one model. `unserved` counts calls left to transformers, by reason."""

    def __init__(
        self, spec: ModelSpec, parts: ModelParts, owner: PassOwner, device: torch.device
    ) -> None:
        """Over a model that is installed: its tensors are where the plan wants them."""
        self.spec = spec
        self.unserved: Counter[str] = Counter()
        self.graph_problem: str | None = None
        self._device = device
        self._stream = owner.stream
        self._holder: Any = parts.model.get_submodule(spec.holder)
        by_name = {part.layer.name: part for part in parts.layers}
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [
                _Streamed(layer, by_name[name])
                if isinstance(by_name[name].modules[0].forward, LayerForward)
                else _Resident(layer, by_name[name])
                for name, layer in zip(spec.layer_names, spec.layers, strict=True)
            ]
        self._dtype = self._layers[0].dtype
        modules = [m for part in by_name.values() for m in part.modules[0].modules()]
        self._hooks = [x for m in modules for x in (m._forward_hooks, m._forward_pre_hooks)]
        self._last_norm = _LastNorm(self._holder, spec)
        self._stretches = _stretches(self._layers)
        self._workspaces: dict[int, Workspace] = {}  # by CUDA stream
        self._sessions: weakref.WeakSet[DecodeSession] = weakref.WeakSet()
        self._output = getattr(modeling_outputs, spec.output)
        names = self._output.__dataclass_fields__
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._holder.forward = FusedForward(self._holder.forward, owner, self)

    def serve(self, given: dict[str, Any]) -> Any:
        """The decoder's output for arguments by name; raises Unserved where it is not ours."""
        if any(layer.replaced() for layer in self._layers):
            raise Unserved("a weight that was replaced")
        if any(self._hooks) and any(map(is_foreign, self._hooks)):
            raise Unserved("a hook on a module of a layer")
        on_device = (
            torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        )
        with on_device:
            try:
                return self._run(self._read(given))
            except _Unexpected:
                return self._run(self._read(given, expect=False))

    def _read(self, given: dict[str, Any], expect: bool = True) -> Request:
        return Request.read(given, self._holder, self.spec, self._dtype, expect)

    def prepare(self, cache: Any, max_length: int) -> None:
        """Let a cache that `generate` made know how many columns it will get."""
        if isinstance(cache, DynamicCache):
            adopt(cache, self.spec, max_length)

    def _run(self, request: Request) -> Any:
        spec, holder = self.spec, self._holder
        embeddings = request.embeddings
        if embeddings is None:
            embeddings = getattr(holder, spec.tokens)(request.ids)
        hidden = spec.embed(holder, embeddings, request.positions).contiguous()
        if request.embeddings is not None and hidden.data_ptr() == embeddings.data_ptr():
            hidden = hidden.clone()  # the block works in place
        angles = {t: spec.angles(holder, request.positions, t) for t in spec.tables}
        if request.cache is None or request.tokens > 1:
            self._prefill(request, hidden, angles)
        else:
            hidden = self._decode(request, hidden, angles)
        hidden = self._last_norm(hidden)
        project_out = getattr(holder, spec.project_out, None) if spec.project_out else None
        if project_out is not None:
            hidden = project_out(hidden)
        output = self._output(last_hidden_state=hidden, **{self._cache_name: request.cache})
        return output.to_tuple() if request.as_tuple else output

    def close(self) -> None:
        """Let go of the weights."""
        for session in list(self._sessions):
            session.forget()
        self._layers.clear()
        self._stretches.clear()

    def _prefill(self, request: Request, hidden: torch.Tensor, angles: Any) -> None:
        """All layers over [batch, tokens, width], in place."""
        tokens = hidden.shape[1]
        end = request.past + tokens
        if request.cache is None:  # one layer's keys and values at a time
            kept = [KvLayer(KvCommon(tokens))] * len(self._layers)
        else:
            kept = layers_of(request.cache)
        self._reserve(kept, end, hidden)
        stream = current_stream(self._device)
        few = hidden.shape[0] * tokens <= MOST_ROWS
        work = Prefill(
            attention=PrefillAttention(request.past, tokens, request.padding),
            column=torch.full((1,), request.past, dtype=torch.int32, device=self._device),
            end=end,
            angles=angles,
            stream=stream,
            # What large products need between their kernels is too much to be kept.
            workspace=self._workspace(stream) if few else Workspace(self._device),
        )
        for layer, kv in zip(self._layers, kept, strict=True):
            with layer.in_place(self._stream) as (_, weights):
                run_block(layer.spec, weights, hidden, *buffers_of(kv), work)
        for kv in kept:
            kv.length = end

    def _decode(self, request: Request, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
        """All layers over [batch, 1, width]."""
        assert request.cache is not None
        kept = layers_of(request.cache)
        self._reserve(kept, request.past + 1, hidden)
        session = self._session(request.cache, request.padding is not None)
        session.begin(hidden[:, 0], request.past, angles, request.padding)
        for first, last in self._stretches:
            if self._layers[first].streamed:
                self.launch(session, first, last)
            else:
                self._replay(session, first, last)
        if request.check is not None and not request.check.holds():
            raise _Unexpected  # nothing is kept: what was written lies behind the cache's end
        for kv in kept:
            kv.length = request.past + 1
        return session.hidden[:, None].clone()

    def launch(self, session: DecodeSession, first: int, last: int) -> None:
        """Issue the layers first to last of a decode step, call by call."""
        for index in range(first, last + 1):
            with self._layers[index].in_place(self._stream) as (slot, weights):
                session.launch(index, slot, weights)

    def _replay(self, session: DecodeSession, first: int, last: int) -> None:
        """Issue a stretch of resident layers: the first time call by call, then as a graph."""
        graph = session.graphs.get(first)
        if graph is None and first in session.issued and self._can_capture():
            try:
                graph = LaunchGraph(lambda: self.launch(session, first, last), self._device)
                session.graphs[first] = graph
            except RuntimeError as error:
                self.graph_problem = f"CUDA graphs are not used: {error}"
        if graph is not None:
            graph.replay()
        else:
            self.launch(session, first, last)
            session.issued.add(first)

    def _can_capture(self) -> bool:
        return self._device.type == "cuda" and self.graph_problem is None

    def _session(self, cache: DynamicCache, padded: bool) -> DecodeSession:
        """The calls made for this cache, made anew where it lies elsewhere now."""
        stream = current_stream(self._device)
        common = common_of(cache)
        layers = layers_of(cache)
        if common.session is None or not common.session.serves(layers, padded, stream):
            common.session = None  # before the new one takes memory
            workspace = self._workspace(stream)
            common.session = DecodeSession(self.spec, layers, padded, stream, workspace)
            self._sessions.add(common.session)
        return common.session

    def _reserve(self, kept: list[KvLayer], columns: int, hidden: torch.Tensor) -> None:
        for kv, layer in zip(kept, self.spec.layers, strict=True):
            layout = layer.layout
            kv.reserve(columns, hidden, hidden.shape[0], layout.kv_heads, layout.head_dim)

    def _workspace(self, stream: int) -> Workspace:
        """Scratch memory of the calls on one CUDA stream."""
        if stream not in self._workspaces:
            with torch.inference_mode(False):
                self._workspaces[stream] = Workspace(self._device)
        return self._workspaces[stream]


class FusedForward(PassForward):
    """The forward of the module that holds the layers."""

    def __init__(self, forward: Callable[..., Any], owner: PassOwner, engine: FusedEngine) -> None:
        super().__init__(forward, owner)
        self.engine = engine
        self._names = list(inspect.signature(forward).parameters)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            given = dict(zip(self._names, args, strict=False)) | kwargs
            return self.engine.serve(given)
        except Unserved as reason:
            self.engine.unserved[str(reason)] += 1
        return self._forward(*args, **kwargs)


class _Unexpected(Exception):
    """A decode step's mask is not what the step before lets one expect."""


class _LastNorm:
    """The normalisation behind the last layer: by the kernels, or by its module if need be."""

    def __init__(self, holder: nn.Module, spec: ModelSpec) -> None:
        self._module: Any = getattr(holder, spec.final_norm, None)
        self._norm: Norm | None = None
        self._held: list[Held] = []
        if self._module is None or spec.last_norm is None:
            return
        tensors = dict(self._module.named_parameters())
        if not any(isinstance(t.data, Placeholder) for t in tensors.values()):
            self._norm = make_norm(spec.last_norm, {n: t.detach() for n, t in tensors.items()})
            self._held = _held(self._module)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [..., width], contiguous; in place, or a new tensor."""
        module = self._module
        if module is None:
            return hidden
        if self._norm is None or _replaced(self._held) or module._forward_hooks:
            return module(hidden)
        call = ResidualNorm(residual=hidden, norm=self._norm, out=hidden)
        call.launch(current_stream(hidden.device))
        return hidden


class _Streamed:
    """A layer that comes through the slots: its weights in each of them."""

    streamed = True

    def __init__(self, spec: LayerSpec, part: Part) -> None:
        self.spec = spec
        forward: Any = part.modules[0].forward
        self._forward: LayerForward = forward
        names = [place.name.removeprefix(f"{part.layer.name}.") for place in part.layer.places]
        self._in_slot = [
            LayerWeights.of(spec, dict(zip(names, parameters, strict=True)))
            for parameters in forward.in_slot
        ]
        self.dtype = self._in_slot[0].qkv.weight.dtype

    def replaced(self) -> bool:
        """Never: `in_place` refuses weights of the user's own."""
        return False

    @contextmanager
    def in_place(self, stream: Stream | None) -> Iterator[tuple[int | None, LayerWeights]]:
        """The slot that the layer is in, and its weights there, for as long as it is used."""
        assert stream is not None
        self._forward.check_places()
        slot = stream.acquire(self._forward.site)
        try:
            yield slot, self._in_slot[slot]
        finally:
            stream.release(self._forward.site)


class _Resident:
    """A layer that stays on the device."""

    streamed = False

    def __init__(self, spec: LayerSpec, part: Part) -> None:
        self.spec = spec
        module = part.modules[0]
        for group in spec.groups():
            _lay_together(module, group)
        self._weights = LayerWeights.of(spec, dict(module.named_parameters()))
        self._held = _held(module)
        self.dtype = self._weights.qkv.weight.dtype

    def replaced(self) -> bool:
        """Whether the user put another parameter in the module since."""
        return _replaced(self._held)

    @contextmanager
    def in_place(self, stream: Stream | None) -> Iterator[tuple[int | None, LayerWeights]]:
        """No slot, and the weights."""
        yield None, self._weights


def _held(module: nn.Module) -> list[Held]:
    """Every parameter of a module, with the place that holds it."""
    holders = [m._parameters for m in module.modules()]
    return [(holder, key, value) for holder in holders for key, value in holder.items()]


def _replaced(held: list[Held]) -> bool:
    """Whether any place holds something else now."""
    return any(holder.get(key) is not value for holder, key, value in held)


def _lay_together(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Give parameters that act as one a common memory, where they lie apart (in a live model)."""
    old = [layer.get_parameter(name) for name in names]
    if lie_together(old):
        return
    memory = torch.cat([p.detach().reshape(-1) for p in old])
    at = 0
    for name, parameter in zip(names, old, strict=True):
        owner, _, key = name.rpartition(".")
        view = memory[at : at + parameter.numel()].view(parameter.shape)
        moved = nn.Parameter(view, requires_grad=parameter.requires_grad)
        layer.get_submodule(owner)._parameters[key] = moved
        at += parameter.numel()


def _stretches(layers: list[Any]) -> list[tuple[int, int]]:
    """Runs of resident layers, and single streamed ones: the first and last of each."""
    found: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        if found and not layer.streamed and not layers[index - 1].streamed:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found
