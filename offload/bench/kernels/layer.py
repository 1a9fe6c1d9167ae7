"""A whole layer decoding one token, as the fused engine issues it and as transformers does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

import offload
from offload.bench.kernels.case import Case
from offload.bench.shapes import shape_config
from offload.models.kv.cache import cache_name, common_of

OP = "layer"
DTYPE = torch.bfloat16
LAYERS = 8  # their weights do not fit into L2
SHAPES = ("llama-2-7b", "opt-13b", "qwen2.5-14b", "llama-2-70b")
TINY = ("tiny", "tiny-opt")  # for a CPU
PAST = 1  # columns in the cache: next to nothing beside the weights


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """One case a model and batch."""
    names = TINY if device.type == "cpu" else SHAPES[:2] if quick else SHAPES
    for name in names:
        for batch in (1,) if quick else (1, 8):
            yield _case(name, batch, device)


def _case(name: str, batch: int, device: torch.device) -> Case:
    layers = 4 if "70b" in name else LAYERS
    plain = _model(name, layers, device)
    nbytes = sum(p.nbytes for p in _layers(plain)[0].parameters())
    peers = _peers(plain, batch, device)
    model: Any = offload.run(
        _model(name, layers, device), engine="fused", device=device, device_map="auto"
    )
    launch = _fused(model, batch, device)
    return Case(
        OP,
        f"{name}, batch {batch}, bf16",
        nbytes,
        2 * batch * nbytes / DTYPE.itemsize,
        launch,
        peers,
        copies=layers,
        hbm="read",
    )


def _model(name: str, layers: int, device: torch.device) -> Any:
    """Few layers of the shape, a small vocabulary, all weights random."""
    shape = shape_config(name, DTYPE)
    sizes: dict[str, Any] = shape.to_dict()
    sizes.pop("layer_types", None)  # one entry a layer
    sizes |= {"num_hidden_layers": layers, "vocab_size": 256}
    config: Any = type(shape)(**sizes)
    with torch.device(device):
        kind = getattr(transformers, config.architectures[0])
        model = kind._from_config(config, dtype=DTYPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
    return model.eval().requires_grad_(False)


def _layers(model: Any) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def _fused(model: Any, batch: int, device: torch.device) -> Callable[[int], None]:
    """Issues layer i of the model's next decode step."""
    ids = torch.zeros(batch, PAST, dtype=torch.long, device=device)
    with torch.no_grad():
        output = model(ids, use_cache=True)
        name = cache_name(output)
        cache = output[name]
        for _ in range(2):  # the calls of a step are made by the first
            model(ids[:, :1], use_cache=True, **{name: cache})
    issuer = model.get_decoder().forward.engine.issuer
    return lambda i: issuer.launch(common_of(cache).session, i, i)


def _peers(model: Any, batch: int, device: torch.device) -> dict[str, Callable[[int], Any]]:
    """The plain model's layer i, eager and compiled; without a cache, as PAST is nothing."""
    hidden = torch.randn(batch, 1, model.config.hidden_size, device=device, dtype=DTYPE)
    arguments: dict[str, Any] = {"attention_mask": None}
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is not None:
        positions = torch.zeros(1, 1, dtype=torch.long, device=device)
        arguments["position_embeddings"] = rotary(hidden, positions)

    def run(layers: list[Any]) -> Callable[[int], Any]:
        def one(i: int) -> Any:
            with torch.no_grad():
                return layers[i](hidden, **arguments)

        return one

    plain = list(_layers(model))
    compiled = [torch.compile(layer, mode="max-autotune-no-cudagraphs") for layer in plain]
    return {"eager": run(plain), "compile": run(compiled)}
