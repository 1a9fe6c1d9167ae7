"""`offload.run`: from a checkpoint to a transformers model whose layers are streamed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from offload.assemble import offload_built, pack_home
from offload.checkpoint import Checkpoint, open_checkpoint, resolve_model
from offload.config import OffloadConfig
from offload.engine_choice import choose_engine
from offload.models.build import build_model
from offload.models.quantized.methods import read_method
from offload.models.quantized.wanted import Wishes
from offload.offloaded import Offload
from offload.packed import quantised_checkpoint
from offload.placement import own_tier_modules
from offload.scheduler.setting import Goal


def run(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    device_map: str | Mapping[str, Any] = "auto",
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str = "auto",
    quantization: str | Mapping[str, str] | None = None,
    engine: str = "auto",
    device: torch.device | str | int | None = None,
    prefetch: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    goal: str | None = None,
    prompt_len: int | None = None,
    gen_len: int | None = None,
    kv_on_cpu: int = 0,
    kv_dtype: str = "auto",
    kv_attention: str = "auto",
    model_class: type | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A transformers model that runs although it does not fit: its layers are streamed.

    The result is an instance of the model's own class, in eval mode. On the transformers engine its
    logits are bit-equal to the plain model's on the same device; on the fused engine they differ by
    rounding. `generate`, `pipeline`, streamers and the rest of transformers work on it.
    `model.offload` holds the plan, `report()` and `close()`; the model is a context manager that
    closes itself.

    Args:
        model: a checkpoint folder (safetensors or .bin, single or sharded), a hub id (taken from
            the local cache first), or a live PreTrainedModel, which is taken over: it is the same
            object, and its layer weights move to the store.
        device_map: where layers rest. "auto" fills the compute device, then CPU memory, and the
            rest stays in files; "cpu" and "nvme" (or "disk") put every layer there; a dict maps
            module names (a layer, a prefix, or a module outside the layers such as the embedding)
            to 0, "cpu" or "nvme". Unlike accelerate, "cpu" says where weights rest: they are still
            computed on `device`. What stands outside the layers stays on the compute device
            unless it is named.
        max_memory: bytes or text per place, {0: "20GiB", "cpu": "64GiB"}. The entry of a GPU
            covers everything there: resident weights, slots, activations and KV cache. "cpu"
            covers weights at rest and buffers for reads; where the CPU computes, it covers all
            weights in memory. An explicit value overrides what is detected.
        offload_folder: for weights that are written because no file holds them as they are
            streamed (a cast, a live model, `quantization`). Default: a cache folder of the user
            ($OFFLOAD_HOME). Nothing is ever written beside the checkpoint.
        dtype: "auto" (as from_pretrained), a torch dtype or its name.
        quantization: a format for the weights of the layers, such as "int4" or "int8", or a dict
            of patterns (see `offload.pack`): a plain checkpoint is quantised once into the
            offload folder, and streamed from there. One that is quantised already needs nothing.
            "w8a8" rounds activations, too: to int8, with a scale a token.
        engine: "transformers" (the model's own modules), "fused" (the layers as one block over
            the project's CUDA kernels; UnsupportedError where it cannot express the model), or
            "auto": fused where a GPU computes, the kernels library loads and the family is known.
        device: where layers run: "cpu", "cuda:1", ... Default: the current GPU, else the CPU.
        prefetch: loads kept ahead of the layer in use (unless given 2 on a GPU, 1 on a CPU); n need
            n + 1 slots, and a small budget lowers n (the report says so).
        batch_size, max_length: what memory is kept free for on a GPU: KV cache and activations of
            that many sequences (1 unless given) of that many tokens (unless given as many as the
            model allows, 2048 at most).
        goal, prompt_len, gen_len: plan instead of filling by size, for most tokens a second
            ("throughput"), the shortest time ("latency") or the least GPU memory ("fits"), for
            sequences of `prompt_len` + `gen_len` tokens, by this machine's measured rates. For
            throughput the plan also chooses how many sequences run at once, unless batch_size
            does: `model.offload.planned.choice.setting.batch`. device_map, prefetch, max_length,
            kv_on_cpu and kv_attention are the plan's, too: leave them out. The rates are those that
            `offload info --measure` keeps; without them they are measured in a few seconds, less
            precisely, and the report says so.
        kv_on_cpu: how many of batch_size sequences, the last ones of a batch, keep their keys and
            values in CPU memory, where CPU cores attend to them while weights are streamed (see
            kv_attention). More sequences then share each pass over the weights. Requires the fused
            engine (else UnsupportedError).
        kv_dtype: "int8" keeps the keys and values that are in CPU memory as int8, with a float32
            scale a token and head: half the memory, and half the bytes that attention reads and the
            link carries down. Each number is off by half a scale at most, 1/254 of the largest of
            its token and head. With a goal, plans count on it. Default ("auto"): the model's
            dtype, exact.
        kv_attention: what attends to the keys and values in CPU memory: "cpu", its cores, beside
            the stream ("auto" without a goal), or "gpu", the compute device: in every step, those
            of each layer come up the link ahead of their use. That is quicker where the link has
            time to spare (quantised or resident weights, few sequences of long contexts) or cores
            are few. It takes 128 MiB of the compute device, however long the sequences are. With a
            goal the plan decides.
        model_class: a class (or Auto class, or its name) other than the one config.json names.
        revision, trust_remote_code, attn_implementation: as in from_pretrained.

    Raises:
        ModelNotFoundError: a name that is neither a folder nor a hub id that can be had.
        CheckpointError, MissingWeightError: damaged or incomplete files, before a weight is read.
        UnsupportedError: a way of quantising that is not read, a model without layers, or one that
            the engine that was asked for cannot run.
        BudgetError: memory or disk that cannot hold the least that is needed, with the numbers.
        ValueError, TypeError: an argument, by name and value.
    """
    config = OffloadConfig(
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        dtype=dtype,
        engine=engine,
        device=device,
        prefetch=prefetch,
        batch_size=1 if batch_size is None else batch_size,
        max_length=max_length,
        goal=goal,
        prompt_len=prompt_len,
        gen_len=gen_len,
        choose_batch=goal == Goal.THROUGHPUT.value and batch_size is None,
        kv_on_cpu=kv_on_cpu,
        kv_dtype=kv_dtype,
        kv_attention=kv_attention,
    )
    wishes = None if quantization is None else Wishes.of(quantization)
    # Tensors made in inference mode would be of no use outside of it.
    with torch.inference_mode(False):
        if isinstance(model, PreTrainedModel):
            of_files = {
                "model_class": model_class,
                "revision": revision,
                "attn_implementation": attn_implementation,
            }
            _check_live(model, config, wishes, of_files)
            return offload_built(model, None, config)
        folder = resolve_model(model, revision, trust_remote_code)
        build = partial(
            build_model,
            dtype=config.dtype,
            model_class=model_class,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        checkpoint = open_checkpoint(folder, read_method)
        network = build(checkpoint)
        if wishes is not None:
            checkpoint = _quantised(network, checkpoint, wishes, config)
            network = build(checkpoint)
            network.config._name_or_path = network.name_or_path = str(folder)
        return offload_built(network, checkpoint, config)


def _quantised(
    network: PreTrainedModel, checkpoint: Checkpoint, wishes: Wishes, config: OffloadConfig
) -> Checkpoint:
    """`checkpoint` as `wishes` have it, in the offload folder."""
    own_tier_modules(network, config.tiers)  # these may refuse, and quantising takes long
    choose_engine(network, config)
    return quantised_checkpoint(network, checkpoint, wishes, pack_home(config), config.compute)


def _check_live(
    model: PreTrainedModel,
    config: OffloadConfig,
    wishes: Wishes | None,
    of_files: Mapping[str, Any],
) -> None:
    """Refuse a live model that cannot be taken over, or arguments that are for checkpoints."""
    if isinstance(getattr(model, "offload", None), Offload):
        raise ValueError(
            "this model is offloaded already; close() it and build it anew to offload it "
            "differently"
        )
    if config.dtype != "auto":
        raise ValueError(
            f"dtype={config.dtype} with a live model: cast the model first (model.to(...))"
        )
    for name, value in of_files.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} belongs to a folder or hub id, not to a live model: leave it out"
            )
    if getattr(model, "hf_device_map", None):
        raise ValueError(
            "this model was dispatched by accelerate (it has hf_device_map); load it without "
            "device_map"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "this model has parameters on the meta device: there are no weights to take over"
        )
    if wishes is not None:
        raise ValueError(
            "quantization belongs to a folder or hub id, not to a live model: save it, and run its "
            "folder"
        )
