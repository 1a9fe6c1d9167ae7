"""Calls in lock step on a GPU: tokens and logits of each alone, graphs and streams kept apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import check_lockstep
import pytest
import torch
import variants

import offload
from offload.errors import JobError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("engine", check_lockstep.ENGINES)
@pytest.mark.parametrize("place", check_lockstep.PLACES)
def test_each_says_what_it_says_alone(
    variant_folder: Callable[[str], Path],
    place: str,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    assert check_lockstep.wrong(variant_folder("llama"), place, engine, "cuda") == []


def test_a_stream_of_ones_own_is_refused(variant_folder: Callable[[str], Path]) -> None:
    """Slots are freed by what was issued on the stream of all."""
    arguments = {k: v.cuda() for k, v in variants.inputs("llama").items()}

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            model(**arguments)

    with offload.run(variant_folder("llama"), device_map="cpu", prefetch=1) as model:
        with pytest.raises(JobError, match="a CUDA stream"):
            model.offload.together([elsewhere])
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # around all it is theirs
            first, second = model.offload.together([lambda: model(**arguments).logits] * 2)
        torch.cuda.synchronize()
        assert torch.equal(first, second)
