"""A norm in a decode step is given the statistics of the rows that it reads, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import comparison
import pytest
import torch

import offload
from offload.bench.kernels.gemm import statistics_of
from offload.kernels.linear import Linear
from offload.models import decode

PARTS, STEPS = 3, 4


class Checked(Linear):
    """Leaves statistics where it is asked to, as on a GPU, and looks at those it is given."""

    given: ClassVar[int] = 0

    def __init__(self, *args: Any, keep_statistics: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        if keep_statistics:
            self.statistics = torch.full((self._arguments.rows, PARTS, 2), torch.nan)

    def launch(self, stream: int = 0) -> None:
        asked = self._arguments
        if asked.statistics is not None:
            Checked.given += 1
            assert torch.equal(asked.statistics, statistics_of(asked.input, PARTS))
        super().launch(stream)
        if self.statistics is not None:
            self.statistics.copy_(statistics_of(asked.out, PARTS))


@pytest.mark.parametrize(
    ("variant", "place", "norms"),
    [
        ("llama", {"": 0}, lambda layers: 2 * layers - 1),  # all but the first
        ("llama", "cpu", lambda layers: layers),  # a streamed layer knows none of what came in
        ("gptj", {"": 0}, lambda layers: 2 * (layers - 1)),  # both branches read what came in
        ("gemma2", {"": 0}, lambda layers: 0),  # norms behind the branches, by another kernel
        ("opt", {"": 0}, lambda layers: 2 * layers - 1),
    ],
)
def test_each_norm_has_its_rows_statistics(
    variant: str,
    place: Any,
    norms: Callable[[int], int],
    variant_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "Linear", Checked)
    monkeypatch.setattr(Checked, "given", 0)
    folder = variant_folder(variant)
    plain = comparison.plain_model(folder)
    prompt = comparison.left_padded(variant)
    options = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1, "do_sample": False}
    with offload.run(folder, device_map=place, engine="fused") as model:
        found = model.generate(**prompt, **options)
    assert torch.equal(found, plain.generate(**prompt, **options))
    layers = plain.config.get_text_config().num_hidden_layers
    assert Checked.given == STEPS * norms(layers)
