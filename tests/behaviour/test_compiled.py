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

    given = variants.inputs("llama")
    ask = {**given, "max_new_tokens": 4, "do_sample": False}
    with (
        offload.run(variant_folder("llama"), device_map=place, engine=engine) as model,
        torch.no_grad(),
    ):
        want, said = model(**given).logits, model.generate(**ask)
        compiled: Any = torch.compile(model, backend=backend)
        assert torch.equal(compiled(**given).logits, want)
        model.compile(backend=backend)
        assert torch.equal(model(**given).logits, want)
        assert torch.equal(model.generate(**ask), said)
        assert not model.offload.report().unserved
    assert not graphs


def test_a_function_that_calls_it_breaks_there(variant_folder: Folder) -> None:
    given = variants.inputs("llama")
    with offload.run(variant_folder("llama"), device_map="cpu") as model, torch.no_grad():

        def doubled() -> torch.Tensor:
            return 2 * model(**given).logits

        assert torch.equal(torch.compile(doubled, backend="eager")(), doubled())
        torch._dynamo.reset()
        whole = torch.compile(doubled, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="an offloaded model runs as it is"):
            whole()
