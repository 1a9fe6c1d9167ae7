"""Issues the layers of decode steps: runs of resident ones as graphs, streamed ones call by call,
two micro-batches in turns.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import zip_longest

import torch

from offload.models.fused.around import Ahead
from offload.models.fused.decode import DecodeSession
from offload.models.fused.decode_graph import LaunchGraph
from offload.models.fused.decoder_layers import DecoderLayers
from offload.models.fused.micro_batch import MicroBatch
from offload.models.hooked import PassOwner

_FIRST = 0, True  # the first of a session's stretches, with the entry in it


class StepIssuer:
    """Issues steps of any session over the layers of one model: first `enter`, which may come ahead
    of what a step waits for, then `rest`.
    """

    def __init__(self, layers: DecoderLayers, owner: PassOwner, device: torch.device) -> None:
        self._layers = layers
        self._owner = owner
        self._device = device
        self.graph_problem: str | None = None  # why there are none, where they were tried

    def begins_with_graph(self, session: DecodeSession) -> bool:
        """Whether `enter` replays a graph, which runs no module and reads memory that stays."""
        return _FIRST in session.graphs

    def has_begun(self, session: DecodeSession) -> bool:
        """Whether the beginning of a step was issued before, and will not be captured now: what is
        captured must have been checked.
        """
        if self._layers.layers[0].streamed:
            return True
        return _FIRST in session.issued and not self._can_capture()

    def enter(
        self,
        session: DecodeSession,
        ahead: Ahead,
        past: int,
        embeddings: torch.Tensor | None = None,
    ) -> None:
        """Issue what lies ahead of the layers, and the first stretch where that is resident."""
        stretch = not (self._layers.layers[0].streamed or self._in_turns(session))
        together = ahead.repeatable and embeddings is None and stretch
        if not together:
            session.entry.run(ahead, embeddings)
        if stretch:
            self._issue(session, *self._layers.stretches[0], ahead if together else None)
        session.entry.passed(past)

    def rest(self, session: DecodeSession) -> None:
        """Issue the layers that `enter` left."""
        if self._in_turns(session):
            self._issue_in_turns(session)
            return
        begun = 0 if self._layers.layers[0].streamed else 1
        for first, last in self._layers.stretches[begun:]:
            self._issue(session, first, last)

    def launch(
        self, session: DecodeSession, first: int, last: int, ahead: Ahead | None = None
    ) -> None:
        """Issue the layers first to last call by call, behind what lies `ahead` where that is
        given.
        """
        if ahead is not None:
            session.entry.run(ahead)
        for index in range(first, last + 1):
            with self._layers.layers[index].in_place(self._owner.stream) as (slot, weights):
                session.launch(index, slot, weights)

    def _issue(
        self, session: DecodeSession, first: int, last: int, ahead: Ahead | None = None
    ) -> None:
        """Issue a stretch: of resident layers the first time call by call, then as a graph."""
        with self._layers.told(self._owner.trace, first, last):
            self._issue_stretch(session, first, last, ahead)

    def _issue_stretch(
        self, session: DecodeSession, first: int, last: int, ahead: Ahead | None
    ) -> None:
        key = first, ahead is not None
        graph = session.graphs.get(key)
        if graph is None and key in session.issued and self._can_capture():
            try:
                graph = LaunchGraph(lambda: self.launch(session, first, last, ahead), self._device)
                session.graphs[key] = graph
            except RuntimeError as error:
                if ahead is not None:
                    ahead.repeatable = False  # and without it next time
                else:
                    self.graph_problem = f"CUDA graphs are not used: {error}"
        if graph is not None:
            graph.replay()
            return
        self.launch(session, first, last, ahead)
        if not self._layers.layers[first].streamed and session.repeatable:
            session.issued.add(key)

    def _can_capture(self) -> bool:
        return self._device.type == "cuda" and self.graph_problem is None

    def _in_turns(self, session: DecodeSession) -> bool:
        """Whether the session's micro-batches take turns. In lock step a layer is used by one
        session after another, and no two layers at once.
        """
        return len(session.micro_batches) > 1 and self._owner.lockstep is None

    def _issue_in_turns(self, session: DecodeSession) -> None:
        """Issue all layers so that CPU cores always have work: while they attend for one
        micro-batch, the compute device finishes a layer for the other and begins the next.
        """
        turns = [self._layer_by_layer(micro_batch) for micro_batch in session.micro_batches]
        try:
            for _ in zip_longest(*turns):
                pass
        finally:
            for turn in turns:
                turn.close()

    def _layer_by_layer(self, micro_batch: MicroBatch) -> Generator[None, None, None]:
        """Issues all layers for the rows of a micro-batch. It is the others' turn where the host
        would wait for CPU cores; a layer and the one behind it may be in place at once.
        """
        owner, told = self._owner, self._layers.told
        for index, layer in enumerate(self._layers.layers):
            with told(owner.trace, index, index), layer.in_place(owner.stream) as (slot, weights):
                micro_batch.begin(index, slot, weights)
                yield
                micro_batch.finish()
