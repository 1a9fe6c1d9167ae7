"""`offload bench kernels --op large_gemm`: the right products, and ways that all compute them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from offload.bench.kernels import large_gemm
from offload.bench.kernels.large_gemm import Product, named, products
from offload.cli import main
from offload.kernels import cublas_product
from offload.kernels.cublas_product import WHOLE, ways

CPU = torch.device("cpu")


def test_the_products_of_a_block() -> None:
    llama = list(products("llama-2-13b", 32768))
    assert llama == [
        ("qkv", 32768, 5120, 15360),
        ("out", 32768, 5120, 5120),
        ("mlp in", 8192, 5120, 27648),
        ("mlp out", 8192, 13824, 5120),
    ]
    assert ("qkv", 32768, 8192, 10240) in products("llama-2-70b", 32768)
    assert ("mlp in", 4000, 5120, 20480) in products("opt-13b", 4000)


def test_all_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_product, "LEAST_PIECE", 16)
    monkeypatch.setattr(cublas_product, "GRAIN", 8)
    product = Product(70, 24, 99, CPU)
    names = [named(way) for way in ways(70, 99)]
    assert names[:3] == ["whole", "2 of rows", "4 of rows"] and "6 of columns" in names
    product.run(WHOLE)(0)
    x, w, out = product.operands
    expected = (x.float() @ w.float()).half()
    for way in (None, *ways(70, 99)):
        out.fill_(math.nan)
        product.run(way)(0)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


def test_nothing_is_made_for_what_is_not_wanted() -> None:
    for case in large_gemm.cases(CPU, True):
        product = case.ours.__closure__[2].cell_contents  # type: ignore[attr-defined]
        assert isinstance(product, Product) and "operands" not in vars(product)


def test_the_command_on_a_cpu(capsys: Any) -> None:
    arguments = ["bench", "kernels", "--device", "cpu", "--quick", "--op", "large_gemm", "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["way"] for row in rows] == ["ours", "whole"] * 4
    assert all(row["seconds"] > 0 for row in rows)
    assert {row["shape"].split(" N")[0] for row in rows} == {
        f"tiny {what}" for what in ("qkv", "out", "mlp in", "mlp out")
    }
