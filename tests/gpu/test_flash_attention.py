"""Attention within prompts by the kernel that needs no plan, against float64, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from offload.models.fused import prefill_attention
from offload.models.fused.prefill_attention import PrefillAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = (  # batch, tokens, heads, KV heads, width of a head
    (1, 17, 4, 4, 64),
    (3, 129, 8, 2, 80),
    (2, 257, 6, 1, 128),
    (1, 1, 8, 8, 128),
    (2, 65, 4, 4, 256),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_errs_no_more_than_torchs_own_choice(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, tokens, heads, kv_heads, width = shape
    generator = torch.Generator("cuda").manual_seed(1)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", generator=generator).to(dtype)

    query = some(batch, tokens, heads, width)
    # As in a cache: with columns behind the last token.
    keys, values = (some(batch, kv_heads, tokens + 7, width)[:, :, :tokens] for _ in range(2))
    layer: Any = SimpleNamespace(window=0, scale=width**-0.5, softcap=None, slopes=None)

    def errors() -> torch.Tensor:
        found = PrefillAttention(0, tokens, None)(query, keys, values, layer)
        return (found.double() - exact).abs()

    wide = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    exact = functional.scaled_dot_product_attention(
        query.double().transpose(1, 2), *wide, is_causal=True, scale=layer.scale
    )
    exact = exact.transpose(1, 2).reshape(batch, tokens, -1)
    by_flash = errors()
    monkeypatch.setattr(prefill_attention, "PLANNED_SCORES", 0)
    usual = errors()
    # Where both only round the result, to half a unit in the last place each.
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert by_flash.max() <= 2 * usual.max() + unit
