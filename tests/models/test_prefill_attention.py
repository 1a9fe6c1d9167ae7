"""Attention of a prompt against scores written out in float64, for everything a layer may ask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels.qkv import QkvLayout
from offload.models.fused import prefill_attention
from offload.models.fused.padding import Padding
from offload.models.fused.prefill_attention import PrefillAttention
from offload.models.specs.spec import LayerSpec, LinearSpec


def layer(heads: int, kv_heads: int, head_dim: int) -> LayerSpec:
    one = LinearSpec(("w",))
    layout = QkvLayout.apart(heads, kv_heads, head_dim)
    return LayerSpec(one, layout, one, one, one, "relu", scale=head_dim**-0.5)


def written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: LayerSpec,
    past: int,
    start: list[int],
    end: list[int],
) -> torch.Tensor:
    """In the tensors' own dtype; rows that see nothing are NaN."""
    group = query.shape[2] // keys.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = query.transpose(1, 2) @ k.mT * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    column = torch.arange(k.shape[2])
    if spec.slopes is not None:
        scores = scores + torch.tensor(spec.slopes, dtype=scores.dtype)[:, None, None] * column
    own = past + torch.arange(query.shape[1])[:, None]
    seen = (column <= own)[None] & (column >= torch.tensor(start)[:, None, None])
    seen = seen & (column < torch.tensor(end)[:, None, None])
    if spec.window:
        seen = seen & (column > own - spec.window)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    head_dim=st.sampled_from([2, 5, 8]),
    past=st.integers(0, 9),
    tokens=st.integers(1, 70),
    window=st.sampled_from([0, 0, 1, 7, 40, 500]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    alibi=st.booleans(),
    padded=st.booleans(),
    pieces=st.sampled_from([1, 4000, 1 << 26]),
    seed=st.integers(0, 99),
)
def test_against_scores_in_float64(
    batch: int,
    heads: tuple[int, int],
    head_dim: int,
    past: int,
    tokens: int,
    window: int,
    softcap: float,
    alibi: bool,
    padded: bool,
    pieces: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spec = dataclasses.replace(layer(*heads, head_dim), window=window, softcap=softcap)
    if alibi:
        spec = dataclasses.replace(spec, slopes=tuple(0.5**i for i in range(heads[0])))
    end = past + tokens
    query = torch.randn(batch, tokens, heads[0], head_dim, generator=generator)
    buffers = torch.randn(2, batch, heads[1], end + 3, head_dim, generator=generator)
    buffers[:, :, :, end:] = float("nan")
    keys, values = buffers[:, :, :, :end]
    start, stop = [0] * batch, [end] * batch
    if padded:
        start = torch.randint(0, end, (batch,), generator=generator).tolist()
        stop = [a + int(torch.randint(1, end - a + 1, (), generator=generator)) for a in start]
    rows = (torch.tensor(x, dtype=torch.int32) for x in (start, stop))
    padding = Padding(*rows, at_end=True) if padded else None
    exact = written_out(*(x.double() for x in (query, keys, values)), spec, past, start, stop)
    plain = written_out(query, keys, values, spec, past, start, stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention, "MASK_ELEMENTS", pieces)
        patch.setattr(prefill_attention, "MIN_ROWS", 1)
        patch.setattr(prefill_attention, "KEPT_ELEMENTS", pieces)
        attention = PrefillAttention(past, tokens, padding)
        got = attention(query, keys, values, spec)
        assert torch.equal(attention(query, keys, values, spec), got)  # with masks made before
    assert got.shape == (batch, tokens, heads[0] * head_dim) and got.is_contiguous()
    assert got.isfinite().all()  # padded queries too: what they leave is multiplied by zero later
    real = ~exact.isnan().any(-1)  # a query that sees nothing is nobody's
    own = float((plain.double() - exact)[real].abs().max()) if real.any() else 0.0
    error = float((got.double() - exact)[real].abs().max()) if real.any() else 0.0
    assert error <= 2 * own + 4 * torch.finfo(torch.float32).eps * float(values.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_in_half_precision(dtype: torch.dtype, softcap: float) -> None:
    torch.manual_seed(0)
    spec = dataclasses.replace(layer(4, 2, 8), softcap=softcap)
    query = torch.randn(2, 33, 4, 8).to(dtype)
    keys, values = torch.randn(2, 2, 2, 33, 8).to(dtype)
    exact = written_out(*(x.double() for x in (query, keys, values)), spec, 0, [0, 0], [33, 33])
    plain = written_out(query, keys, values, spec, 0, [0, 0], [33, 33])
    got = PrefillAttention(0, 33, None)(query, keys, values, spec)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()
