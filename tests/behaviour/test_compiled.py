"""torch.compile of an offloaded model: the same answers, and nothing of the stream is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import variants

import offload

Folder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """What the model is asked, where it computes."""
    return {k: v.to(model.device) for k, v in variants.inputs("llama").items()}


@pytest.mark.compat
@pytest.mark.parametrize("engine", ["transformers", "fused"])
@pytest.mark.parametrize("place", ["auto", "cpu", "nvme"])
def test_answers_are_those_of_the_model_as_it_is(
    variant_folder: Folder, engine: Any, place: Any
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with (
        offload.run(variant_folder("llama"), device_map=place, engine=engine) as model,
        torch.no_grad(),
    ):
        given = inputs(model)
        ask = {**given, "max_new_tokens": 4, "do_sample": False}
        want, said = model(**given).logits, model.generate(**ask)
        compiled: Any = torch.compile(model, backend=backend)
        assert torch.equal(compiled(**given).logits, want)
        model.compile(backend=backend)
        assert torch.equal(model(**given).logits, want)
        assert torch.equal(model.generate(**ask), said)
        assert not model.offload.report().unserved
    assert not graphs


def test_a_function_that_calls_it_breaks_there(variant_folder: Folder) -> None:
    with offload.run(variant_folder("llama"), device_map="cpu") as model, torch.no_grad():
        given = inputs(model)

        def doubled() -> torch.Tensor:
            return 2 * model(**given).logits

        assert torch.equal(torch.compile(doubled, backend="eager")(), doubled())
        torch._dynamo.reset()
        whole = torch.compile(doubled, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="an offloaded model runs as it is"):
            whole()
