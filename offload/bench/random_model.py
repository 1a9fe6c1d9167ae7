"""Models with random weights that are made when they are read: no checkpoint, no second copy."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from offload.bench.shapes import model_class
from offload.checkpoint.expressions import Deferred
from offload.checkpoint.lazy import LazyTensor

STD = 0.02  # what these models are born with; nothing overflows float16 at any depth
_MARKER = "offload_random_model.json"  # says what the folder holds, and whether it is whole


def random_tensor(
    name: str, shape: torch.Size, dtype: torch.dtype, maker: torch.device
) -> torch.Tensor:
    """Normal values that depend on the name alone, made by `maker`; a CPU tensor, pinned where
    `maker` is a GPU.
    """
    generator = torch.Generator(maker).manual_seed(zlib.crc32(name.encode()))
    mean = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0  # the scales of norms
    with torch.inference_mode(False):
        made = torch.empty(shape, dtype=dtype, device=maker)
        made.normal_(mean, STD, generator=generator)
        if maker.type == "cpu":
            return made
        return torch.empty(shape, dtype=dtype, pin_memory=True).copy_(made)


def tensor_shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Every tensor that a checkpoint of this model holds; tied ones once."""
    with torch.device("meta"):
        model = model_class(config)(config)
    shapes: dict[str, torch.Size] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name] = tensor.shape
    return shapes


def random_model(config: PreTrainedConfig, maker: torch.device) -> PreTrainedModel:
    """The model with a `LazyTensor` for every weight, as `offload_built` takes it."""
    dtype = _dtype(config)
    state = {
        name: LazyTensor(_promise(name, shape, dtype, maker))
        for name, shape in tensor_shapes(config).items()
    }
    model = model_class(config).from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    model.name_or_path = "with random weights"
    return model


def _promise(name: str, shape: torch.Size, dtype: torch.dtype, maker: torch.device) -> Deferred:
    return Deferred(random_tensor, (name, shape, dtype, maker), {}, None, shape, dtype)


def _dtype(config: PreTrainedConfig) -> torch.dtype:
    if not isinstance(config.dtype, torch.dtype):
        raise TypeError(f"the config of a random model needs a dtype, got {config.dtype!r}")
    return config.dtype


def random_checkpoint_bytes(config: PreTrainedConfig) -> int:
    """Bytes of the weights that `write_random_checkpoint` writes."""
    return sum(shape.numel() for shape in tensor_shapes(config).values()) * _dtype(config).itemsize


def write_random_checkpoint(config: PreTrainedConfig, folder: Path, maker: torch.device) -> None:
    """A checkpoint folder with the weights of `random_model`, one file a layer; a complete one is
    left as it is.
    """
    wanted = {"config": config.to_diff_dict(), "maker": maker.type, "torch": torch.__version__}
    wanted = json.loads(json.dumps(wanted, default=str))
    marker = folder / _MARKER
    found = json.loads(marker.read_text()) if marker.exists() else {}
    if found == {**wanted, "complete": True}:
        return
    if not found and folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds something else; name another --folder, or remove it")
    from safetensors.torch import save_file

    from offload.store.folder import check_folder

    check_folder(folder, random_checkpoint_bytes(config))
    marker.write_text(json.dumps({**wanted, "complete": False}))
    groups = list(_by_layer(tensor_shapes(config)))
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        tensors = {n: random_tensor(n, s, _dtype(config), maker) for n, s in group.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(group, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    marker.write_text(json.dumps({**wanted, "complete": True}))


def _by_layer(shapes: dict[str, torch.Size]) -> Iterator[dict[str, torch.Size]]:
    """Tensors that follow each other and have the same number in their names, or none."""
    group: dict[str, torch.Size] = {}
    last: str | None = None
    for name, shape in shapes.items():
        number = next((part for part in name.split(".") if part.isdigit()), "")
        if group and number != last:
            yield group
            group = {}
        group[name], last = shape, number
    yield group
