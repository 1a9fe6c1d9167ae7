"""Checkpoint folders made from others: edited tensors, edited configs, other file layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of a safetensors folder, single or sharded."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def copy_without_weights(source: Path, target: Path) -> Path:
    """Everything but the weights and their index."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if ".safetensors" not in file.name:
            shutil.copy(file, target)
    return target


def edited(
    source: Path,
    target: Path,
    change: Callable[[Tensors], Tensors | None] = lambda tensors: None,
    **config: Any,
) -> Path:
    """`source` as one safetensors file in `target`, its tensors changed by `change`, entries of
    its config.json replaced.
    """
    copy_without_weights(source, target)
    tensors = read_tensors(source)
    tensors = change(tensors) or tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
    change_config(target, **config)
    return target


def change_config(folder: Path, **entries: Any) -> None:
    """Replace entries of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def as_bin(source: Path, target: Path, *, shards: int = 1, old_format: bool = False) -> Path:
    """`source` as .bin files; of several shards the last one is in the format before torch 1.6."""
    copy_without_weights(source, target)
    names = sorted(tensors := read_tensors(source))
    weight_map = {}
    for i in range(shards):
        file = "pytorch_model.bin"
        if shards > 1:
            file = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        part = {name: tensors[name] for name in names[i::shards]}
        weight_map |= dict.fromkeys(part, file)
        zipped = not (old_format and i == shards - 1)
        torch.save(part, target / file, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return target
