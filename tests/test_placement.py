"""How many tokens of prompts stand at once: as many as leave room for the loads ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import placement
from offload.errors import BudgetError

GPU = torch.device("cuda", 0)


def filled(
    monkeypatch: pytest.MonkeyPatch,
    depths: dict[int | None, int],
    kv_on_cpu: int = 0,
    compute: torch.device = GPU,
    spec: Any = "a spec",
) -> tuple[int, int | None, list[int | None]]:
    """Depth and rows chosen, and the rows tried, where `depths` of 2 fit by rows; 0: nothing."""
    tried: list[int | None] = []

    def reserve(network: Any, given: Any, config: Any, rows: int | None) -> int | None:
        assert given is spec
        tried.append(rows)
        return rows

    def plan(parts: Any, config: Any, rows: int | None, kv_cpu_bytes: int, io: Any) -> Any:
        depth = depths.get(rows, 2)
        if not depth:
            raise BudgetError(f"{rows} do not fit")
        return SimpleNamespace(depth=depth, notes=() if depth == 2 else ("lowered",))

    monkeypatch.setattr(placement, "_reserve", reserve)
    monkeypatch.setattr(placement, "_plan", plan)
    config: Any = SimpleNamespace(kv_on_cpu=kv_on_cpu, compute=compute)
    found, rows = placement._filled(None, None, spec, 0, config, {})  # type: ignore[arg-type]
    return found.depth, rows, tried


@pytest.mark.parametrize(
    ("depths", "depth", "rows"),
    [
        ({}, 2, None),
        ({None: 1}, 2, 8192),
        ({None: 0, 8192: 1, 4096: 1}, 2, 2048),
        ({None: 0, 8192: 0, 4096: 1, 2048: 1, 1024: 1}, 1, 4096),  # the most of those alike
    ],
)
def test_fewer_rows_before_fewer_loads_ahead(
    monkeypatch: pytest.MonkeyPatch, depths: dict[int | None, int], depth: int, rows: int | None
) -> None:
    assert filled(monkeypatch, depths)[:2] == (depth, rows)


def test_what_fits_in_no_way_is_refused_by_its_least(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = dict.fromkeys((None, *placement.PREFILL_ROWS), 0)
    with pytest.raises(BudgetError, match="1024 do not fit"):
        filled(monkeypatch, depths)


def test_who_has_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in CPU memory pass through stages of a chunk; modules of transformers know none, and
    where the CPU computes only weights are counted.
    """
    assert filled(monkeypatch, {}, kv_on_cpu=3)[1] == 8192
    assert filled(monkeypatch, {None: 1}, spec=None) == (1, None, [None])
    assert filled(monkeypatch, {}, 3, torch.device("cpu")) == (2, None, [None])
