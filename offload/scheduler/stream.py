"""The stream: which layer's bytes go into which slot, and when.

A ring of slots on the compute device holds the layers in use and those that come next. The order of
layers is learnt from the passes themselves and is a hint only: a layer out of order is a plain
load.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from offload.errors import OffloadError


class Listener(Protocol):
    """Who is told what computation waits for and when it works: a trace."""

    def waits(self, layer: int) -> None: ...
    def computes(self, layer: int) -> None: ...
    def computed(self, layer: int) -> None: ...


class Link(Protocol):
    """What moves the bytes. Loads into one slot are started only after the one before it was
    finished or dropped.
    """

    def start(self, layer: int, slot: int, after: Any) -> Any:
        """Begin to bring `layer` into `slot`, not before the point `after` (None: at once); return
        the load.
        """

    def finish(self, load: Any) -> None:
        """Make what is computed from now on wait for the load; raise what made it fail."""

    def drop(self, load: Any) -> None:
        """Give up a load that nobody waits for; on return nothing of it is written any more."""

    def mark(self) -> Any:
        """The point in the computation after all that was issued so far."""


class Meeting(Protocol):
    """Where passes that run in lock step wait for each other."""

    def wait(self, site: int | None) -> None:
        """Return when it is the turn of the layer of `site`; None: of the next pass."""

    def shared(self, site: int) -> bool:
        """Whether others are still to use the layer of `site` in its turn; a guess will do."""

    def rest(self, site: int) -> None:
        """The layer of `site` was used."""


_WHEN_LOADED = object()  # stands for a point that is to be marked when it is needed


@dataclass(slots=True)
class _Slot:
    layer: int | None = None
    load: Any = None
    users: int = 0
    last_use: int = 0
    free_after: Any = None


@dataclass(slots=True)
class StreamStats:
    """Counts since the stream was made."""

    loads: list[int] = field(default_factory=list)  # per layer
    hits: int = 0  # acquired while already loading or loaded
    misses: int = 0  # acquired with nothing on the way


class Stream:
    """Serves layers to one pass at a time.

    `sites` is the order in which layers are expected to run, one entry a place of use: a tied
    embedding that serves as head too is two sites of one layer. `depth` loads are kept ahead of the
    layer in use; that takes depth + 1 slots. While none is in use, as resident layers are computed,
    that layer's own slot takes one load more, if it is sure what comes next. Not thread-safe:
    whoever owns the pass calls it.
    """

    def __init__(self, link: Link, slots: int, sites: Sequence[int], depth: int) -> None:
        layers = len(set(sites))
        if slots < 1 or depth < 0:
            raise ValueError(f"a stream needs at least 1 slot and depth >= 0, got {slots}, {depth}")
        self._link = link
        self._slots = [_Slot() for _ in range(slots)]
        self._sites = list(sites)
        self._next = [(i + 1) % len(sites) for i in range(len(sites))]
        self._sure = [False] * len(sites)  # that what comes next is so: it came true last time
        self._again: set[int] = set()  # sites that were used several times in a row
        self._shared = False  # in lock step: the layer used last is left to others
        self._settled: int | None = None  # site whose loads ahead are all there or on their way
        self._depth = min(depth, slots - 1)
        self._where: dict[int, int] = {}
        self._site: int | None = None
        self._clock = 0
        self._pid = os.getpid()
        # Asked before a site is acquired and after it was released, unless a slot is in use.
        self.meeting: Meeting | None = None
        self.trace: Listener | None = None
        self.stats = StreamStats(loads=[0] * (max(sites) + 1 if layers else 0))

    @property
    def depth(self) -> int:
        """How many loads are kept ahead of the layer in use."""
        return self._depth

    def acquire(self, site: int) -> int:
        """The slot that holds the layer of `site`, ready for what is computed next. Pair with
        `release`.
        """
        if os.getpid() != self._pid:
            raise OffloadError(
                "this process was forked from the one that loaded the model, and its threads and "
                "pinned memory did "
                "not come along; call offload.run in the child, or start it with the 'spawn' method"
            )
        if self.meeting is not None and not self._in_use():
            self.meeting.wait(site)
        self._learn(site)
        layer, trace = self._sites[site], self.trace
        if trace is not None:
            trace.waits(layer)
        index = self._where.get(layer)
        if index is None:
            self.stats.misses += 1
            index = self._load(layer, wanted=())
        else:
            self.stats.hits += 1
        slot = self._slots[index]
        slot.users += 1
        self._clock += 1
        slot.last_use = self._clock
        try:
            # What comes next is started first: waiting may block the caller, and the link must not
            # idle meanwhile.
            self._prefetch(keep=True)
            self._link.finish(slot.load)
            if trace is not None:
                trace.computes(layer)
        except BaseException:
            slot.users -= 1
            if slot.users == 0:
                self._forget(index)
            raise
        return index

    def release(self, site: int) -> None:
        """The layer of `site` was used by what has been issued so far; its slot may be loaded anew
        after that.
        """
        index = self._where.get(self._sites[site])
        if index is None:
            return
        slot = self._slots[index]
        # In lock step the last user's point will do for all.
        shared = self._shared = self.meeting is not None and self.meeting.shared(site)
        # The point comes first: Ctrl-C between the two must not free a slot that is still read.
        slot.free_after = _WHEN_LOADED if shared else self._link.mark()
        slot.users = max(0, slot.users - 1)
        if self.trace is not None:
            self.trace.computed(self._sites[site])
        idle = slot.users == 0 and not self._in_use()
        if slot.users == 0:
            # What cannot be started here is tried again, and fails, where it is needed.
            with contextlib.suppress(Exception):
                self._prefetch(keep=not (idle and self._done_with(site)))
        if self.meeting is not None and idle:
            self.meeting.rest(site)

    def end_pass(self) -> None:
        """Nobody uses a slot any more, also after an exception in the middle of a pass."""
        for slot in self._slots:
            if slot.users or slot.free_after is _WHEN_LOADED:
                slot.free_after = self._link.mark()
                slot.users = 0

    def clear(self) -> None:
        """Drop every load and forget what the slots hold."""
        self.end_pass()
        for index in range(len(self._slots)):
            self._forget(index)

    def _in_use(self) -> bool:
        return any(slot.users for slot in self._slots)

    def _done_with(self, site: int) -> bool:
        """Whether it is sure that another layer comes next, where none is in use."""
        sure = self._sure[site] and site not in self._again
        return sure and site == self._site and not self._shared

    def _learn(self, site: int) -> None:
        before, self._site = self._site, site
        # Not by others in lock step, nor by micro-batches that take turns.
        if before == site and not (self._shared or self._in_use()):
            self._again.add(site)
        if before is None or before == site:
            return
        self._settled = None
        if self._next[before] == site:
            self._sure[before] = True
        elif self._sure[before]:  # once may be an exception, such as a new prompt's encoder
            self._sure[before] = False
        else:
            self._next[before] = site

    def _prefetch(self, *, keep: bool) -> None:
        """Start what comes next; `keep`: not in place of the layer that was acquired last."""
        site = first = self._site
        if site is None or (keep and site == self._settled):
            return
        wanted = [self._sites[site]] if keep else []
        for _ in self._sites:  # a layer of several sites takes one place, not several
            if len(wanted) > self._depth:
                break
            site = self._next[site]
            layer = self._sites[site]
            if layer not in wanted:
                wanted.append(layer)
        for layer in wanted[1:] if keep else wanted:
            if layer not in self._where and self._free_slot(wanted) is not None:
                self._load(layer, wanted)
        if keep and all(layer in self._where for layer in wanted):
            self._settled = first

    def _free_slot(self, wanted: Sequence[int]) -> int | None:
        """The slot used longest ago, of those that nobody uses or will use soon."""
        free = [i for i, s in enumerate(self._slots) if s.users == 0 and s.layer not in wanted]
        return min(free, key=lambda i: self._slots[i].last_use, default=None)

    def _load(self, layer: int, wanted: Sequence[int]) -> int:
        index = self._free_slot(wanted)
        if index is None:
            raise OffloadError(
                f"all {len(self._slots)} slots are in use at once and layer {layer} is asked for: "
                "give the stream more slots (raise prefetch, or the memory budget of the compute "
                "device)"
            )
        slot = self._slots[index]
        self._forget(index)
        if slot.free_after is _WHEN_LOADED:
            slot.free_after = self._link.mark()
        slot.load = self._link.start(layer, index, slot.free_after)
        slot.layer = layer
        slot.last_use = self._clock
        self._where[layer] = index
        self.stats.loads[layer] += 1
        return index

    def _forget(self, index: int) -> None:
        slot = self._slots[index]
        if slot.layer is not None:
            # First of all: a load that Ctrl-C keeps from being dropped must not be found again.
            del self._where[slot.layer]
            slot.layer = self._settled = None
        if slot.load is not None:
            self._link.drop(slot.load)
            slot.load = None
