"""Every form of device_map and max_memory, and one clear line for each that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comparison
import pytest
import torch
from comparison import output

import offload

Folder = Callable[[str], Path]
LAYERS = [f"model.layers.{i}" for i in range(3)]


def tiers(folder: Path, **arguments: Any) -> list[str]:
    """Where the layers rest; the answers are checked on the way."""
    with offload.run(folder, **arguments) as model:
        assert torch.equal(output(model), output(comparison.plain_model(folder)))
        return [tier.value for tier in model.offload.plan.tiers]


MAPS: list[tuple[Any, list[str]]] = [
    ("auto", ["device"] * 3),
    ("cpu", ["cpu"] * 3),
    ("nvme", ["nvme"] * 3),
    ("disk", ["nvme"] * 3),
    ({"": "nvme"}, ["nvme"] * 3),
    ({"": "disk", "model.layers.1": "cpu"}, ["nvme", "cpu", "nvme"]),
    ({"model": 0, "model.layers.1": "nvme"}, ["device", "nvme", "device"]),
    ({"model.layers": "cpu", "model.layers.2": 0}, ["cpu", "cpu", "device"]),
    (dict(zip(LAYERS, (0, "cpu", "nvme"), strict=True)), ["device", "cpu", "nvme"]),
    ({"": "cpu", "lm_head": 0, "model.embed_tokens": 0, "model.norm": 0}, ["cpu"] * 3),
]


@pytest.mark.compat
@pytest.mark.parametrize(("device_map", "want"), MAPS)
def test_device_map(variant_folder: Folder, device_map: Any, want: list[str]) -> None:
    assert tiers(variant_folder("llama"), device_map=device_map) == want


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_modules_outside_the_layers(variant_folder: Folder, tier: str) -> None:
    """Head and final norm may move like a layer too."""
    place = {"": "nvme", "lm_head": tier, "model.norm": tier}
    with offload.run(variant_folder("llama"), device_map=place) as model:
        assert torch.equal(output(model), output(comparison.plain_model(variant_folder("llama"))))
        assert [s.name for s in model.offload.plan.layers] == [*LAYERS, "model.norm", "lm_head"]
        assert model.lm_head.weight.is_meta


@pytest.mark.parametrize(
    ("device_map", "error", "words"),
    [
        ("gpu", ValueError, "'gpu'"),
        ("balanced", ValueError, "'balanced'"),
        (7, TypeError, "7"),
        ({"": "floppy"}, ValueError, "'floppy'"),
        ({"": 1}, ValueError, "1"),
        ({"": "cuda:3"}, ValueError, "cuda:3"),
        ({"": "cuda:x"}, ValueError, "device_map"),
        ({"model.layer.0": "cpu"}, ValueError, "'model.layer.0'"),
        ({"": 0, "model.layers.0.mlp": "cpu"}, ValueError, "'model.layers.0.mlp'"),
        ({"model.layers.0": "cpu"}, ValueError, "'model.layers.1'"),
        ({}, ValueError, "device_map"),
    ],
)
def test_bad_device_map(
    variant_folder: Folder, device_map: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        offload.run(variant_folder("llama"), device_map=device_map)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.compat
@pytest.mark.parametrize("size", [10**9, "1GB", "1GiB", "0.5 GiB", "900mb".upper(), "1000000KB"])
def test_max_memory(variant_folder: Folder, size: Any) -> None:
    assert tiers(variant_folder("llama"), max_memory={"cpu": size}) == ["device"] * 3


@pytest.mark.parametrize(
    ("max_memory", "words"),
    [
        ({"cpu": "many"}, "'many'"),
        ({"cpu": -1}, "-1"),
        ({"cpu": "5Gb"}, "5Gb"),
        ({"disk": "5GB"}, "'disk'"),
        ({1: "5GB"}, "1"),
        ({"cuda:0": "5GB"}, "cuda:0"),
        ("5GB", "5GB"),
        ({"cpu": None}, "None"),
    ],
)
def test_bad_max_memory(variant_folder: Folder, max_memory: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match="max_memory") as caught:
        offload.run(variant_folder("llama"), max_memory=max_memory)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_more_than_is_there(variant_folder: Folder) -> None:
    """A user's word counts, with a warning that says the numbers and points at the user's line."""
    with pytest.warns(UserWarning, match=r"max_memory\['cpu'\].*more than") as told:
        tiers(variant_folder("llama"), device_map="cpu", max_memory={"cpu": "100TB"})
    assert [w.filename for w in told if "max_memory" in str(w.message)] == [__file__]


@pytest.mark.compat
def test_auto_fills_device_then_files(variant_folder: Folder) -> None:
    folder = variant_folder("llama")
    with offload.run(folder, device_map="nvme", prefetch=1) as model:
        plan = model.offload.plan
    least, ring = plan.device_bytes, plan.ring_bytes
    assert tiers(folder, max_memory={0: least, "cpu": least + ring}) == ["nvme"] * 3
    assert set(tiers(folder, max_memory={0: least})) == {"cpu"}
    assert set(tiers(folder, max_memory={0: 2 * least})) == {"device"}
    with pytest.raises(offload.BudgetError):
        tiers(folder, max_memory={0: least - 1})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefetch": 0}, "prefetch"),
        ({"prefetch": 1.5}, "prefetch"),
        ({"prefetch": True}, "prefetch"),
        ({"prefetch": 1000}, "prefetch"),
        ({"engine": "warp"}, "'warp'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "mps"}, "mps"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_length": -1}, "max_length"),
        ({"model_class": "NoSuchModel"}, "NoSuchModel"),
        ({"model_class": dict}, "dict"),
        ({"offload_folder": 7}, "offload_folder"),
        ({"attn_implementation": "warp"}, "warp"),
    ],
)
def test_bad_argument(variant_folder: Folder, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        offload.run(variant_folder("llama"), device_map="nvme", **arguments)
    assert words in str(caught.value)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        offload.run("nobody/nothing", device_map="nvme")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        offload.run(tmp_path / "absent", device_map="nvme")
    with pytest.raises(offload.CheckpointError, match="no weights"):
        offload.run(tmp_path, device_map="nvme")
