"""Quantised checkpoints, streamed as they are: the logits of the plain model whose weights are what
the stored ones stand for.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import published
import pytest
import torch
import transformers
import variants
from safetensors.torch import load_file, save_file

import offload
from offload.errors import CheckpointError, UnsupportedError
from offload.models.quantized.modules import quantised_weights

Source = Callable[[str], Path]
PACKED: list[tuple[str, Any]] = [
    ("llama", "int4"),
    ("llama", "int4-g32-zp-clip"),
    ("llama", "int8-channel-zp"),
    ("llama", "fp8"),
    ("llama", "fp8-block"),
    ("llama", "fp8-tensor"),
    ("llama", "mxfp4"),
    ("llama", {"default": "int4", r"layers\.1\.": "int8-g32", "lm_head|embed_tokens": "int8"}),
    ("llama-tied", "int4-g32"),
    ("qwen2", "int4"),
    ("phi3", "int8-zp"),
    ("opt", "int4"),
    ("mixtral", "int4-zp"),
    ("qwen3_moe", "mxfp4"),
]
METHODS = [("llama", method) for method in published.METHODS]
METHODS += [("mixtral", "gptq-order"), ("mixtral", "awq"), ("qwen3_moe", "fp8"), ("opt", "gptq")]
METHODS += [("gpt_oss", "mxfp4")]


def in_turns(cases: list[tuple[str, Any]]) -> list[Any]:
    """Each case on one tier, the tiers in turns; its other tier is slow."""
    slow = [
        pytest.param(*case, ("nvme", "cpu")[i % 2], marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
    return [(*case, ("cpu", "nvme")[i % 2]) for i, case in enumerate(cases)] + slow


def check(folder: Path, plain: transformers.PreTrainedModel, tier: str, tmp_path: Path) -> None:
    """Bit-equal logits and tokens; what moves is what is stored."""
    wanted = folders.logits(plain)
    with offload.run(folder, device_map=tier, device="cpu") as model:
        assert torch.equal(folders.logits(model), wanted)
        ids = variants.inputs("llama", length=5)["input_ids"]
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
        streamed = model.offload.plan.streamed_bytes
        assert streamed < 0.65 * sum(p.nbytes for p in plain.model.parameters())
        assert "dequantised where they are used" in str(model.offload.report())
    assert not (tmp_path / "offload-home").exists()  # from the files as they are


@pytest.mark.compat
@pytest.mark.parametrize(("name", "asked", "tier"), in_turns(PACKED), ids=str)
def test_packed_folders(source: Source, tmp_path: Path, name: str, asked: Any, tier: str) -> None:
    out = folders.pack(source(name), tmp_path / "out", asked)
    state = folders.whole(out, asked, torch.bfloat16)
    check(out, folders.plain_model(source(name), state, tmp_path / "whole"), tier, tmp_path)


@pytest.mark.parametrize("engine", ["fused", "transformers"])
@pytest.mark.parametrize("place", ["cpu", {"": 0}], ids=str)
def test_what_would_be_half_a_model_is_refused(
    source: Source, tmp_path: Path, engine: str, place: Any
) -> None:
    """A folder whose config says nothing of codes would be loaded with random weights."""
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    with offload.run(out, device_map=place, device="cpu", engine=engine) as model:
        with pytest.raises(UnsupportedError, match=r"copy their folder instead"):
            model.save_pretrained(tmp_path / "saved")
        product = model.model.layers[0].mlp.up_proj
        with pytest.raises(TypeError, match=r"offload\.run a second time"):
            copy.deepcopy(product)
        with pytest.raises(TypeError, match="path instead"):
            pickle.dumps(product)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("name", "method", "tier"), in_turns(METHODS))
def test_published_methods(
    source: Source, tmp_path: Path, name: str, method: str, tier: str
) -> None:
    out, state = published.save(method, source(name), tmp_path / "out")
    plain = folders.plain_model(source(name), state, tmp_path / "whole")
    if method == "int8":  # that is what it asks for
        folders.round_inputs(plain, out)
    check(out, plain, tier, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_is_one_rounding_of_what_is_stored(
    source: Source, tmp_path: Path, dtype: torch.dtype
) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    state = folders.whole(out, "int4", dtype)
    plain = folders.plain_model(source("llama"), state, tmp_path / "whole", dtype)
    with offload.run(out, device_map="nvme", device="cpu", dtype=dtype) as model:
        assert model.dtype == dtype
        assert torch.equal(folders.logits(model), folders.logits(plain))


def test_part_on_the_device_and_modules_of_their_own_tier(source: Source, tmp_path: Path) -> None:
    asked = {"default": "int4", "lm_head|embed_tokens": "int8"}
    out = folders.pack(source("llama"), tmp_path / "out", asked)
    state = folders.whole(out, asked, torch.bfloat16)
    wanted = folders.logits(folders.plain_model(source("llama"), state, tmp_path / "whole"))
    places = {"": "nvme", "model.layers.1": 0, "lm_head": "nvme", "model.embed_tokens": "cpu"}
    with offload.run(out, device_map=places, device="cpu") as model:
        assert torch.equal(folders.logits(model), wanted)


def test_weights_stand_whole_only_in_their_forward(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    with offload.run(out, device_map="nvme", device="cpu") as model:
        product = model.model.layers[0].mlp.up_proj
        assert (product.weight.shape, product.weight.dtype) == ((128, 64), torch.bfloat16)
        with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.up_proj\.weight is in the mo"):
            product.weight.sum().item()
        assert len(list(quantised_weights(model))) == 21
        state = model.state_dict()
        stored = folders.tensors(out)
        name = "model.layers.0.mlp.up_proj.weight_packed"
        assert torch.equal(state[name], stored[name])


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite all tensors of a folder in one file."""
    stored = folders.tensors(folder)
    edit(stored)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")


UP = "model.layers.1.mlp.up_proj"


def set_to(name: str, value: Any) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda stored: stored.__setitem__(f"{UP}.{name}", value)


def put(
    name: str, place: tuple[int, ...], value: float
) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda stored: stored[f"{UP}.{name}"].__setitem__(place, value)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "NaN scale": ("int4", put("weight_scale", (3, 0), float("nan")), "weight_scale holds 1 NaN or"),
    "Inf scale": ("gptq", put("scales", (0, 3), float("inf")), "scales holds 1 NaN or infinite"),
    "NaN of e8m0": ("mxfp4-own", put("weight_scale", (0, 1), 255), "weight_scale holds 1 NaN"),
    "group of no group": ("gptq-order", put("g_idx", (5,), 2), "g_idx holds 2, which is none of"),
    "wrong packing": (
        "int4",
        set_to("weight_packed", torch.zeros(128, 16, dtype=torch.int32)),
        r"weight_packed is torch.int32 \[128, 16\], but a weight of \[128, 64\] in int4-g64 is",
    ),
    "packed along the other dimension": (
        "gptq",
        set_to("qweight", torch.zeros(128, 8, dtype=torch.int32)),
        r"qzeros is torch.int32 \[2, 16\], but",
    ),
    "another original shape": (
        "int4",
        set_to("weight_shape", torch.tensor([128, 56])),
        r"weight_packed is torch.int32 \[128, 8\], but a weight of \[128, 56\]|56 inputs do not di",
    ),
    "no shape": ("int4", set_to("weight_shape", torch.tensor([128])), "weight_shape holds"),
    "missing zeros": ("awq", lambda s: s.pop(f"{UP}.qzeros"), "qzeros is missing"),
    "missing order": ("gptq-order", lambda s: s.pop(f"{UP}.g_idx"), "g_idx is missing, which"),
    "scales of another group": (
        "int4",
        set_to("weight_scale", torch.ones(128, 2, dtype=torch.bfloat16)),
        r"weight_scale is torch.bfloat16 \[128, 2\], but",
    ),
    "scales of no such dtype": (
        "int4",
        set_to("weight_scale", torch.ones(128, 1, dtype=torch.uint8)),
        "weight_scale holds torch.uint8, which is no dtype of such scales",
    ),
    "zero points that were not announced": (
        "int8",
        set_to("weight_zero_point", torch.ones(128, 1, dtype=torch.int8)),
        "weight_zero_point holds zero points, and config.json says there are none",
    ),
    "codes of another dtype": (
        "awq",
        set_to("qweight", torch.zeros(64, 16, dtype=torch.int64)),
        r"qweight is torch.int64 \[64, 16\], but",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_with_tensor_and_file(source: Source, tmp_path: Path, what: str) -> None:
    method, edit, message = DAMAGE[what]
    out = tmp_path / "out"
    if method in published.METHODS:
        published.save(method, source("llama"), out)
    else:
        folders.pack(source("llama"), out, method.removesuffix("-own"))
    change(out, edit)
    with pytest.raises(CheckpointError, match=rf"out/model.safetensors: {UP}\.({message})"):
        offload.run(out, device_map="nvme", device="cpu")


@pytest.mark.parametrize(
    ("asked", "end"),
    [
        ("int4", "weight_scale"),
        ("int4-channel-zp", "weight_scale"),
        ("int4-channel-zp", "weight_zero_point"),
        ("mxfp4", "weight_scale"),
        ("fp8", "weight_scale"),
        ("w8a8", "weight_scale"),
    ],
)
@pytest.mark.parametrize("engine", ["fused", "transformers"])
def test_dimensions_of_size_1_do_not_matter(
    source: Source, tmp_path: Path, asked: str, end: str, engine: str
) -> None:
    """Other programs have scales of whole rows as [N], [N, 1] or [1, N, 1]."""
    out = folders.pack(source("llama"), tmp_path / "out", asked)
    with offload.run(out, device_map="nvme", device="cpu", engine=engine) as model:
        wanted = folders.logits(model)
    for edit in (lambda t: t[None], lambda t: t.squeeze(), lambda t: t.squeeze()[None]):

        def reshape(stored: dict[str, torch.Tensor], edit: Any = edit) -> None:
            name = next(n for n in stored if n.endswith(f"1.mlp.up_proj.{end}"))
            stored[name] = edit(stored[name])

        change(out, reshape)
        with offload.run(out, device_map="nvme", device="cpu", engine=engine) as model:
            assert torch.equal(folders.logits(model), wanted)


def test_blocks_as_older_folders_name_them(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "fp8-block")
    with offload.run(out, device_map="nvme", device="cpu") as model:
        wanted = folders.logits(model)
    config = json.loads((out / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["block_structure"] == [128, 128]
    weights["block_structure"] = "128x128"
    (out / "config.json").write_text(json.dumps(config))
    with offload.run(out, device_map="nvme", device="cpu") as model:
        assert torch.equal(folders.logits(model), wanted)
    weights["block_structure"] = "128x"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"weights.block_structure = '128x'; a block is two"):
        offload.run(out, device_map="nvme", device="cpu")


def test_codes_without_their_scales(source: Source, tmp_path: Path) -> None:
    """They would be taken for the weight."""
    out = folders.pack(source("llama"), tmp_path / "out", "w8a8")
    change(out, lambda stored: stored.pop(f"{UP}.weight_scale"))
    with pytest.raises(UnsupportedError, match=rf"{UP}.weight \(.*safetensors\) is of no weight"):
        offload.run(out, device_map="nvme", device="cpu")


@pytest.mark.parametrize("asked", ["w8a8", "fp8", "fp8-block"])
def test_codes_without_their_config(source: Source, tmp_path: Path, asked: str) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", asked)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"proj.weight .* is quantised, .* lies beside it"):
        offload.run(out, device_map="nvme", device="cpu")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{UP}.input_scale", torch.ones(1)),
        ("model.layers.0.self_attn.k_scale", torch.ones(1)),
        (f"{UP}.weight_global_scale", torch.ones(1)),
        ("model.layers.0.extra.weight", torch.ones(2, 2).to(torch.float8_e4m3fn)),
    ],
)
def test_tensors_of_other_methods(
    source: Source, tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    change(out, lambda stored: stored.__setitem__(name, tensor))
    with pytest.raises(UnsupportedError, match=rf"{name} \(.*model.safetensors\) is of no weight"):
        offload.run(out, device_map="nvme", device="cpu")


def test_a_module_that_no_target_names(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"].append(UP)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"{UP} is stored quantised, and none"):
        offload.run(out, device_map="nvme", device="cpu")


GPTQ = published.METHODS["gptq"].config
AWQ = published.METHODS["awq"].config
FP8 = published.METHODS["fp8"].config
INT8 = published.METHODS["int8"].config
GROUP = INT8["config_groups"]["group_0"]


def scheme(**changes: Any) -> dict[str, Any]:
    return {**INT8, "config_groups": {"group_0": {**GROUP, **changes}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'"),
    ({"quant_method": None}, "quant_method = None"),
    ({"quant_method": ["gptq"]}, r"quant_method = \['gptq'\]"),
    ({**GPTQ, "desc_act": "true"}, "desc_act = 'true'; it is true or false"),
    ({**GPTQ, "bits": 3}, "gptq.*quantization_config.bits = 3"),
    ({**GPTQ, "group_size": 0}, "group_size = 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format = True"),
    ({**GPTQ, "dynamic": {".*up_proj": {"bits": 8}}}, "dynamic = "),
    ({**AWQ, "version": "gemv"}, "awq.*version = 'gemv'"),
    ({**AWQ, "zero_point": False}, "zero_point = False"),
    ({**AWQ, "bits": 8}, "bits = 8"),
    ({**FP8, "activation_scheme": "static"}, "fp8.*activation_scheme = 'static'"),
    ({**FP8, "weight_block_size": None}, "weight_block_size = None"),
    ({**FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    ({**INT8, "format": "marlin-24"}, "format = .*marlin-24"),
    ({**INT8, "format": ["int-quantized"]}, r"format = .*\(here \['int-quantized'\]\)"),
    ({**INT8, "ignore": 3}, "ignore = 3; it is a list of names of modules"),
    ({**INT8, "quantization_status": "frozen"}, "quantization_status = 'frozen'"),
    ({**INT8, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = {'num_bits': 8}"),
    ({**INT8, "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format = 'spars"),
    ({**INT8, "transform_config": {"config_groups": {"a": 1}}}, "transform_config = "),
    ({**INT8, "config_groups": {"W8A8": ["Linear"]}}, r"config_groups.W8A8 = \['Linear'\]"),
    (scheme(input_activations={"num_bits": 8, "dynamic": False}), "activations.dynamic = False"),
    (scheme(output_activations={"num_bits": 8}), "output_activations = "),
    (scheme(weights={**GROUP["weights"], "num_bits": 6}), "weights.num_bits = 6"),
    (scheme(weights={**GROUP["weights"], "strategy": "token"}), "weights.strategy = 'token'"),
    (scheme(weights={**GROUP["weights"], "type": "float"}), "weights.type = 'float'"),
    (scheme(weights={**GROUP["weights"], "symmetric": 0}), "weights.symmetric = 0; it is true or"),
    (scheme(weights={**GROUP["weights"], "group_size": "64"}), "weights.group_size = '64'"),
    (scheme(targets=["Embedding"]), "targets = "),
    (scheme(targets=["re:("]), "is no regular expression"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda x: str(x)[-60:])
def test_what_is_not_read_is_refused_before_any_file(
    source: Source, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    plain = json.loads((source("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    (tmp_path / "model.safetensors").mkdir()  # touching it would be another error
    with pytest.raises(UnsupportedError, match=message) as caught:
        offload.run(tmp_path, device_map="nvme", device="cpu")
    assert str(tmp_path) in str(caught.value)


def test_scales_are_read_once_and_weights_not_at_all(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.checkpoint import Extent, open_checkpoint
    from offload.models.build import build_model
    from offload.models.quantized.methods import read_method

    out = folders.pack(source("llama"), tmp_path / "out", "int4-zp")
    names = {(e.file, e.offset): n for n, e in open_checkpoint(out, read_method).tensors.items()}
    seen: list[str] = []
    read = Extent.read

    def noted(self: Extent) -> torch.Tensor:
        seen.append(names[self.file, self.offset].rpartition(".")[2])
        return read(self)

    monkeypatch.setattr(Extent, "read", noted)
    build_model(open_checkpoint(out, read_method))
    assert sorted(set(seen)) == ["weight_scale", "weight_shape"] and len(seen) == 42
    assert len(load_file(next(out.glob("*.safetensors")))) == len(names)
