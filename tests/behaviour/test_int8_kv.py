"""Keys and values of some sequences as int8 in CPU memory: what that costs, and nothing else."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import exactness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_cache import RoundedCache
from test_kv_on_cpu import (
    LateCopies,
    engine_of,
    generate,
    prompts,
    run,
    steps_of,
)
from transformers import PreTrainedModel

import offload
from offload.errors import UnsupportedError
from offload.measure.cache import rates_file
from offload.measure.machine import this_machine
from offload.models.kv import host_columns, host_kv
from offload.models.kv.cache import layers_of
from offload.models.kv.layer import KvLayer
from offload.scheduler import kv_pieces
from offload.scheduler.hardware import Hardware

Folder = Callable[[str], Path]
# Of logits: rounding all numbers moves them by 0.002 to 0.01. What is beside it is 1e-6, but for a
# number at a tie, which sums in another order may send the other way.
MOST = 1e-3


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def model(variant_folder: Folder, request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    """CPU cores attend to what is in CPU memory, or the compute device as it comes up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_POISON", "1")
        folder, attention = variant_folder("llama"), request.param
        with run(folder, kv_dtype="int8", kv_attention=attention) as model:
            yield model


@pytest.fixture(scope="module")
def plain(variant_folder: Folder) -> PreTrainedModel:
    return comparison.plain_model(variant_folder("llama"))


@settings(max_examples=15)
@given(st.data())
def test_any_split_says_what_rounded_numbers_say(
    model: PreTrainedModel, plain: PreTrainedModel, data: st.DataObject
) -> None:
    engine = engine_of(model)
    assert engine.host_kv is not None
    batch, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 9))
    pads = data.draw(st.lists(st.integers(0, tokens - 1), min_size=batch, max_size=batch))
    on_gpu = data.draw(st.integers(0, batch))
    options: dict[str, Any] = {"max_new_tokens": data.draw(st.integers(2, 6))}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    ids = prompts(batch, tokens, data.draw(st.integers(0, 99)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.host_kv, "gpu_sequences", on_gpu)
        patch.setattr(engine, "prefill_rows", data.draw(st.sampled_from([None, 1, 2 * tokens])))
        patch.setattr(engine.host_kv, "copies", late := LateCopies(data.draw(st.booleans())))
        patch.setattr(engine, "_copies", late)
        patch.setattr(engine, "micro_batches", data.draw(st.sampled_from([1, 2])))
        patch.setattr(kv_pieces, "KV_PIECE", data.draw(st.sampled_from([1, 1 << 26])))
        got = generate(model, ids, pads, **options)
    want = generate(
        plain, ids, pads, **{exactness.name_of_cache(plain): RoundedCache(on_gpu)}, **options
    )
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        assert float((a - b).abs().max()) < MOST
    assert engine.unserved == {}


def kept(cache: Any) -> list[torch.Tensor]:
    """Keys and values of all layers, as they are read."""
    return [x.clone() for layer in layers_of(cache) for x in (layer.keys, layer.values)]


def off_by_half_a_scale(got: torch.Tensor, want: torch.Tensor, on_gpu: int = 0) -> bool:
    """Whether the last rows are rounded, and no more than that; the first ones are as they were."""
    most = want.abs().amax(-1, keepdim=True) / 254 * 1.001 + 1e-6  # that of float32 sums beside it
    most[:on_gpu] = 1e-6
    return got.shape == want.shape and bool(((got - want).abs() <= most).all())


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 99),
)
def test_a_number_is_off_by_half_a_scale(
    rows: int, heads: int, columns: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, heads, columns, width, generator=generator)
    numbers = (numbers * torch.randn(rows, heads, columns, 1, generator=generator).exp()).to(dtype)
    numbers[0, 0, 0] = 0
    found = host_columns.HostColumns.empty((rows, heads, columns + 2, width), dtype, int8=True)
    found.write(1, numbers)
    assert found.stored.nbytes + (found.scales.nbytes) == found.nbytes(found.shape, dtype, True)
    got = found.read(columns + 1)[:, :, 1:]
    assert got.dtype == dtype
    scale = numbers.double().abs().amax(-1, keepdim=True) / 127
    # Beside half a scale, a product of float32 and the rounding to the dtype.
    most = scale / 2 + numbers.double().abs() * (torch.finfo(dtype).eps + 1e-6) + 1e-30
    assert bool(((got.double() - numbers.double()).abs() <= most).all())
    order = torch.randperm(rows, generator=generator)
    moved = found.picked(order, columns + 1)
    assert torch.equal(moved.read(columns + 1)[:, :, 1:], got[order])


def test_later_turns_read_what_was_kept(
    model: PreTrainedModel, plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of many tokens and of one, over a cache that grows and is copied in between."""
    engine = engine_of(model)
    late = LateCopies()
    monkeypatch.setattr(engine.host_kv, "copies", late)
    monkeypatch.setattr(engine, "_copies", late)
    monkeypatch.setattr(engine, "prefill_rows", 1)
    name = exactness.name_of_cache(plain)
    ids = prompts(3, 316)
    for between in (lambda cache: cache, copy.deepcopy):
        got, cache, other = None, None, RoundedCache(1)
        gc.collect()  # of the caches before, which have room on the compute device
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 11), (11, 12), (12, 315), (315, 316)):
            with torch.no_grad():
                got = model(ids[:, first:last], **{name: cache})
                want = plain(ids[:, first:last], **{name: other})
            cache = between(got[name])
            assert float((got.logits[:, -1] - want.logits[:, -1]).abs().max()) < MOST
        assert {layer.rows_on_cpu for layer in layers_of(cache)} == {2}


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, None), (torch.float16, 1), (torch.bfloat16, None)]
)
def test_every_dtype_and_device(
    variant_folder: Folder,
    device: str,
    dtype: torch.dtype,
    rows: int | None,
    attention: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over one cache that grows, with one of four sequences on the GPU."""
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    folder = variant_folder("llama")
    plain = comparison.plain_model(folder, device, dtype=dtype)
    ids = prompts(4, 341).to(device)
    turns = (0, 5), (5, 6), (6, 7), (7, 40), (40, 41), (41, 340), (340, 341)
    options = {"device": device, "dtype": dtype, "kv_dtype": "int8", "kv_attention": attention}
    with run(folder, **options) as model:
        model.offload._engine.prefill_rows = rows
        name, cache, other = exactness.name_of_cache(plain), None, RoundedCache(1)
        for first, last in turns:
            with torch.no_grad():
                got = model(ids[:, first:last], **{name: cache})
                want = plain(ids[:, first:last], **{name: other})
            cache = got[name]
            difference = (got.logits[:, -1] - want.logits[:, -1]).float().abs().max()
            # Rounding all numbers moves logits by up to 0.01; of 16 bits the dtype's own does more.
            least = 1e-3 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
            assert float(difference) < least * max(1.0, float(want.logits.abs().max()))
        assert steps_of(engine_of(model))[0] == 4 and cache.layers[0].host_keys.scales is not None
        assert not model.offload.report().unserved


def test_transformers_modules_and_rows_that_move(
    model: PreTrainedModel, plain: PreTrainedModel
) -> None:
    """What is kept is read by them, and written, for half a scale; moving it changes no code."""
    name, ids = exactness.name_of_cache(plain), prompts(3, 8)
    with torch.no_grad():
        cache, exact = model(ids[:, :4])[name], plain(ids[:, :4])[name]
        first = [x for layer in exact.layers[:1] for x in (layer.keys, layer.values)]
        for got, want in zip(kept(cache)[:2], first, strict=True):  # made of the same numbers
            assert off_by_half_a_scale(got, want, on_gpu=1) and not torch.equal(got, want)
        before = kept(cache)
        cache.reorder_cache(torch.tensor([0, 2, 1]))
        assert all(torch.equal(a, b[[0, 2, 1]]) for a, b in zip(kept(cache), before, strict=True))
        cache.reorder_cache(torch.tensor([1, 0, 2]))  # up, and down
        for a, b in zip(kept(cache), before, strict=True):
            b = b[[2, 0, 1]]
            assert torch.equal(a[[0, 2]], b[[0, 2]]) and off_by_half_a_scale(a, b)
        cache.reorder_cache(torch.tensor([1, 2, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 4]))
        for a, b in zip(kept(cache), before, strict=True):
            assert off_by_half_a_scale(a, b)
        said = [
            m(ids[:, 4:6], output_hidden_states=True, **{name: c}).logits
            for m, c in ((model, cache), (plain, exact))
        ]
        assert engine_of(model).unserved
        engine_of(model).unserved.clear()
        said += [m(ids[:, 6:7], **{name: c}).logits for m, c in ((model, cache), (plain, exact))]
    assert isinstance(cache.layers[0], KvLayer) and cache.layers[0].rows_on_cpu == 2
    for got, want in zip(said[::2], said[1::2], strict=True):
        assert 0 < float((got - want).abs().max()) < 0.05 * float(want.std())


def test_half_the_memory(variant_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    alloc = host_kv.aio.alloc
    monkeypatch.setattr(
        host_kv.aio, "alloc", lambda n, **options: made.append(n) or alloc(n, **options)
    )
    with run(variant_folder("llama"), kv_dtype="int8") as model:
        model.offload.wait_loaded()
        made.clear()
        for _ in range(2):
            generate(model, prompts(4, 3), [0] * 4, max_new_tokens=20)
        config = model.config
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        assert made == [3 * 24 * 2 * heads * (width + 4)] * config.num_hidden_layers
        assert "are int8, with a scale a token and head" in str(model.offload.report())


def test_a_goal_plans_with_them(
    variant_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the plan has sequences in CPU memory they are int8, and as many bytes as it says."""
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    folder, job = variant_folder("llama"), {"goal": "fits", "prompt_len": 12, "gen_len": 4}
    file = rates_file(None, torch.device("cpu"))
    file.parent.mkdir(parents=True)
    machine = this_machine(tmp_path, torch.device("cpu"))
    rates: dict[str, Any] = {
        "matrix": {"float32": ((1, 1e9),)},
        "cpu_attention": {"float32": ((1, 1e9),)},
    }
    rates |= dict.fromkeys(("link_up", "link_down", "hbm"), 1e9)
    file.write_text(json.dumps(Hardware(machine=machine, **rates).as_dict()))
    taken = []
    for options in ({}, {"kv_dtype": "int8"}):
        common = {"device": "cpu", "dtype": torch.float32, "engine": "fused", "batch_size": 3}
        with offload.run(folder, **common, **job, **options) as model:
            how = model.offload.planned.choice
            assert how.setting.cpu_sequences == 3
            generate(model, prompts(3, 12), [0] * 3, max_new_tokens=4)
            assert engine_of(model).host_kv.int8 == bool(options)
            blocks = engine_of(model).host_kv
            taken.append((how.memory.kv_cpu, blocks._row_bytes * 3))
            layers = len(model.model.layers)
    for planned, row in taken:
        assert row * layers == planned
    assert taken[1][0] < 0.4 * taken[0][0]  # of float32
    with pytest.raises(UnsupportedError, match="kv_dtype='int8' takes the fused engine"):
        offload.run(folder, **{**common, "engine": "transformers"}, **job, kv_dtype="int8")


def test_what_cannot_be_is_refused(variant_folder: Folder) -> None:
    folder = variant_folder("llama")
    with pytest.raises(ValueError, match=r"kv_dtype must be one of .*'fp8'"):
        run(folder, kv_dtype="fp8")
    with pytest.raises(ValueError, match="kv_dtype='int8' is for keys and values in CPU memory"):
        offload.run(folder, kv_dtype="int8")
