"""Several jobs on one model in lock step: a layer is loaded once for all of them.

A job is any function that calls the model, such as its `generate` for one micro-batch. Each runs in
a greenlet. It switches out where a pass begins and where it asks for a streamed layer, and goes on
when all are there: so a pass of the stream is one pass of every job, and costs the loads of one.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NoReturn, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from offload.errors import JobError, UnsupportedError
from offload.kernels.call import current_stream, on_device
from offload.models.hooked import PassOwner
from offload.models.lockstep.crossing import crossing, stepping
from offload.models.lockstep.set_aside import GrownTables, LayerCounts, ThreadSettings
from offload.models.lockstep.spent import let_forwards_go

T = TypeVar("T")


class _Job:
    """One function, and where it has come to."""

    def __init__(self, number: int, call: Callable[[], Any], tables: GrownTables | None) -> None:
        self.number = number
        self.result: Any = None
        self.error: BaseException | None = None
        self.site: int | None = None  # that it waits for; None: it waits for the next pass
        self.rests = False  # behind a layer that others are still to use
        self.depth = 0  # forwards inside one another
        self.looked_at: set[tuple[int, CodeType, int]] = set()  # forwards, in this pass
        self.tables = tables  # while it waits
        self.layer_counts: Sequence[int] | None = None  # likewise; None: those of the model
        self._call = call
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.greenlet = greenlet(self._run)
        self.greenlet.gr_context = contextvars.copy_context()

    def _run(self) -> None:
        inference, gradients = self._modes
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                self.result = self._call()
        except BaseException as error:
            self.error = error


class LockStep:
    """Runs jobs on the model of `owner`; whoever makes it holds the owner's lock.

    The order is fixed: within a pass layer after layer as the model has them, and at each the jobs
    in the order of their numbers; jobs that want another layer wait for its turn. A job that comes
    later begins with the next pass.
    """

    def __init__(
        self,
        owner: PassOwner,
        model: torch.nn.Module,
        device: torch.device,
        name: Callable[[int], str],
    ) -> None:
        """`name` says what job i is, for errors."""
        self._owner = owner
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._name = name
        self._tables = GrownTables.of(model)
        self._layer_counts = LayerCounts(model)
        self._jobs: list[_Job] = []  # those that have begun and not ended
        self._now: _Job | None = None
        self._hub = getcurrent()
        self._at = 0  # site whose turn it is
        self._left = 0  # jobs that are still to use it
        self._last: int | None = None  # site of the pass before
        self._ending = False
        self._around = self._surroundings()

    # ---- what the jobs' forwards call ------------------------------------------------------------

    def wait(self, site: int | None) -> None:
        """Let the other jobs run until it is the turn of the layer of `site`; None: until the next
        pass begins.
        """
        job = self._now
        if job is None or getcurrent() is not job.greenlet:
            raise UnsupportedError(
                "a job called the model from a greenlet of its own: call it from the job itself"
            )
        if self._ending:
            raise GreenletExit
        if self._surroundings() != self._around:
            raise UnsupportedError(
                "a job called the model under a CUDA stream, a current device, or a mode such as "
                "`with torch.device(...)` of its own, which would reach the other jobs: enter it "
                "around all of them instead"
            )
        if site is None:
            job.looked_at.clear()
        else:
            let_forwards_go(sys._getframe(1), job.looked_at)
        job.site = site
        self._switch_out(job)

    def shared(self, site: int) -> bool:
        """Whether other jobs are still to use the layer of `site` in its turn."""
        return self._left > 0 and site == self._at

    def rest(self, site: int) -> None:
        """The layer of `site` was used: behind the last one of a pass, let the others use it, too.

        Else its slot would be in use while one job after another chooses its tokens, for which the
        host waits.
        """
        job = self._now
        if job is None or self._ending or sys.exc_info()[0] is not None:
            return
        if site == self._last and len(self._jobs) > 1:
            job.rests = True
            self._switch_out(job)

    def _switch_out(self, job: _Job) -> None:
        try:
            with ThreadSettings():
                self._hub.switch()
        finally:
            job.site, job.rests = None, False

    def _surroundings(self) -> tuple[int, ...]:
        """What is set for the thread and cannot be put aside."""
        modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        if not self._on_gpu:
            return modes
        # As numbers, without torch's objects: this is asked once a layer and job.
        return (*modes, torch._C._cuda_getDevice(), current_stream(self._device))

    # ---- the jobs --------------------------------------------------------------------------------

    def run(self, calls: Iterable[Callable[[], T]], live: int | None) -> list[T]:
        """The results of `calls` in their order; at most `live` of them have begun and not ended.

        The first that fails ends all others.
        """
        queue = enumerate(calls)
        results: list[Any] = []
        try:
            while True:
                self._join(queue, live, results)
                if not self._jobs:
                    return results
                self._owner.start_pass()
                try:
                    with ThreadSettings():
                        self._pass(results)
                finally:
                    self._owner.finish_pass()
        finally:
            with ThreadSettings():
                self._end_all()

    def _join(
        self, queue: Iterator[tuple[int, Callable[[], Any]]], live: int | None, results: list[Any]
    ) -> None:
        """Begin jobs, as many as may be live; each comes to where its first pass begins."""
        while live is None or len(self._jobs) < live:
            following = next(queue, None)
            if following is None:
                return
            job = _Job(*following, self._tables)
            results.append(None)
            self._jobs.append(job)
            with ThreadSettings():
                self._resume(job, results)

    def _pass(self, results: list[Any]) -> None:
        """One pass of every job that is live."""
        for job in list(self._jobs):
            self._resume(job, results)
        at = self._at = 0
        while waiting := [job for job in self._jobs if job.site is not None]:
            sites = {job.site for job in waiting if job.site is not None}
            # Whatever comes before has had its turn, and begins again from the first.
            at = self._at = min(sites, key=lambda site: (site < at, site))
            turn = [job for job in waiting if job.site == at]
            for self._left, job in zip(reversed(range(len(turn))), turn, strict=True):
                self._resume(job, results)
            for job in [job for job in waiting if job.rests]:
                self._resume(job, results)
        self._last = at

    def _resume(self, job: _Job, results: list[Any]) -> None:
        """Let a job run until it waits or ends. Raises ClosedError once another one has closed the
        model.
        """
        self._owner.refuse_closed()
        self._switch(job)
        if not job.greenlet.dead:
            return
        self._jobs.remove(job)
        if job.error is not None:
            self._raise(job.number, job.error)
        results[job.number] = job.result

    def _switch(self, job: _Job, error: type[BaseException] | None = None) -> None:
        owner = self._owner
        outer = None if job.tables is None else job.tables.swap()
        counts = self._layer_counts.put(job.layer_counts)
        owner.depth, self._now = job.depth, job
        try:
            if error is None:
                job.greenlet.switch()
            else:
                job.greenlet.throw(error)
        finally:
            job.depth, owner.depth, self._now = owner.depth, 0, None
            job.layer_counts = self._layer_counts.put(counts)
            if outer is not None:
                job.tables = outer.swap()

    def _raise(self, number: int, error: BaseException) -> NoReturn:
        """An error of a job, with its name."""
        if not isinstance(error, Exception):  # Ctrl-C, exit
            raise error
        text = f"{self._name(number)} failed, and the others were ended: "
        if isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(f"{text}{error}") from error
        raise JobError(f"{text}{type(error).__name__}: {error}", number) from error

    def _end_all(self) -> None:
        """End the jobs that have not ended, so that they let go of what they hold."""
        self._ending = True
        interrupt: BaseException | None = None
        while self._jobs:
            job = self._jobs[-1]
            try:
                if not job.greenlet.dead:
                    self._switch(job, GreenletExit)
            except BaseException as error:  # Ctrl-C once more: the job is still there
                interrupt = error
            else:
                self._jobs.pop()
        if interrupt is not None:
            raise interrupt


def run_together(
    owner: PassOwner,
    model: torch.nn.Module,
    device: torch.device,
    calls: Iterable[Callable[[], T]],
    live: int | None,
    name: Callable[[int], str],
) -> list[T]:
    """The results of `calls`, run in lock step on the model of `owner`; another thread's passes
    wait until all have ended.
    """
    if live is not None and (not isinstance(live, int) or isinstance(live, bool) or live < 1):
        raise ValueError(f"live must be a positive number of calls or None, got {live!r}")
    if not isinstance(calls, Iterable):
        raise TypeError(f"together() takes a list of functions, got {calls!r}")
    with crossing(owner), owner.lock, stepping(owner), on_device(device):
        if owner.lockstep is not None:
            raise UnsupportedError(
                "together() within together() of the same model: give all calls to one of them"
            )
        if owner.depth:
            raise UnsupportedError("together() within a forward of the same model")
        steps = owner.lockstep = LockStep(owner, model, device, name)
        if owner.stream is not None:
            owner.stream.meeting = steps
        try:
            return steps.run(calls, live)
        finally:
            owner.lockstep = None
            if owner.stream is not None:
                owner.stream.meeting = None
