"""Quantised weights under the fused engine: as exact as the plain model whose weights are what the
stored ones stand for, and the same tokens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import published
import pytest
import torch
import variants
from torch import nn

import offload
from offload.checkpoint.expressions import Held
from offload.checkpoint.lazy import LazyTensor
from offload.errors import UnsupportedError
from offload.kernels.quant_linear import QuantLinear
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import SHAPE, WeightFormat
from offload.models.fused.host_rows import HostJoin
from offload.models.fused.streamed_rows import Attending
from offload.models.kv.cache import cache_name
from offload.models.quantized.coded import Decoder, stand_for
from offload.models.quantized.layer import Filling
from offload.models.quantized.panels import arrange
from offload.models.quantized.stack import Stack
from offload.models.quantized.whole import WholeWeight
from offload.models.specs.describe import describe

sys.path.append(str(Path(__file__).parents[1] / "behaviour"))
import exactness

Source = Callable[[str], Path]
MIXED = {"default": "int4", r"layers\.1\.": "int8-g32", "q_proj": "none", "lm_head|embed": "int8"}
HALF = {"": "nvme", "model.layers.0": 0, "model.layers.2": "cpu"}
RESIDENT = {"": 0}
FLOAT32: list[tuple[str, Any, Any]] = [
    ("llama", "int4", "cpu"),
    ("llama", "int4-g32-zp", RESIDENT),
    ("llama", "fp8-block", "nvme"),
    ("llama", "fp8-tensor", "cpu"),
    ("llama", MIXED, HALF),
    ("llama-tied", "mxfp4", HALF),
    ("qwen2", "int8-channel-zp", "nvme"),
    ("phi3", "fp8", RESIDENT),
    ("opt", "int8", "cpu"),
]
METHODS = [
    ("llama", "gptq", RESIDENT),
    ("llama", "gptq-order", HALF),
    ("llama", "awq", "nvme"),
    ("llama", "fp8", "cpu"),
    ("opt", "gptq-8-bits", "cpu"),
    ("qwen2", "int8-zeros", RESIDENT),
]


def packed(source: Source, tmp_path: Path, name: str, asked: Any, dtype: torch.dtype) -> Any:
    """A quantised folder, and the plain model of the same weights in `dtype`."""
    out = folders.pack(source(name), tmp_path / "out", asked)
    state = folders.whole(out, asked, dtype)
    return out, folders.plain_model(source(name), state, tmp_path / "whole", dtype)


def fused(folder: Path, place: Any = "cpu", **options: Any) -> Any:
    return offload.run(folder, device_map=place, device="cpu", engine="fused", **options)


def check(out: Path, plain: nn.Module, name: str, place: Any, dtype: torch.dtype) -> None:
    want = exactness.logits(plain, name)
    said = exactness.tokens(plain, name) if dtype == torch.float32 else {}
    with fused(out, place, dtype=dtype) as model:
        got = exactness.logits(model, name)
        for way, sequences in exactness.tokens(model, name).items() if said else ():
            assert torch.equal(sequences, said[way]), way
        report = model.offload.report()
        assert (report.engine, report.unserved) == ("fused", {})
        assert "weights are quantised" in str(report)
        streamed = model.offload.plan.streamed_bytes
        assert streamed < 0.65 * sum(p.nbytes for p in plain.model.parameters())
    exact = exactness.logits(plain.double(), name)
    assert not exactness.worse(got, want, exact, dtype)


@pytest.mark.compat
@pytest.mark.parametrize(("name", "asked", "place"), FLOAT32, ids=str)
def test_packed_folders(source: Source, tmp_path: Path, name: str, asked: Any, place: Any) -> None:
    check(*packed(source, tmp_path, name, asked, torch.float32), name, place, torch.float32)


@pytest.mark.parametrize(
    ("name", "asked", "place", "resident"),
    [("llama", "int4", HALF, (0,)), ("opt", "int8-zp", RESIDENT, (0, 1, 2))],
    ids=str,
)
def test_few_rows_take_panels_where_the_layer_stays(
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    asked: Any,
    place: Any,
    resident: tuple[int, ...],
) -> None:
    out, plain = packed(source, tmp_path, name, asked, torch.bfloat16)
    check(out, plain, name, place, torch.bfloat16)
    launched: list[type] = []
    monkeypatch.setattr(QuantLinear, "launch", lambda self, stream=0: launched.append(QuantLinear))
    monkeypatch.setattr(Filling, "launch", lambda self, stream=0: launched.append(Filling))
    layers = plain.config.num_hidden_layers
    with fused(out, place) as model, torch.no_grad():
        ids = torch.full((64, 2), 7)
        name_of_cache = exactness.name_of_cache(model)
        cache = model(input_ids=ids)[name_of_cache]
        report = str(model.offload.report())
        assert (
            f"{4 * len(resident)} products of up to 64 rows take quantised weights from" in report
        )
        # Query, key and value are one product, gate and up as well; the MLP is of two.
        assert launched == [Filling] * 4 * layers
        launched.clear()
        model(input_ids=ids[:, :1], **{name_of_cache: cache})
        kinds = [QuantLinear if index in resident else Filling for index in range(layers)]
        assert launched == [kind for kind in kinds for _ in range(4)]


@pytest.mark.parametrize("attention", ["cpu", "gpu"])
def test_what_stands_behind_attention_is_made_whole_while_cores_attend(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    out, _ = packed(source, tmp_path, "llama", "int4", torch.bfloat16)
    done: list[str] = []
    launch = Filling.launch

    def fill(self: Filling, stream: int = 0) -> None:
        if self not in self._scratch.holds:
            done.append("fill")
        launch(self, stream)

    monkeypatch.setattr(Filling, "launch", fill)
    for kind in (HostJoin, Attending):
        attend = kind.launch

        def join(self: Any, stream: int = 0, attend: Any = attend) -> None:
            done.append("attend")
            attend(self, stream)

        monkeypatch.setattr(kind, "launch", join)
    host = {"batch_size": 2, "kv_on_cpu": 1, "kv_attention": attention, "max_length": 8}
    with fused(out, "cpu", **host) as model, torch.no_grad():
        ids = torch.full((2, 3), 7)
        made = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True)
        name = cache_name(made)
        done.clear()
        model(input_ids=ids[:, :1], **{name: made[name]})
        layers = model.config.num_hidden_layers
    # The output of attention and the MLP's two products, not the queries'.
    assert done == ["fill", "fill", "fill", "fill", "attend"] * layers


@pytest.mark.parametrize("place", ["cpu", HALF], ids=str)
def test_halves_that_take_turns_make_weights_whole_each(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    """While the other half is in the middle of the same layer, or of the next one."""
    monkeypatch.setenv("OFFLOAD_POISON", "1")
    out, plain = packed(source, tmp_path, "llama", MIXED, torch.float32)
    ids = torch.randint(5, 60, (70, 4), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = plain.generate(ids, **given)
    host = {"batch_size": 70, "kv_on_cpu": 3, "max_length": 9, "dtype": torch.float32}
    with fused(out, place, **host) as model:
        for parts in (1, 2):
            model.offload._engine.micro_batches = parts
            assert torch.equal(model.generate(ids, **given), want)


@pytest.mark.parametrize(("name", "method", "place"), METHODS, ids=str)
def test_published_methods(
    source: Source, tmp_path: Path, name: str, method: str, place: Any
) -> None:
    out, state = published.save(method, source(name), tmp_path / "out")
    plain = folders.plain_model(source(name), state, tmp_path / "whole")
    check(out, plain, name, place, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "method", "place"),
    [("llama", "gptq", HALF), ("qwen2", "awq", RESIDENT), ("opt", "gptq-channel", RESIDENT)],
    ids=str,
)
def test_what_other_programs_store_is_arranged_where_it_stays(
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    place: Any,
) -> None:
    half = torch.float16  # as their scales
    monkeypatch.setattr(published, "DTYPE", half)
    out, state = published.save(method, source(name), tmp_path / "out")
    plain = folders.plain_model(source(name), state, tmp_path / "whole", half)
    wanted = folders.logits(plain)
    ids = variants.inputs("llama")["input_ids"]
    with fused(out, RESIDENT, dtype=half) as model, torch.no_grad():
        products = 4 * plain.config.num_hidden_layers
        assert f"{products} products of up to 64 rows take quantised weights from panels" in str(
            model.offload.report()
        )
        asked = model(input_ids=ids, output_hidden_states=True)  # by the modules themselves
        assert torch.equal(asked.logits, wanted)
    assert all(p.is_meta for p in model.parameters())  # closed: nothing is held
    check(out, plain, name, place, half)


@pytest.mark.parametrize("asked", ["int4", "int4-g32-zp", "int8-channel-zp"])
def test_panels_show_in_no_state_dict_and_are_not_replaced(
    source: Source, tmp_path: Path, asked: str
) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", asked)
    stored = folders.tensors(out)
    with fused(out, RESIDENT) as model:
        held = [name for name, _ in model.model.layers.named_parameters()]
        assert any(name.endswith("weight_panels") for name in held)
        wanted = folders.logits(model)
        state = model.state_dict()
        assert not any("panel" in name for name in state)
        for name, tensor in stored.items():
            assert name.endswith("weight_shape") or torch.equal(state[name], tensor), name
        part = model.model.layers[1].mlp.up_proj.state_dict()
        assert torch.equal(
            part["weight_packed"], stored["model.layers.1.mlp.up_proj.weight_packed"]
        )
        for module in (model, model.model.layers[1], model.model.layers[1].mlp.up_proj):
            with pytest.raises(UnsupportedError, match="load_state_dict"):
                module.load_state_dict(module.state_dict(), strict=False)
            with pytest.raises(UnsupportedError, match="cannot be moved or cast"):
                module.half()
        assert torch.equal(folders.logits(model), wanted)


@pytest.mark.parametrize("asked", ["int4-g32", "int8-zp"])
def test_modules_compute_the_same_with_panels(source: Source, tmp_path: Path, asked: str) -> None:
    """Also where they have made their weights of rows before, in the same memory."""
    out = folders.pack(source("llama"), tmp_path / "out", asked)
    with offload.run(out, device_map=RESIDENT, device="cpu", engine="transformers") as model:
        wanted = folders.logits(model)
        spec = describe(model)
        for layer, name in zip(spec.layers, spec.layer_names, strict=True):
            arrange(layer, model.get_submodule(name))
        assert model.model.layers[1].mlp.up_proj.weight_panels.dtype == torch.uint8
        assert torch.equal(folders.logits(model), wanted)


def test_a_weight_that_nobody_made_shows(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain = packed(source, tmp_path, "llama", "int4", torch.float32)
    launch = Filling.launch
    count = 0

    def all_but_one(self: Filling, stream: int = 0) -> None:
        nonlocal count
        count += 1
        if count != 6:  # attention's last product in the second layer
            launch(self, stream)

    with fused(out, dtype=torch.float32) as model:
        assert torch.allclose(folders.logits(model), folders.logits(plain), atol=1e-4)
        monkeypatch.setattr(Filling, "launch", all_but_one)
        assert folders.logits(model).isnan().all()


def test_fillers_are_made_once_and_run_once_a_layer(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = filled = 0
    filler = Decoder.filler

    def counted(self: Decoder, *args: Any) -> Callable[[int], None]:
        nonlocal made
        made += 1
        fill = filler(self, *args)

        def run(stream: int) -> None:
            nonlocal filled
            filled += 1
            fill(stream)

        return run

    monkeypatch.setattr(Decoder, "filler", counted)
    # Of 38 rows: the MLP in six pieces.
    monkeypatch.setattr("offload.models.fused.block.MLP_ROWS", 7)
    out = folders.pack(source("llama"), tmp_path / "out", "int4-g32")
    with fused(out, HALF, dtype=torch.float32) as model:
        layers, slots = 3, model.offload.plan.slots
        assert made == 4 * (1 + (layers - 1) * slots)
        before = made
        folders.logits(model)
        assert (made, filled) == (before, 4 * layers)
        ids = variants.inputs("llama")["input_ids"]
        model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert (made, filled) == (before, 4 * layers * 5)


def test_what_is_not_served_runs_over_the_same_scratch(source: Source, tmp_path: Path) -> None:
    out, plain = packed(source, tmp_path, "llama", "int4", torch.float32)
    ids = variants.inputs("llama")["input_ids"]
    with fused(out, HALF, dtype=torch.float32) as model, torch.no_grad():
        for _ in range(2):
            first = folders.logits(model)
            asked = model(input_ids=ids, output_hidden_states=True)
            assert torch.equal(asked.logits, folders.logits(plain))
            assert torch.equal(folders.logits(model), first)
            assert torch.allclose(first, asked.logits, atol=1e-4)
        assert sum(model.offload.report().unserved.values()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_in_lock_step_and_keys_in_cpu_memory(
    source: Source, tmp_path: Path, dtype: torch.dtype
) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    place = {"": "cpu", "model.layers.1": 0}
    inputs = [variants.inputs("llama", rows=3, length=n) for n in (4, 7)]
    calls = [{**x, "max_new_tokens": 4, "do_sample": False} for x in inputs]
    with fused(out, place, dtype=dtype) as model:
        alone = [model.generate(**call) for call in calls]
        for got, want in zip(model.offload.generate(calls), alone, strict=True):
            assert torch.equal(got, want)
    with fused(out, place, dtype=dtype, batch_size=3, kv_on_cpu=2) as model:
        for call, want in zip(calls, alone, strict=True):
            assert torch.equal(model.generate(**call), want)
        assert model.offload.report().unserved == {}


def test_other_threads_do_not_make_weights_meanwhile(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    free: list[bool] = []
    launch = Filling.launch

    def asked(self: Filling, stream: int = 0) -> None:
        def ask() -> None:
            lock = self._scratch.lock
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        launch(self, stream)

    monkeypatch.setattr(Filling, "launch", asked)
    with fused(out, dtype=torch.float32) as model:
        folders.logits(model)
    assert free and not any(free)


def test_the_plan_counts_a_whole_layer(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    plain = folders.build("llama")
    layer = sum(p.nbytes for p in plain.model.layers[0].parameters() if p.ndim == 2)
    with fused(out) as model:
        assert layer <= model.offload.plan.reserve_bytes < 1.1 * layer


@pytest.mark.parametrize("engine", ["fused", "transformers"])
@pytest.mark.parametrize("place", ["cpu", RESIDENT], ids=str)
def test_a_weight_of_the_users_own_is_refused(
    source: Source, tmp_path: Path, engine: str, place: Any
) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    with offload.run(out, device_map=place, device="cpu", engine=engine) as model:
        folders.logits(model)
        product = model.model.layers[1].mlp.up_proj
        product.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16))
        with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.up_proj\.weight was replaced"):
            folders.logits(model)


def whole_weight(form: WeightFormat, rows: int, columns: int = 256) -> WholeWeight:
    stored = quantise(torch.randn(rows, columns), form)
    parts = {n: LazyTensor(Held(t)) for n, t in stored.items() if n != SHAPE}
    lazy = stand_for(form, parts, (rows, columns), torch.float32)
    return WholeWeight("weight", tuple(parts), lazy.expression, nn.Parameter(lazy))


STACKS = [
    (["int4", "int4"], [16, 8], True),
    (["int4", "int4-g32"], [16, 8], False),
    (["int4-zp", "int4-zp"], [16, 8], True),
    (["int4-zp", "int4-zp"], [12, 8], False),  # a word of zero points would be of both
    (["int4-zp", "int4-zp"], [16, 12], True),
    (["int8-zp", "int8-zp"], [12, 8], True),
    (["fp8-block", "fp8-block"], [128, 8], True),
    (["fp8-block", "fp8-block"], [120, 8], False),
    (["fp8-tensor", "fp8-tensor"], [16, 8], False),
    (["fp8-tensor"], [16], True),
    (["mxfp4", "mxfp4", "mxfp4"], [3, 4, 5], True),
]


@pytest.mark.parametrize(("formats", "rows", "stackable"), STACKS, ids=str)
def test_what_is_stored_for_weights_that_act_as_one(
    formats: list[str], rows: list[int], stackable: bool
) -> None:
    weights = {
        f"{i}.weight": whole_weight(WeightFormat.parse(text), n)
        for i, (text, n) in enumerate(zip(formats, rows, strict=True))
    }
    stack = Stack.of(weights)
    assert (stack is not None) == stackable
    if stack is None:
        return
    tensors = {}
    for end, names in stack.parts.items():
        own = [dict(w.expression.parts)[end].read() for w in weights.values()]
        whole = torch.cat([t.view(torch.uint8).flatten() for t in own])  # as a slot has them
        at = 0
        for name, tensor in zip(names, own, strict=True):
            view = whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensors[name], at = view, at + tensor.nbytes
    found = Decoder(stack.form, stack.shape)(stack.stored(tensors).tensors, torch.float32)
    assert torch.equal(found, torch.cat([w.expression.read() for w in weights.values()]))
