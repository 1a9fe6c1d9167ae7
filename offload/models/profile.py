"""From a transformers model whose weights need not be there to what the planner knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from offload.checkpoint import open_checkpoint
from offload.errors import CheckpointError, UnsupportedError
from offload.models.build import blamed_on
from offload.models.limits import positions
from offload.models.modules import find_layers, shared_parameters
from offload.models.parts import Part
from offload.models.quantized.modules import scratch_bytes, whole_parameters
from offload.models.shape import ModelShape
from offload.models.specs.describe import describe_layers
from offload.models.specs.spec import CannotExpress
from offload.scheduler.engine import Engine
from offload.scheduler.model_profile import LayerProfile, ModelProfile

_NATIVE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def model_profile(model: PreTrainedModel, name: str) -> ModelProfile:
    """Counts and sizes of `model`, lazy or on the meta device; no weight is read. Of quantised
    weights those of what they stand for.

    Raises UnsupportedError for a model without layers or of another dtype than float32, float16
    and bfloat16.
    """
    layers = find_layers(model)
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    shape = ModelShape.of(model.config)
    query_width = _query_width(model.config, shape)
    score_heads, unfused = _fused_blocks(model)
    limit, learnt = positions(model.config)
    return ModelProfile(
        name=name,
        layers=tuple(_layer(layer, model.config) for layer in layers.values()),
        native=_native(layers),
        outside_bytes=sum(
            s.tensor.nbytes for s in shared_parameters(model) if id(s.tensor) not in inside
        ),
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        query_width=query_width,
        kv_width=shape.kv_width,
        kv_heads=max(1, shape.kv_width * shape.heads // max(1, 2 * query_width)),
        group=max(1, 2 * query_width // max(1, shape.kv_width)),
        vocabulary=shape.vocabulary,
        score_heads=score_heads,
        unfused=unfused,
        positions=limit if learnt else None,
    )


def built_profile(
    model: PreTrainedModel, parts: Sequence[Part], outside_bytes: int, engine: Engine
) -> tuple[ModelProfile, str]:
    """Of a model that is about to be run by `engine`, with the bytes that its layers do take, and
    the precision that its weights are in. Raises UnsupportedError, as `model_profile` does.
    """
    found = model_profile(model, f"{type(model).__name__} {model.name_or_path}".strip())
    names = list(find_layers(model))
    scratch = scratch_bytes(model)
    layers = []
    for part in parts:
        layer = found.layers[names.index(part.layer.name)]
        # What quantised weights are made whole in is as large as the largest of them would be.
        largest = scratch // model.dtype.itemsize if scratch else layer.largest
        stored, slot = part.layer.weight_bytes, part.layer.nbytes
        layers.append(replace(layer, stored=stored, slot=slot, largest=largest))
    weights = found.native
    if scratch:
        counts = sum(layer.matrices + layer.others for layer in layers)
        weights = "int4" if 8 * sum(x.stored for x in layers) < 6 * counts else "int8"
    found = replace(found, layers=tuple(layers), outside_bytes=outside_bytes, engine=engine)
    return found, weights


def config_profile(
    config: PreTrainedConfig, name: str, dtype: torch.dtype | None = None
) -> ModelProfile:
    """Of a model that stands nowhere but in its config; `dtype` None is the config's own.

    Raises UnsupportedError where transformers has no class for it.
    """
    cls: Any = next(
        (c for n in config.architectures or () if (c := getattr(transformers, str(n), None))), None
    )
    if cls is None:
        found = AutoModelForCausalLM._model_mapping.get(type(config), None)
        if found is None:
            raise UnsupportedError(
                f"{name}: transformers {transformers.__version__} has no class for the model type "
                f"{config.model_type!r} with architectures {config.architectures}"
            )
        cls = found[0] if isinstance(found, (list, tuple)) else found
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype or config.dtype or torch.float32)
    return model_profile(model, name)


def folder_profile(folder: Path, dtype: torch.dtype | None = None) -> ModelProfile:
    """Of a checkpoint folder: its config, and the headers of its files only where that names no
    dtype. Raises CheckpointError and UnsupportedError.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no checkpoint folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # what its checks raise is of many kinds
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder / 'config.json'} describes no model: {why}") from error
    if getattr(config, "quantization_config", None):
        raise UnsupportedError(
            f"{folder} is quantised; a plan needs the sizes of plain weights: name the folder or "
            "the shape of the plain model, and the precision with --weights"
        )
    if dtype is None and config.dtype is None:
        held = [extent.dtype for extent in open_checkpoint(folder).tensors.values()]
        dtype = next((d for d in held if d in _NATIVE), None)
    with blamed_on(folder / "config.json"):
        return config_profile(config, str(folder), dtype)


def _fused_blocks(model: PreTrainedModel) -> tuple[float, str]:
    """Heads whose scores the fused block writes, a layer's mean; or why there is no such block."""
    try:
        layers = describe_layers(model).specs
    except CannotExpress as error:
        return 0.0, f"no fused block expresses {error}"
    written = (x.layout.heads for x in layers if x.softcap or x.slopes is not None)
    return sum(written) / len(layers), ""


def _query_width(config: PreTrainedConfig, shape: ModelShape) -> int:
    text: Any = config.get_text_config(decoder=True)
    head = getattr(text, "head_dim", None) or getattr(text, "d_kv", None)
    return shape.heads * head if isinstance(head, int) else shape.hidden


def expert_share(config: PreTrainedConfig) -> float:
    """The share of a layer's experts that one token meets; 1 where it has none."""
    text: Any = config.get_text_config(decoder=True)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    experts = (
        getattr(text, "num_local_experts", None)
        or getattr(text, "num_experts", None)
        or getattr(text, "n_routed_experts", None)
    )
    return min(1.0, chosen / experts) if experts else 1.0


def _layer(layer: nn.Module, config: PreTrainedConfig) -> LayerProfile:
    share = expert_share(config)
    named = list(whole_parameters(layer))
    matrices = sum(p.numel() for _, p in named if p.ndim > 1)
    return LayerProfile(
        matrices=matrices,
        others=sum(p.numel() for _, p in named) - matrices,
        active=int(sum(p.numel() * (share if ".experts." in n else 1.0) for n, p in named)),
        largest=max((p.numel() for _, p in named), default=0),
        tensors=len(named),
    )


def _native(layers: dict[str, nn.Module]) -> str:
    """The type of most of the weights."""
    sizes: dict[torch.dtype, int] = {}
    for layer in layers.values():
        for _, p in whole_parameters(layer):
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    dtype = max(sizes, key=lambda d: sizes[d])
    if dtype not in _NATIVE:
        raise UnsupportedError(
            f"the weights are {dtype}; plans are made for float32, float16 and bfloat16"
        )
    return _NATIVE[dtype]
