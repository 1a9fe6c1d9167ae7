"""w8a8: activations rounded to int8 token by token, under both engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload.kernels.int8_linear import Int8Linear
from offload.kernels.quant_linear import QuantLinear
from offload.models.kv.cache import cache_name
from offload.models.quantized.layer import Filling
from offload.models.quantized.modules import scratch_bytes

sys.path.append(str(Path(__file__).parents[1] / "behaviour"))
import exactness

Source = Callable[[str], Path]
HALF = {"": "nvme", "model.layers.0": 0, "model.layers.2": "cpu"}
MIXED = {"default": "w8a8", "up_proj": "none", r"layers\.1\.": "int4"}


def packed(source: Source, tmp_path: Path, name: str, asked: Any, dtype: torch.dtype) -> Any:
    """A folder; the plain model of its weights; and that, with inputs rounded."""
    out = folders.pack(source(name), tmp_path / "out", asked)
    state = folders.whole(out, asked, dtype)
    plain = folders.plain_model(source(name), state, tmp_path / "whole", dtype)
    rounding = folders.plain_model(source(name), state, tmp_path / "again", dtype)
    return out, plain, rounding


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "qwen2", "opt"])
def test_the_models_own_modules(source: Source, tmp_path: Path, name: str) -> None:
    out, plain, rounding = packed(source, tmp_path, name, "w8a8", torch.bfloat16)
    wanted = folders.logits(folders.round_inputs(rounding, out))
    assert not torch.equal(wanted, folders.logits(plain))
    with offload.run(source(name), device_map="cpu", device="cpu", quantization="w8a8") as model:
        assert torch.equal(folders.logits(model), wanted)
        assert "in int8" in str(model.offload.report())
        # Gradients for what surrounds the layers: the weight is made whole.
        model.model(inputs_embeds=torch.zeros(1, 2, plain.config.hidden_size).bfloat16())


@pytest.mark.parametrize(
    ("name", "place"),
    [("llama", HALF), ("qwen2", {"": 0}), ("phi3", "nvme"), ("opt", "cpu")],
    ids=str,
)
def test_the_fused_engine(source: Source, tmp_path: Path, name: str, place: Any) -> None:
    """The same but for codes that another order of sums moves by one."""
    out, plain, rounding = packed(source, tmp_path, name, "w8a8", torch.float32)
    folders.round_inputs(rounding, out)
    want, without = exactness.logits(rounding, name), exactness.logits(plain, name)
    options = {"device": "cpu", "engine": "fused", "dtype": torch.float32}
    with offload.run(out, device_map=place, **options) as model:
        got = exactness.logits(model, name)
        assert (model.offload.report().unserved, model.offload.plan.layers) != ({}, ())
        assert "activations in int8, with a scale a token" in str(model.offload.report())
    assert got.keys() == want.keys()
    for way in got:
        rounded = (without[way] - want[way]).abs().max()
        assert rounded > 0
        assert (got[way] - want[way]).abs().max() <= 0.1 * rounded, way


def test_every_number_of_rows(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weight is made whole where all are w8a8; others of the same model are as ever."""
    launched: list[type] = []
    for kind in (QuantLinear, Filling, Int8Linear):
        before = kind.launch

        def launch(self: Any, stream: int = 0, kind: Any = kind, before: Any = before) -> None:
            launched.append(kind)
            before(self, stream)

        monkeypatch.setattr(kind, "launch", launch)
    out = folders.pack(source("llama"), tmp_path / "out", MIXED)
    place = {"": "cpu", "model.layers.1": 0}
    with offload.run(out, device_map=place, device="cpu", engine="fused") as model:
        layers = model.config.num_hidden_layers
        for batch in (1, 40):
            launched.clear()
            with torch.no_grad():
                output = model(input_ids=torch.full((batch, 2), 7))
                name = cache_name(output)
                many = [*launched]
                launched.clear()
                model(input_ids=torch.full((batch, 1), 7), **{name: output[name]})
            # Of the second layer all but `up` is int4: query, key and value, and both outputs.
            assert many.count(Int8Linear) == launched.count(Int8Linear) == 3 * (layers - 1)
            assert launched.count(QuantLinear) == 3
            assert many.count(Filling) == layers + (3 if 2 * batch > 64 else 0)


def test_the_option_is_published_and_read(source: Source, tmp_path: Path) -> None:
    import json

    out = folders.pack(source("llama"), tmp_path / "out", "w8a8")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (config["format"], group["weights"]["strategy"]) == ("int-quantized", "channel")
    inputs = group["input_activations"]
    assert (inputs["num_bits"], inputs["dynamic"], inputs["strategy"]) == (8, True, "token")


def test_an_order_of_columns_that_is_none_changes_nothing(source: Source, tmp_path: Path) -> None:
    """Some writers store weight_g_idx, all zero, where no columns are reordered."""
    out = folders.pack(source("llama"), tmp_path / "out", "w8a8")
    with offload.run(out, device_map="cpu", device="cpu") as model:
        want = folders.logits(model)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        ends = {n: t for n, t in tensors.items() if t.dtype == torch.int8}
        orders = {f"{n}_g_idx": torch.zeros(t.shape[1], dtype=torch.int32) for n, t in ends.items()}
        save_file(tensors | orders, file, {"format": "pt"})
    (out / "model.safetensors.index.json").unlink()
    with offload.run(out, device_map="cpu", device="cpu") as model:
        assert "in int8" in str(model.offload.report())
        assert torch.equal(folders.logits(model), want)


def test_nothing_is_made_room_for(source: Source, tmp_path: Path) -> None:
    """The scratch is that of one module, which the model's own forward may need, not a layer's."""
    rounded = folders.pack(source("llama"), tmp_path / "rounded", "w8a8")
    plain = folders.pack(source("llama"), tmp_path / "plain", "int8-channel")
    peaks = []
    for out in (rounded, plain):
        with offload.run(out, device_map="cpu", device="cpu", engine="fused") as model:
            peaks.append(scratch_bytes(model))
    assert peaks[0] < 0.5 * peaks[1]
