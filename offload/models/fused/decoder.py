"""The fused engine: a decoder's layers as one config-driven block over the project's kernels."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache, modeling_outputs

from offload.kernels.call import current_stream, on_device
from offload.kernels.gemm import MOST_ROWS
from offload.kernels.quant_gemm import MOST_ROWS as STORED_ROWS
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.workspace import Workspace
from offload.models.fused.around import Ahead, LastNorm
from offload.models.fused.decode import DecodeSession
from offload.models.fused.decoder_layers import DecoderLayers
from offload.models.fused.host_rows import CpuWork
from offload.models.fused.issue import StepIssuer
from offload.models.fused.micro_batch import worth_two
from offload.models.fused.prompt import Prompt, Room
from offload.models.fused.request import Request, Unserved
from offload.models.fused.step import Step
from offload.models.hooked import NotCopied, PassForward, PassOwner
from offload.models.kv.cache import adopt, cache_name, common_of, layers_of
from offload.models.kv.host_kv import HostKv
from offload.models.kv.layer import KvLayer
from offload.models.kv.streamed_kv import StreamedKv
from offload.models.parts import ModelParts
from offload.models.shape import MLP_ROWS
from offload.models.specs.spec import ModelSpec
from offload.row_copies import HostCopies, RowCopies


class FusedEngine(NotCopied):
    """Runs the layers of one model. `unserved` counts calls left to transformers, by reason."""

    def __init__(
        self,
        spec: ModelSpec,
        parts: ModelParts,
        owner: PassOwner,
        device: torch.device,
        host_kv: HostKv | None = None,
        prefill_rows: int | None = None,
        micro_batches: int | None = None,
    ) -> None:
        """Over a model that is installed: its tensors are where the plan wants them.

        `host_kv`: where keys and values of a batch's last sequences go; None: nobody's.
        `prefill_rows`: tokens of a prompt's pass whose activations stand at once; None: all.
        `micro_batches`: of a decode step to whose sequences CPU cores attend, 1 or 2; None: 2 where
        that seems worth it.
        """
        self.spec = spec
        self.host_kv = host_kv
        self.prefill_rows = prefill_rows
        self.micro_batches = micro_batches
        self.cpu_work = CpuWork(trace=lambda: owner.trace)
        self.streamed_kv: StreamedKv | None = None
        if host_kv is not None and host_kv.streamed:
            self.streamed_kv = StreamedKv(host_kv, device, trace=lambda: owner.trace)
        # Without sequences in CPU memory nothing is copied.
        self._copies: RowCopies = HostCopies() if host_kv is None else host_kv.copies
        self.unserved: Counter[str] = Counter()
        self._device = device
        self._owner = owner
        self._stream = owner.stream
        self._holder: Any = parts.model.get_submodule(spec.holder)
        with torch.inference_mode(False), torch.no_grad():
            self._layers = DecoderLayers(spec, parts.layers, self._holder)
            self._like = torch.empty(0, dtype=self._layers.dtype, device=device)
        self.issuer = StepIssuer(self._layers, owner, device)
        self._ahead = Ahead(self._holder, spec)
        self._last_norm = LastNorm(self._holder, spec)
        self._workspaces: dict[int, Workspace] = {}  # by CUDA stream
        # Also by stream, for as long as a prompt is under way: several may meet at each layer.
        self._rooms: weakref.WeakValueDictionary[int, Room] = weakref.WeakValueDictionary()
        self._sessions: weakref.WeakSet[DecodeSession] = weakref.WeakSet()
        self._output = getattr(modeling_outputs, spec.output)
        self._cache_name = cache_name(self._output.__dataclass_fields__)
        self._holder.forward = FusedForward(self._holder.forward, owner, self)

    def serve(self, given: dict[str, Any]) -> Any:
        """The decoder's output for arguments by name; raises Unserved where it is not ours."""
        with on_device(self._device), self._scratch():
            # First of all, because the GPU is idle. If a check that follows fails, nothing is kept:
            # what was written lies behind the cache's end.
            step = self._start(given)
            changed = self._layers.why_not()
            if changed is not None:
                raise Unserved(changed)
            try:
                try:
                    return self._run(self._read(given, step=step), step)
                except _Unexpected:
                    return self._run(self._read(given, expect=False))
            except BaseException:
                # A pass that broke off may have copies under way, to memory that others get next,
                # and cores at work on it.
                self._copies.drain()
                for session in list(self._sessions):
                    session.settle()
                raise

    def _scratch(self) -> AbstractContextManager[None]:
        """Holds the scratch in which this engine makes weights whole, if it has one: nobody else
        may use it meanwhile.
        """
        scratch = self._layers.scratch
        return nullcontext() if scratch is None else scratch.taken(self._device)

    def _start(self, given: dict[str, Any]) -> Step | None:
        """Issue the beginning of what looks like one more decode step, up to the first streamed
        layer.
        """
        step = None
        if self._ahead.repeatable:
            step = Step.glance(given, self.spec, current_stream(self._device))
        # A graph runs no module and reads memory that stays, so it is launched before the modules
        # ahead of the layers are checked for changes.
        replayed = step is not None and self.issuer.begins_with_graph(step.session)
        if step is not None and replayed:
            self._begin(step)
        if self._ahead.changed():
            self._ahead = Ahead(self._holder, self.spec)
            for session in list(self._sessions):
                session.forget()
            return None
        if step is None or replayed:
            return step
        if not self.issuer.has_begun(step.session):
            return None
        self._begin(step)
        return step

    def _begin(self, step: Step) -> None:
        step.session.begin(step.ids, step.positions, step.mask, step.past)
        self.issuer.enter(step.session, self._ahead, step.past)

    def _read(
        self, given: dict[str, Any], expect: bool = True, step: Step | None = None
    ) -> Request:
        dtype = self._layers.dtype
        return Request.read(given, self._holder, self.spec, dtype, expect, step, self.host_kv)

    def prepare(self, cache: Any, max_length: int) -> None:
        """Let a cache that `generate` made know how many columns it will get."""
        if isinstance(cache, DynamicCache):
            adopt(cache, self.spec, max_length, self.host_kv)

    def _run(self, request: Request, step: Step | None = None) -> Any:
        spec, holder = self.spec, self._holder
        if request.cache is None or request.tokens > 1:
            hidden = self._prefill(request)
        else:
            hidden = self._decode(request, step)
        project_out = getattr(holder, spec.project_out, None) if spec.project_out else None
        if project_out is not None:
            hidden = project_out(hidden)
        output = self._output(last_hidden_state=hidden, **{self._cache_name: request.cache})
        return output.to_tuple() if request.as_tuple else output

    def notes(self) -> list[str]:
        """What a report should say of it."""
        found = []
        as_stored, in_int8 = self._layers.multiplied_as_stored
        if as_stored:
            found.append(
                f"{as_stored} products of up to {STORED_ROWS} rows take quantised weights from "
                "panels, where that is quicker"
            )
        if in_int8:
            found.append(f"{in_int8} products take activations in int8, with a scale a token")
        if self.issuer.graph_problem is not None:
            found.append(self.issuer.graph_problem)
        if self.host_kv is not None and self.host_kv.int8:
            found.append("keys and values in CPU memory are int8, with a scale a token and head")
        if self.host_kv is not None and self.host_kv.pageable:
            found.append(
                f"keys and values in CPU memory could not be pinned ({self.host_kv.pageable}); "
                "prompts wait for their copies"
            )
        if self.cpu_work.steps:
            found.append(str(self.cpu_work))
        if self.streamed_kv is not None and self.streamed_kv.work.steps:
            found.append(str(self.streamed_kv.work))
        return found

    def close(self) -> None:
        """Let go of the weights."""
        for session in list(self._sessions):
            session.forget()
        self._layers.close()
        if self.host_kv is not None:
            self.host_kv.close()
        if self.streamed_kv is not None:
            self.streamed_kv.close()

    def _prefill(self, request: Request) -> torch.Tensor:
        """The last hidden states [batch, tokens, width] of many tokens."""
        tokens = request.tokens
        layers = self._layers.layers
        kept: Sequence[KvLayer | None] = [None] * len(layers)
        on_cpu = 0
        if request.cache is not None:
            # Before anything temporary is allocated: memory that stays would fragment what the
            # prompt frees at its end.
            kept = layers_of(request.cache)
            self._reserve(layers_of(request.cache), request.past + tokens, request.batch)
            on_cpu = layers_of(request.cache)[0].rows_on_cpu
        hidden = self._embedded(request)
        stream = current_stream(self._device)
        few = hidden.shape[0] * tokens <= MOST_ROWS
        room = self._rooms.get(stream)
        if room is None:
            room = self._rooms[stream] = Room(self._device)
        prompt = Prompt(
            hidden,
            past=request.past,
            padding=request.padding,
            angles=self._ahead.angles(request.positions),
            on_cpu=on_cpu,
            rows=self.prefill_rows,
            stream=stream,
            # What large products need between their kernels is too large to be kept.
            workspace=self._workspace(stream) if few else room.workspace,
            room=room,
            copies=self._copies,
        )
        owner, told = self._owner, self._layers.told
        for index, (layer, kv) in enumerate(zip(layers, kept, strict=True)):
            with told(owner.trace, index, index), layer.in_place(owner.stream) as (_, weights):
                prompt.run(layer.spec, weights, kv)
        prompt.finish()
        if request.cache is not None:
            for kept_layer in layers_of(request.cache):
                kept_layer.length = request.past + tokens
        norm = self._last_norm.norm()
        if norm is None:
            return self._by_module(hidden)
        ResidualNorm(residual=hidden, norm=norm, out=hidden).launch(stream)
        return hidden

    def _embedded(self, request: Request) -> torch.Tensor:
        """The first layer's input [batch, tokens, width], in memory of its own. It is made for some
        sequences at a time, since embeddings and positions take memory beside their sum.
        """
        ahead, ids, embeddings = self._ahead, request.ids, request.embeddings
        positions, tokens = request.positions, request.tokens
        at_once = max(1, (self.prefill_rows or MLP_ROWS) // tokens)
        if ids is None or embeddings is not None or not ahead.repeatable or len(ids) <= at_once:
            hidden = ahead.hidden(ids, embeddings, positions).contiguous()
            if embeddings is not None and hidden.data_ptr() == embeddings.data_ptr():
                hidden = hidden.clone()  # the block works in place
            return hidden
        found: torch.Tensor | None = None
        for first in range(0, len(ids), at_once):
            rows = slice(first, first + at_once)
            own = positions if positions.shape[0] == 1 else positions[rows]
            part = ahead.hidden(ids[rows], None, own)
            if found is None:
                found = part.new_empty(len(ids), *part.shape[1:])
            found[rows] = part
        assert found is not None
        return found

    def _decode(self, request: Request, step: Step | None) -> torch.Tensor:
        """The last hidden states [batch, 1, width] of one token."""
        assert request.cache is not None
        kept = layers_of(request.cache)
        if step is not None:
            session = step.session
        else:
            self._reserve(kept, request.past + 1, request.batch)
            session = self._session(request.cache, request.padding is not None)
            session.expect(request.padding)
            session.entry.take(request.ids, request.positions, request.past)
            self.issuer.enter(session, self._ahead, request.past, request.embeddings)
        self.issuer.rest(session)
        if request.check is not None and not request.check.holds():
            raise _Unexpected
        for kv in kept:
            kv.length = request.past + 1
        norm = self._last_norm.norm()
        if norm is None:
            return self._by_module(session.entry.hidden[:, None].clone())
        return session.normed(norm)[:, None].clone()

    def _by_module(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last norm as the model has it, if it has one."""
        module = self._last_norm.module()
        return hidden if module is None else module(hidden)

    def _session(self, cache: DynamicCache, padded: bool) -> DecodeSession:
        """The calls made for this cache; made anew if its buffers have moved."""
        stream = current_stream(self._device)
        common = common_of(cache)
        layers = layers_of(cache)
        if common.session is None or not common.session.serves(layers, padded, stream):
            common.session = None  # before the new one takes memory
            workspace = self._workspace(stream)
            common.session = DecodeSession(
                self.spec,
                layers,
                padded,
                stream,
                workspace,
                self.cpu_work,
                self.streamed_kv,
                self._micro_batches(layers),
            )
            self._sessions.add(common.session)
        return common.session

    def _micro_batches(self, kept: list[KvLayer]) -> int:
        """Of the decode steps of a cache: as planned, or 2 where that seems worth it and the link
        does not wait for a slot, as a layer more is in use.
        """
        if kept[0].rows_on_cpu < 2 or self.streamed_kv is not None:
            return 1
        if self.micro_batches is not None:
            return self.micro_batches
        ahead = self._stream is None or self._stream.depth > 1
        worth = ahead and worth_two(kept, self.spec, self._layers.whole_bytes)
        return 2 if worth and self._device.type == "cuda" else 1

    def _reserve(self, kept: list[KvLayer], columns: int, batch: int) -> None:
        for kv, layer in zip(kept, self.spec.layers, strict=True):
            layout = layer.layout
            kv.reserve(columns, self._like, batch, layout.kv_heads, layout.head_dim)

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
            given = dict(zip(self._names, args, strict=False)) | kwargs if args else kwargs
            return self.engine.serve(given)
        except Unserved as reason:
            self.engine.unserved[str(reason)] += 1
        return self._forward(*args, **kwargs)


class _Unexpected(Exception):
    """A decode step's mask is not the one that the previous step led to expect."""
