"""What a forward that waits will not read again is let go of, and nothing else."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload.models.lockstep import spent

pytestmark = pytest.mark.skipif(
    not (3, 11) <= sys.version_info < (3, 14), reason="nothing is let go of in this Python"
)


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "LEAST_BYTES", 1)


class Watch:
    """Tensors by name, and which of them are left at each wait."""

    def __init__(self) -> None:
        self.made: dict[str, weakref.ref[torch.Tensor]] = {}
        self.left: list[set[str]] = []
        self.looked_at: set[Any] = set()

    def make(self, name: str) -> torch.Tensor:
        tensor = torch.ones(3)
        self.made[name] = weakref.ref(tensor)
        return tensor

    def wait(self, *_: Any) -> torch.Tensor:
        spent.let_forwards_go(sys._getframe(1), self.looked_at)
        self.left.append({name for name, ref in self.made.items() if ref() is not None})
        return torch.ones(3)


def loop(watch: Watch) -> Callable[..., Any]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        embedded = watch.make("embedded")
        places = watch.make("places")
        later = watch.make("later")
        hidden = embedded + places
        for _ in range(2):
            hidden = hidden + watch.wait(hidden)
        return hidden + later + given

    return forward


def branches(watch: Watch) -> Callable[..., Any]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        first, second, third = watch.make("first"), watch.make("second"), watch.make("third")
        out = watch.wait() if len(watch.left) < 5 else third
        while len(watch.left) < 2:
            out = out + watch.wait() + (second if len(watch.left) > 5 else given)
        return out + first if given is None else out

    return forward


def handlers(watch: Watch) -> Callable[..., Any]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        kept, closing = watch.make("kept"), watch.make("closing")
        spare = watch.make("spare")
        out = spare + given
        try:
            with torch.no_grad():
                out = watch.wait() + given
                raise ValueError
        except ValueError:
            out = kept + given
        finally:
            out = out + closing
        return out

    return forward


def closures(watch: Watch) -> Callable[..., Any]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        held = watch.make("held")
        gone = watch.make("gone")
        also = [x + gone for x in (given,)]
        add = lambda x: x + held  # noqa: E731
        del gone
        return add(watch.wait()) + also[0]

    return forward


def looks_at_all(watch: Watch) -> Callable[..., Any]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        named = watch.make("named")
        out = watch.wait()
        return out + sum(x for k, x in locals().items() if k == "named")

    return forward


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (loop, [{"later"}] * 2),
        (branches, [{"first", "second"}] * 2),
        (handlers, [{"kept", "closing"}]),
        (closures, [{"held"}]),
        (looks_at_all, [{"named"}]),
    ],
)
def test_what_is_not_read_again_goes(
    make: Callable[[Watch], Callable[..., Any]], left: list[set[str]], monkeypatch: Any
) -> None:
    watch = Watch()
    got = make(watch)(torch.ones(3))
    assert watch.left == left
    monkeypatch.setattr(spent, "let_go", lambda frame: None)
    assert torch.equal(got, make(Watch())(torch.ones(3)))


def test_small_tensors_and_other_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "LEAST_BYTES", 13)
    watch = Watch()
    loop(watch)(torch.ones(3))
    assert watch.left == [{"embedded", "places", "later"}] * 2


def test_forwards_are_looked_at_once_where_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(spent, "let_go", lambda frame: seen.append(frame.f_locals["name"]))
    looked_at: set[Any] = set()

    def wait() -> None:
        spent.let_forwards_go(sys._getframe(), looked_at)

    def call(then: Callable[[], None]) -> None:
        then()

    def inner(name: str) -> Callable[[], None]:
        def forward() -> None:
            _ = name
            for _ in range(2):
                wait()

        return forward

    def forward(name: str) -> None:
        for _ in range(2):
            call(wait)
        call(inner("inner"))
        wait()

    wait()
    assert seen == []
    call(lambda: forward("outer"))
    assert seen == ["outer", "inner", "outer", "outer"]
