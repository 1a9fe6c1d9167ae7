"""`model.offload`: what is known of an offloaded model, and done with it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from offload.device import ComputeDevice
from offload.measure import measure_rates
from offload.models.fused.decoder import FusedEngine
from offload.models.fused.host_rows import CpuWork
from offload.models.hooked import NotCopied, PassOwner
from offload.models.install import all_bindings
from offload.models.kv.streamed_kv import StreamedWork
from offload.models.lockstep.calls import run_together
from offload.models.lockstep.micro_batches import DEFAULT_SIZE, MicroBatches
from offload.models.offloaded_class import become_offloaded
from offload.models.parts import ModelParts
from offload.models.quantized.modules import (
    linears_in_int8,
    quantised_weights,
    release_quantised,
)
from offload.report import Report
from offload.scheduler.cost import Rates
from offload.scheduler.plan import Plan
from offload.scheduler.planner import Planned
from offload.store import WeightStore
from offload.store.pack import Pack
from offload.trace import Picture, Trace, picture
from offload.trace.chrome import write_chrome

T = TypeVar("T")
SMALL_MODEL = 1 << 30  # bytes streamed; below it rates are measured with less data


class Offload(NotCopied):
    """What offload knows of a model and does with it: `generate` in micro-batches, `together`, the
    `plan`, `report()`, `trace()`, `close()`.
    """

    def __init__(
        self,
        parts: ModelParts,
        plan: Plan,
        store: WeightStore,
        owner: PassOwner,
        device: ComputeDevice,
        pack: Pack | None,
        engine: FusedEngine | None,
        engine_reason: str,
        planned: Planned | None = None,
    ) -> None:
        model = parts.model
        self.plan = plan
        self.planned = planned
        self._name = f"{type(model).__name__} {model.name_or_path}".strip()
        self._parts = parts
        self._store = store
        self._owner = owner
        self._device = device
        self._engine = engine
        self._engine_reason = engine_reason
        self._rates: Rates | None = None
        self._picture: Picture | None = None
        self._release: Callable[[], None] = weakref.finalize(model, _release, owner, store, pack)
        become_offloaded(self, parts, plan)

    @property
    def closed(self) -> bool:
        """Whether the weights were released."""
        return self._owner.closed

    def refuse_closed(self) -> None:
        """Raises ClosedError once the weights were released."""
        self._owner.refuse_closed()

    def prepare_cache(self, cache: Any, max_length: int) -> None:
        """Let a cache that will be passed to the model know how many columns it will get."""
        if self._engine is not None:
            self._engine.prepare(cache, max_length)

    @property
    def cpu_work(self) -> CpuWork | None:
        """What CPU cores did of decode steps; None without the fused engine."""
        return None if self._engine is None else self._engine.cpu_work

    @property
    def streamed_kv(self) -> StreamedWork | None:
        """What of keys and values came up for decode steps; None unless kv_attention is "gpu"."""
        found = None if self._engine is None else self._engine.streamed_kv
        return None if found is None else found.work

    @property
    def device(self) -> torch.device:
        """Where layers run."""
        return self._device.torch_device

    def wait_loaded(self) -> None:
        """Return once the CPU tier holds all its layers; until then, passes wait for them singly.

        Raises AioError where the disk failed.
        """
        self._store.wait_loaded()

    def rates(self) -> Rates:
        """The rates that bound a pass, measured now if they were not before (a fraction of a
        second).
        """
        if self._rates is None:
            if self.closed or not self.plan.streamed_bytes:
                return Rates()
            self.wait_loaded()
            files = self._store.nvme_files()
            small = self.plan.streamed_bytes < SMALL_MODEL
            self._rates = measure_rates(self._device, files, small=small)
        return self._rates

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str] | None = None) -> Iterator[Trace]:
        """Records what every resource does in the passes that run within the block.

        `path` gets the trace in Chrome's JSON, which Perfetto opens too; `report()` shows one of
        the passes from then on. Nothing is recorded, and nothing costs time, outside of a block.
        Raises OSError where `path` cannot be written, TypeError where it is no path, ClosedError
        for a closed model, and ValueError within another trace.
        """
        device, stream = self._device, self._owner.stream
        if path is not None and not isinstance(path, (str, os.PathLike)):  # open() takes numbers
            raise TypeError(f"trace() takes the path of a file or None, got {path!r}")
        self.refuse_closed()
        if device.trace is not None:
            raise ValueError("this model is being traced already: end that block first")
        with contextlib.ExitStack() as stack:
            file = None
            if path is not None:
                # First of all, lest a long run end in a folder that is not there.
                file = stack.enter_context(open(os.path.abspath(path), "w", encoding="utf-8"))
            trace = Trace(device)
            device.trace = trace
            if stream is not None:
                stream.trace = trace

            def end() -> None:
                device.trace = None
                if stream is not None:
                    stream.trace = None
                spans = trace.end()
                self._picture = picture(spans)
                if file is not None:
                    write_chrome(spans, file)

            try:
                yield trace
            except BaseException:
                with contextlib.suppress(Exception):  # the block's own error is what matters
                    end()
                raise
            end()

    def report(self) -> Report:
        """What stands where, what bounds a pass, and what passes have cost so far; printable."""
        owner, store = self._owner, self._store
        stats = owner.stream.stats if owner.stream is not None else None
        loads = stats.loads if stats is not None else []
        pageable, reason = store.pageable_bytes
        notes = list(self.plan.notes)
        if pageable:
            notes.append(
                f"{pageable} bytes could not be pinned ({reason}); copies from them are slower"
            )
        quantised = sum(1 for _ in quantised_weights(self._parts.model))
        if quantised:
            what = "weight is quantised" if quantised == 1 else "weights are quantised"
            notes.append(f"{quantised} {what}, and dequantised where they are used")
        engine = self._engine
        if engine is not None:
            notes += engine.notes()
        elif in_int8 := linears_in_int8(self._parts.model):
            notes.append(f"{in_int8} of them are not: activations in int8, with a scale a token")
        return Report(
            model=self._name,
            engine="transformers" if engine is None else "fused",
            engine_reason=self._engine_reason,
            unserved={} if engine is None else dict(engine.unserved),
            device=str(self._device.torch_device),
            plan=self.plan,
            rates=self.rates(),
            passes=owner.passes,
            pass_seconds=owner.pass_seconds(),
            loads=sum(loads),
            loaded_bytes=sum(
                n * s.weight_bytes for n, s in zip(loads, self.plan.layers, strict=False)
            ),
            pageable_bytes=pageable,
            pageable_reason=reason,
            io=store.describe_io(),
            notes=tuple(notes),
            picture=self._picture,
            planned=self.planned,
        )

    def together(self, calls: Iterable[Callable[[], T]], *, live: int | None = None) -> list[T]:
        """The results of `calls`, functions that call the model, run side by side in lock step.

        A layer is loaded once for all: a pass takes every call one forward further, so that the
        loads are those of the longest alone. Each call computes what it would alone, with a cache
        of its own. `live` bounds how many have begun and not ended; the next of `calls`, which may
        be a generator, begins with the pass after one has ended. Of torch's settings each has its
        own grad mode, inference mode and autocast; `sdpa_kernel`, the random number generators and
        other settings of the process are shared.

        The first call that fails ends the others: JobError has its number, and its error as
        `__cause__`. Ctrl-C ends all. Other threads' passes wait until all have ended.
        """
        model = self._parts.model
        return run_together(self._owner, model, self.device, calls, live, _call_name)

    def generate(
        self,
        inputs: Any,
        *,
        micro_batch_size: int | None = None,
        live: int | None = None,
        **options: Any,
    ) -> Any:
        """The model's `generate`, in micro-batches that share every load of a layer.

        Sampling (`do_sample`) draws from torch's generators, of each pass in the order of the
        sequences: a seed gives the same tokens again with the same `micro_batch_size` and `live`,
        but others than in one batch, where numbers are drawn for all sequences at once and for
        those that have ended, too.

        Args:
            inputs: a batch, which is split by sequences: input ids [batch, tokens], or a mapping
                of tensors with the batch first, as tokenizers return it. Or requests: a list (or
                any iterable) of mappings with arguments of `generate`, one micro-batch each.
            micro_batch_size: sequences of a batch that run at once; unless given, what was planned
                (`run(goal=...)`), else 8.
            live: micro-batches that have begun and not ended, at most; None: all, or of a batch as
                many as were planned for. Each has a cache of its own, and with `kv_on_cpu` they
                share the sequences that the compute device has room for; the next begins where one
                has ended.
            options: further arguments of `generate`. Tensors of two or more dimensions with the
                batch first (attention_mask) are split with it. `prefill_chunk_size` cuts
                prompts by tokens, so that a long one takes several passes and less memory.

        Returns:
            Of a batch the ids [batch, tokens], padded at the end as `generate` pads; a list of
            outputs, one a micro-batch, with `return_dict_in_generate`. Of requests a list. Stop
            strings and stopping criteria end a micro-batch once they have ended its rows, which in
            one batch go on until the last row of all ends.

        Raises:
            JobError: a micro-batch failed; which one, and why. The others were ended.
            ValueError, TypeError: an argument, by name and value.
        """
        model: Any = self._parts.model
        how = None if self.planned is None else self.planned.choice.setting
        usual = DEFAULT_SIZE if how is None else how.micro_batch
        work = MicroBatches.of(inputs, micro_batch_size, options, model, usual)
        if how is not None and live is None and isinstance(inputs, torch.Tensor | Mapping):
            live = max(1, how.batch // (micro_batch_size or usual))
        calls = (partial(model.generate, **arguments) for arguments in work.arguments)
        outputs = run_together(self._owner, model, self.device, calls, live, work.name)
        return work.join(outputs)

    def close(self) -> None:
        """Release all weights, threads and files, and delete what was stored for a live model. A
        forward raises from then on.
        """
        self._release()
        if self._engine is not None:
            self._engine.close()
        release_quantised(self._parts.model)
        for binding, placeholder in all_bindings(self._parts):
            binding.module._parameters[binding.key] = placeholder
        for part in self._parts.layers:
            for module in part.modules:
                close = getattr(module.forward, "close", None)
                if close is not None:
                    close()


def _call_name(number: int) -> str:
    return f"call {number} of together()"


def _release(owner: PassOwner, store: WeightStore, pack: Pack | None) -> None:
    owner.close()
    store.close()
    if pack is not None:
        pack.remove()
