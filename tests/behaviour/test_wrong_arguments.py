"""Odd values of every argument of `offload.run`: one error that names it, and nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

JOB = {"goal": "throughput", "prompt_len": 8, "gen_len": 4}
NO_DEVICE = "is not a device"
NO_FORMAT = "is no format for weights"
NO_SIZE = r"max_memory\['cpu'\]: the size .* is not understood"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"device_map": ""}, ValueError, "device_map='' is not known; use 'auto'"),
    ({"device_map": "CPU"}, ValueError, "device_map='CPU' is not known"),
    ({"device_map": None}, TypeError, "device_map must be a string or a dict, got None"),
    ({"device_map": 0}, TypeError, "device_map must be a string or a dict, got 0"),
    ({"device_map": {}}, ValueError, r"device_map=\{\} places nothing"),
    ({"device_map": {"": "gpu"}}, ValueError, r"device_map\[''\]='gpu': use 0, 'cpu' or 'nvme'"),
    ({"device_map": {"": None}}, ValueError, r"device_map\[''\]=None: use 0"),
    ({"device_map": {"": 3}}, ValueError, r"device_map\[''\]=3 is not the compute device"),
    ({"device_map": {"": True}}, ValueError, r"device_map\[''\]=True is not the compute device"),
    ({"device_map": {"nope": "cpu"}}, ValueError, "does not have: 'nope'"),
    ({"device_map": {0: "cpu"}}, ValueError, "does not have: '0'"),
    ({"device_map": {"model.layers.0": "cpu"}}, ValueError, "gives 'model.layers.1' no place"),
    ({"device_map": {"": "cpu", "model.layers.0.mlp": "nvme"}}, ValueError, "names parts of a lay"),
    ({"max_memory": 5}, TypeError, "max_memory must be a dict such as .* got 5"),
    ({"max_memory": "8GiB"}, TypeError, "max_memory must be a dict such as .* got '8GiB'"),
    ({"max_memory": {"gpu": 1}}, ValueError, "max_memory has the key 'gpu'; keys are GPU numbers"),
    ({"max_memory": {True: 1}}, ValueError, "max_memory has the key True"),
    ({"max_memory": {3: 1}}, ValueError, "max_memory names GPU 3"),
    ({"max_memory": {"cpu": -1}}, ValueError, NO_SIZE),
    ({"max_memory": {"cpu": 1.5}}, ValueError, NO_SIZE),
    ({"max_memory": {"cpu": math.nan}}, ValueError, NO_SIZE),
    ({"max_memory": {"cpu": None}}, ValueError, NO_SIZE),
    ({"max_memory": {"cpu": True}}, ValueError, NO_SIZE),
    ({"max_memory": {"cpu": "1e3GiB"}}, ValueError, NO_SIZE),
    ({"max_memory": {"cpu": 0}}, offload.BudgetError, "a budget of 0 B on CPU memory cannot hold"),
    ({"offload_folder": 3}, TypeError, "offload_folder must be a path, got 3"),
    ({"offload_folder": b"x"}, TypeError, "offload_folder must be a path, got b'x'"),
    ({"offload_folder": ""}, ValueError, "offload_folder is empty"),
    ({"dtype": "int8"}, ValueError, "dtype='int8' is not 'auto', 'bfloat16'"),
    ({"dtype": torch.int8}, ValueError, "dtype=torch.int8 is not 'auto'"),
    ({"dtype": None}, ValueError, "dtype=None is not 'auto'"),
    ({"dtype": float}, ValueError, "dtype=<class 'float'> is not 'auto'"),
    ({"quantization": ""}, ValueError, f"'' {NO_FORMAT}"),
    ({"quantization": "INT4"}, ValueError, f"'INT4' {NO_FORMAT}"),
    ({"quantization": "int4-g7"}, ValueError, f"'int4-g7' {NO_FORMAT}"),
    ({"quantization": 4}, TypeError, "quantization must be a format .* got 4"),
    ({"quantization": {}}, ValueError, r"quantization=\{\} asks for no format"),
    ({"quantization": {"(": "int8"}}, ValueError, r"'\(' is no regular expression"),
    ({"quantization": {1: "int8"}}, ValueError, "1 is no regular expression"),
    ({"quantization": {"default": None}}, TypeError, "a text such as 'int4', got None"),
    ({"quantization": {"x": "int4"}}, ValueError, "'x' is found in the name of no weight"),
    ({"quantization": "int4"}, ValueError, "32 inputs do not divide into groups of 64"),
    ({"engine": "Fused"}, ValueError, "engine must be one of .* got 'Fused'"),
    ({"engine": None}, ValueError, "engine must be one of .* got None"),
    ({"device": "tpu"}, ValueError, f"device='tpu' {NO_DEVICE}"),
    ({"device": ""}, ValueError, f"device='' {NO_DEVICE}"),
    ({"device": 1.5}, ValueError, f"device=1.5 {NO_DEVICE}"),
    ({"device": -1}, ValueError, f"device=-1 {NO_DEVICE}"),
    ({"device": "meta"}, ValueError, "device='meta': layers are streamed to 'cuda' devices"),
    ({"device": "cuda:99"}, ValueError, r"this machine has \d+ usable CUDA device"),
    ({"prefetch": 0}, ValueError, "prefetch must be between 1 and 64, got 0"),
    ({"prefetch": "2"}, TypeError, "prefetch must be an int, got '2'"),
    ({"batch_size": 0}, ValueError, "batch_size must be between 1 and"),
    ({"batch_size": True}, TypeError, "batch_size must be an int, got True"),
    ({"batch_size": math.inf}, TypeError, "batch_size must be an int, got inf"),
    ({"max_length": -1}, ValueError, "max_length must be between 1 and"),
    ({"max_length": 2.5}, TypeError, "max_length must be an int, got 2.5"),
    ({"goal": "fast"}, ValueError, "goal='fast' is not known; it is 'throughput'"),
    ({"goal": "latency"}, ValueError, "goal='latency' needs prompt_len"),
    ({"prompt_len": 5}, ValueError, "prompt_len=5 needs a goal"),
    ({"gen_len": 5}, ValueError, "gen_len=5 needs a goal"),
    (JOB | {"gen_len": 0}, ValueError, "gen_len must be between 1 and"),
    (JOB | {"prompt_len": "8"}, TypeError, "prompt_len must be an int, got '8'"),
    (JOB | {"device_map": "cpu"}, ValueError, "plans where layers rest, and device_map='cpu' says"),
    (JOB | {"prefetch": 2}, ValueError, "prefetch=2 is decided by the plan for goal='throughput'"),
    (JOB | {"kv_on_cpu": 1}, ValueError, "kv_on_cpu=1 is decided by the plan"),
    ({"kv_on_cpu": -1}, ValueError, "kv_on_cpu must be between 0 and"),
    ({"kv_on_cpu": 2}, ValueError, "kv_on_cpu=2 of batch_size=1 sequences"),
    ({"kv_on_cpu": 1}, offload.UnsupportedError, "takes the fused engine.* pass engine='fused'"),
    ({"kv_dtype": "fp8"}, ValueError, "kv_dtype must be one of .* got 'fp8'"),
    ({"kv_dtype": "int8"}, ValueError, "kv_dtype='int8' is for keys and values in CPU memory"),
    ({"kv_attention": "tpu"}, ValueError, "kv_attention must be one of .* got 'tpu'"),
    ({"kv_attention": "gpu"}, ValueError, "kv_attention='gpu' is about keys and values in CPU"),
    ({"model_class": "Nope"}, ValueError, "model_class='Nope' is not a class of transformers"),
    ({"model_class": dict}, ValueError, "model_class must be a PreTrainedModel or Auto class"),
    ({"revision": 3}, TypeError, "revision must be the name of a revision or None, got 3"),
    ({"trust_remote_code": "no"}, TypeError, "trust_remote_code must be True or False, got 'no'"),
    ({"attn_implementation": 3}, TypeError, "attn_implementation must be a name .* got 3"),
    ({"attn_implementation": "nope"}, ValueError, 'attn_implementation="nope"` is not supported'),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=lambda x: str(x)[:60])
def test_wrong_arguments(
    variant_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # where the home of packs is, too
    with pytest.raises(error, match=text):
        offload.run(variant_folder("llama"), **({"device": "cpu"} | options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [None, 3, b"x", [], torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_name_of_a_model(model: Any) -> None:
    with pytest.raises(TypeError, match="must be a checkpoint folder, a hub id or a PreTrainedMod"):
        offload.run(model, device="cpu")


@pytest.mark.parametrize("model", ["", "/no/such", "a/b/c/d", "../x", Path("~nobody/x")], ids=str)
def test_names_of_no_model(model: Any) -> None:
    with pytest.raises(offload.ModelNotFoundError, match="there is no such folder"):
        offload.run(model, device="cpu")
