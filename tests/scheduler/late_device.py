"""A make-believe device whose copies and kernels take effect as late as the events allow.

On a real GPU an event that is missing shows once in a million runs; here the test decides what runs
when. A load writes its slot in three steps (poison, first half, second half), a kernel reads it in
two, and between any two steps anything else may happen that nothing forbids.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

POISON = "poison"
LOAD_STEPS = 3
KERNEL_STEPS = 2


class LoadFailed(Exception):
    """What a disk error looks like to the stream."""


@dataclass(eq=False)
class Load:
    layer: int
    slot: int
    after: int  # kernel steps that must have run before the slot may be written
    before: list[Load]  # earlier loads of the slot: the copy queue keeps their order
    steps: int = 0  # taken so far
    fails_at: int | None = None
    awaited: bool = False
    dropped: bool = False
    cancelled: bool = False

    @property
    def over(self) -> bool:
        """Nothing of it will be written any more."""
        return self.cancelled or self.steps == (self.fails_at or LOAD_STEPS)


@dataclass
class KernelStep:
    slot: int
    half: int
    layer: int
    wait_for: list[Load]


@dataclass
class LateDevice:
    """The `Link` of a stream, and the computation beside it.

    `laziness` is the chance that nothing runs when the host does something. `reads_files`: a load
    that is dropped before it was waited for is cancelled, as a disk read is; any other is a copy
    that stands in the device's queue and runs on, before later loads of the slot.
    """

    slots: int
    chance: random.Random
    laziness: float = 0.5
    reads_files: bool = True
    fail_starts: set[int] = field(default_factory=set)  # numbers of loads that fail to start,
    fail_loads: set[int] = field(default_factory=set)  # or fail half-way
    interrupts: set[int] = field(default_factory=set)  # numbers of waits that Ctrl-C ends

    def __post_init__(self) -> None:
        self.contents: list[list[object]] = [[POISON, POISON] for _ in range(self.slots)]
        self.loads: list[Load] = []
        self.log: list[int] = []  # layers, in the order in which their loads were started
        self.kernels: deque[KernelStep] = deque()
        self.issued = self.done = 0  # kernel steps
        self.marks = 0  # points that were asked for
        self._wait_next: list[Load] = []
        self._started = self._awaited = 0

    # -- the stream's side

    def start(self, layer: int, slot: int, after: int | None) -> Load:
        self.run_some()
        number = self._started
        self._started += 1
        there = [x for x in self.loads if x.slot == slot and not x.dropped]
        assert not there, f"slot {slot} is loaded while it still holds a load of {there[0].layer}"
        twins = [x for x in self.loads if x.layer == layer and not x.dropped]
        assert not twins, f"layer {layer} is loaded into slot {slot}, it is in {twins[0].slot} too"
        if number in self.fail_starts:
            raise LoadFailed(f"start {number}")
        earlier = [x for x in self.loads if x.slot == slot and not x.over]
        load = Load(layer, slot, after or 0, earlier)
        if number in self.fail_loads:
            load.fails_at = self.chance.randrange(1, LOAD_STEPS)
        self.loads.append(load)
        self.log.append(layer)
        self.run_some()
        return load

    def finish(self, load: Load) -> None:
        assert not load.dropped, "a dropped load is waited for"
        self.run_some()
        self._awaited += 1
        if self._awaited - 1 in self.interrupts:
            raise KeyboardInterrupt
        if load.fails_at is not None:
            while not load.over:  # the host waits for it
                self._advance(load)
            raise LoadFailed(f"layer {load.layer}")
        load.awaited = True
        self._wait_next.append(load)

    def drop(self, load: Load) -> None:
        assert not load.dropped, "a load is dropped twice"
        self.run_some()
        load.dropped = True
        load.cancelled = self.reads_files and not load.awaited and not load.over
        self.run_some()

    def mark(self) -> int:
        self.marks += 1
        return self.issued

    # -- the computation

    def launch(self, slot: int, layer: int) -> None:
        """A kernel that must find exactly `layer` in `slot`."""
        for half in range(KERNEL_STEPS):
            self.kernels.append(KernelStep(slot, half, layer, self._wait_next))
            self._wait_next = []
            self.issued += 1
        self.run_some()

    # -- time

    def run_some(self) -> None:
        """Let some of what may run, run."""
        while self.chance.random() > self.laziness and self._step():
            pass

    def run_all(self) -> None:
        while self._step():
            pass
        assert not self.kernels, "a kernel waits for ever"
        stuck = [x for x in self.loads if not x.over]
        assert not stuck, f"a load waits for ever: {stuck}"

    def present(self) -> set[int]:
        """Layers that are loaded or on the way."""
        return {x.layer for x in self.loads if not x.dropped}

    def _step(self) -> bool:
        """Run one step of the loads and the kernel at hand, chosen by chance; False: none may."""
        able: list[Load | None] = [x for x in self.loads if self._may_write(x)]
        if self.kernels and all(x.over for x in self.kernels[0].wait_for):
            able.append(None)
        if not able:
            self.loads = [x for x in self.loads if not (x.over and x.dropped)]
            return False
        chosen = self.chance.choice(able)
        if chosen is None:
            self._compute(self.kernels.popleft())
        else:
            self._write(chosen)
        return True

    def _may_write(self, load: Load) -> bool:
        return not load.over and self.done >= load.after and all(x.over for x in load.before)

    def _write(self, load: Load) -> None:
        if load.steps == 0:
            self.contents[load.slot][:] = [POISON, POISON]
        else:
            self.contents[load.slot][load.steps - 1] = load.layer
        load.steps += 1

    def _compute(self, step: KernelStep) -> None:
        found = self.contents[step.slot][step.half]
        assert found == step.layer, f"a kernel of layer {step.layer} read {found}"
        self.done += 1

    def _advance(self, load: Load) -> None:
        """One step of `load`, after what must run before it."""
        if self._may_write(load):
            self._write(load)
        elif not self._step():
            raise AssertionError(f"a load waits for ever: {load}")
