"""Runs a model's own modules over streamed layers: a layer's weights are in place while its forward
runs, and only then.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from offload.device import ComputeDevice
from offload.errors import ClosedError, UnsupportedError
from offload.models.lockstep.crossing import Owner, crossing
from offload.models.parts import Part
from offload.scheduler.stream import Meeting, Stream
from offload.trace import Trace

KEPT_PASSES = 256  # times of the latest passes


class PassOwner:
    """Lets one caller at a time run passes over the stream.

    A pass is what one call of the model does. Its thread may hold several forwards in it (a model
    calls its own inner models; micro-batches meet at a layer); another thread waits until the pass
    is over.
    """

    def __init__(
        self,
        stream: Stream | None,
        device: ComputeDevice,
        explain: Callable[[], str],
        check: Callable[[], None],
    ) -> None:
        self.stream = stream
        self.closed = False
        self._device = device
        self._explain = explain
        self._check = check
        self.lock = threading.RLock()  # held by whoever runs a pass
        self.depth = 0  # forwards inside one another, of the thread that holds the lock
        self.lockstep: Meeting | None = None  # of several jobs that run passes together
        self.awaits: Owner | None = None  # whose model a job of that has called
        self._start: Any = None
        self._times: deque[tuple[Any, Any]] = deque(maxlen=KEPT_PASSES)
        self.passes = 0
        _owners.add(self)

    def begin(self) -> None:
        """A caller's first forward begins: a pass of its own, or its part of one."""
        if self.lockstep is not None:
            self.lockstep.wait(None)
        else:
            self.start_pass()

    def end(self) -> None:
        """A caller's first forward has ended, also by an exception."""
        if self.lockstep is None:
            self.finish_pass()

    def refuse_closed(self) -> None:
        """Raises ClosedError once the weights are gone."""
        if self.closed:
            raise ClosedError(
                "this offloaded model was closed and its weights are gone; call offload.run again"
            )

    def start_pass(self) -> None:
        """A pass begins."""
        self.refuse_closed()
        if self.stream is not None:
            self.stream.end_pass()  # in case Ctrl-C came while the last one was ending
            try:
                self._check()
            except Exception:
                self.stream.clear()  # what was loaded ahead may be what is wrong
                raise
        self._start = self._device.timed_mark()
        if self._device.trace is not None:
            self._device.trace.pass_begins()

    @property
    def trace(self) -> Trace | None:
        """Who is told of what passes do."""
        return self._device.trace

    def finish_pass(self) -> None:
        """A pass has ended, also by an exception."""
        if self.stream is not None:
            self.stream.end_pass()
        if self._start is not None:
            self.passes += 1
            self._times.append((self._start, self._device.timed_mark()))
            if self._device.trace is not None:
                self._device.trace.pass_ends()
            self._start = None

    def close(self) -> None:
        """No pass begins any more; waits for the one under way."""
        with crossing(self), self.lock:
            self.closed = True

    def pass_seconds(self) -> list[float]:
        """Seconds from the start to the end of each of the latest passes, those still running left
        out.
        """
        times = (self._device.elapsed(start, stop) for start, stop in list(self._times))
        return [t for t in times if t is not None]

    def out_of_memory(self, error: torch.OutOfMemoryError) -> NoReturn:
        """The same error, saying what stands on the device and what to lower."""
        raise torch.OutOfMemoryError(f"{error}\n{self._explain()}") from error


_owners: weakref.WeakSet[PassOwner] = weakref.WeakSet()


def _unlock_after_fork() -> None:
    """A thread that held a lock does not come along into a forked process to release it."""
    for owner in list(_owners):
        owner.lock = threading.RLock()
        owner.depth, owner.awaits = 0, None


os.register_at_fork(after_in_child=_unlock_after_fork)


class NotCopied:
    """What belongs to one stream and its slots: a copy would read memory that it does not own."""

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "an offloaded model cannot be copied: call offload.run a second time instead"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an offloaded model cannot be pickled: pickle its folder's path instead")


class _Forward(NotCopied):
    """Stands in for a module's `forward`; keeps its signature."""

    def __init__(self, forward: Callable[..., Any], owner: PassOwner) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._owner = owner

    def _without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Parameters require gradients as in the plain model (torch picks kernels by that flag), so
        a graph that holds slots is avoided here.
        """
        _refuse_gradients(args, kwargs)
        with torch.no_grad():
            return self(*args, **kwargs)

    # What dynamo traced, it would reorder: loads, events, and what is in a slot when.
    @torch.compiler.disable(reason="the forward of an offloaded model runs as it is")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self._without_gradients(args, kwargs)
        owner = self._owner
        # Ctrl-C may come at any call: the lock is taken by `with`, which leaves no gap before the
        # block, and the depth is restored by a plain assignment, not counted down.
        with crossing(owner), owner.lock:
            depth = owner.depth
            owner.depth = depth + 1
            try:
                if depth == 0:
                    owner.begin()
                return self._run(args, kwargs)
            except torch.OutOfMemoryError as error:
                if depth > 0:
                    raise
                owner.out_of_memory(error)
            finally:
                owner.depth = depth
                if depth == 0:
                    owner.end()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(*args, **kwargs)


class PassForward(_Forward):
    """The forward of a module that contains layers: one pass, or part of one."""


class LayerForward(_Forward):
    """The forward of a layer: its tensors are put in place from the slot, then taken out."""

    def __init__(
        self,
        forward: Callable[..., Any],
        owner: PassOwner,
        site: int,
        part: Part,
        parameters: list[list[nn.Parameter]],
    ) -> None:
        super().__init__(forward, owner)
        if owner.stream is None:
            raise ValueError("a streamed layer needs a stream")
        self._stream = owner.stream
        self.site = site
        self.in_slot = parameters  # for every slot, one parameter a tensor of the layer
        # Flat (dict, key) places, and for every slot the parameters in the same order.
        self._places = [(b.module._parameters, b.key) for bs in part.bindings for b in bs]
        repeat = [i for i, bs in enumerate(part.bindings) for _ in bs]
        self._in_slot = [[row[i] for i in repeat] for row in parameters]
        self._empty = [part.placeholders[i] for i in repeat]

    def close(self) -> None:
        """Let go of the slots' memory."""
        self._in_slot.clear()
        self.in_slot.clear()

    def check_places(self) -> None:
        """Refuse a weight that the user put where one is streamed."""
        for (holder, key), empty in zip(self._places, self._empty, strict=True):
            if holder.get(key) is not empty:
                self._refuse_replaced(holder.get(key), empty)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check_places()
        slot = self._stream.acquire(self.site)
        try:
            for (holder, key), parameter in zip(self._places, self._in_slot[slot], strict=True):
                holder[key] = parameter
            return self._forward(*args, **kwargs)
        finally:
            for (holder, key), empty in zip(self._places, self._empty, strict=True):
                holder[key] = empty
            self._stream.release(self.site)

    def _refuse_replaced(self, found: nn.Parameter | None, empty: nn.Parameter) -> None:
        """A weight of the user's own, where a forward would cover it with the stored one."""
        if any(found is parameter for row in self._in_slot for parameter in row):
            return  # left by Ctrl-C in the middle of taking them out
        raise UnsupportedError(
            f"{empty.weight} was replaced or deleted after offload.run, which streams the stored "  # type: ignore[attr-defined]
            "weight: change weights before, or replace the module that holds it"
        )


def _refuse_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedError(
                "gradients cannot flow through streamed layers: their slots are overwritten before "
                "a backward pass. Run under "
                "torch.no_grad(), or detach the inputs"
            )
