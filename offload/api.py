"""`offload.run`: from a checkpoint to a transformers model whose layers are streamed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PreTrainedModel

from offload import aio, kernels
from offload.checkpoint import Checkpoint, open_checkpoint, resolve_model
from offload.config import OffloadConfig
from offload.device import ComputeDevice, compute_device
from offload.errors import UnsupportedError
from offload.models.build import build_model
from offload.models.fused.decoder import FusedEngine
from offload.models.hooked import PassOwner
from offload.models.install import install
from offload.models.kv.host_kv import HostKv
from offload.models.parts import ModelParts, take_apart
from offload.models.quantized.layer import adjacent
from offload.models.quantized.methods import read_method
from offload.models.quantized.wanted import Wishes
from offload.models.specs.describe import describe
from offload.models.specs.spec import CannotExpress, ModelSpec
from offload.offloaded import Offload
from offload.packed import quantised_checkpoint
from offload.placement import column_bytes, own_tier_modules, place
from offload.row_copies import row_copies
from offload.scheduler.plan import (
    Plan,
    Tier,
)
from offload.scheduler.setting import Goal
from offload.scheduler.stream import Stream
from offload.sizes import format_size
from offload.store import WeightStore
from offload.store.folder import default_folder
from offload.store.layout import Layer
from offload.store.pack import Pack, live_pack, needs_pack


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

    What comes back is the model class itself, in eval mode. On the transformers engine its logits
    are bit-equal to the plain model's on the same device, on the fused engine equal to rounding.
    `generate`, `pipeline`, streamers and the rest of transformers work on it. `model.offload` holds
    the plan, `report()` and `close()`; the model is a context manager that closes itself.

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
        offload_folder: for packed weights, written only where names or numbers must change (a
            cast, a live model). Default: a cache folder of the user ($OFFLOAD_HOME). Nothing is
            ever written beside the checkpoint.
        dtype: "auto" (as from_pretrained), a torch dtype or its name.
        quantization: a format for the weights of the layers, such as "int4" or "int8", or a dict
            of patterns (see `offload.pack`): a plain checkpoint is quantised once into the
            offload folder, and streamed from there. One that is quantised already needs nothing.
            "w8a8" rounds activations, too: to int8, with a scale a token.
        engine: "transformers" (the model's own modules), "fused" (the layers as one block over
            the project's CUDA kernels; UnsupportedError where it cannot express the model), or
            "auto": fused where a GPU computes, the kernels library loads and the family is known.
        device: where layers run: "cpu", "cuda:1", ... Default: the current GPU, else the CPU.
        prefetch: loads kept ahead of the layer in use; n need n + 1 slots, and a small budget
            lowers n (the report says so).
        batch_size, max_length: what "auto" keeps memory free for on a GPU: KV cache and
            activations of that many sequences (1 unless given) of that many tokens.
        goal: plans instead of filling by size: with device_map "auto", what gives most tokens a
            second ("throughput"), the shortest time ("latency") or takes least GPU memory
            ("fits") for sequences of `prompt_len` + `gen_len` tokens, by this machine's measured
            rates. For throughput the plan also says how many sequences run at once, unless
            batch_size does: `model.offload.planned.choice.setting.batch`. The rates are those that
            `offload info --measure` keeps; without them they are measured in a few seconds, less
            well, and the report says so.
        kv_on_cpu: of batch_size sequences, so many keep keys and values in CPU memory, and CPU
            cores attend to them (see kv_attention) while weights are streamed: more sequences a
            pass over the weights.
            A batch's first batch_size - kv_on_cpu ones keep theirs on the compute device. Takes the
            fused engine (UnsupportedError where that is not to be had).
        kv_dtype: "int8" keeps the keys and values that are in CPU memory as int8, with a float32
            scale a token and head: half the memory, and half the bytes that attention reads and the
            link carries down. Each number is off by half a scale at most, 1/254 of the largest
            beside it. With a goal, plans count on it. Default ("auto"): the model's dtype, exact.
        kv_attention: who attends to the keys and values that are in CPU memory: "cpu", its cores,
            beside the stream ("auto" without a goal), or "gpu", the compute device: those of each
            layer come up the link in every step, ahead of their use. That is quicker where the link
            has time to spare (quantised or resident weights, few sequences of long contexts) or
            cores are few. Takes 128 MiB of the compute device, not what the sequences take. With a
            goal the plan decides.
        model_class: a class (or Auto class, or its name) other than the one config.json names.
        revision, trust_remote_code, attn_implementation: as in from_pretrained.

    Raises:
        CheckpointError, MissingWeightError: damaged or incomplete files, before a weight is read.
        UnsupportedError: a way of quantising that is not read, or a model without layers.
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
            _check_live(model, config, model_class, revision)
            if wishes is not None:
                raise ValueError(
                    "quantization belongs to a folder or hub id, not to a live model: save it, and "
                    "run its folder"
                )
            return offload_built(model, None, config)
        folder = resolve_model(model, revision, trust_remote_code)
        checkpoint = open_checkpoint(folder, read_method)
        build = partial(
            build_model,
            dtype=config.dtype,
            model_class=model_class,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        network = build(checkpoint)
        if wishes is not None:
            own_tier_modules(network, config.tiers)  # these may refuse, and quantising takes long
            _choose_engine(network, config)
            home = _pack_home(config)
            checkpoint = quantised_checkpoint(network, checkpoint, wishes, home, config.compute)
            network = build(checkpoint)
            network.config._name_or_path = network.name_or_path = str(folder)
        return offload_built(network, checkpoint, config)


def _check_live(
    model: PreTrainedModel, config: OffloadConfig, model_class: Any, revision: str | None
) -> None:
    if isinstance(getattr(model, "offload", None), Offload):
        raise ValueError(
            "this model is offloaded already; close() it and build it anew to offload it "
            "differently"
        )
    if config.dtype != "auto":
        raise ValueError(
            f"dtype={config.dtype} with a live model: cast the model first (model.to(...))"
        )
    if model_class is not None or revision is not None:
        raise ValueError(
            "model_class and revision belong to a folder or hub id, not to a live model"
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


def offload_built(
    network: PreTrainedModel, checkpoint: Checkpoint | None, config: OffloadConfig
) -> PreTrainedModel:
    """`network`, streamed as `config` says: the second half of `run`, for a model built already.

    Its weights are LazyTensors, or real ones where `checkpoint` is None.
    """
    device = compute_device(config.compute)
    own_tier = own_tier_modules(network, config.tiers)
    spec, engine_reason = _choose_engine(network, config)
    parts = take_apart(network, own_tier, adjacent(network, spec) if spec is not None else None)
    io = aio.tuned(checkpoint.folder if checkpoint is not None else _pack_home(config))
    placed = place(network, parts, spec, checkpoint, _pack_home(config), config, io)
    config, plan = placed.config, placed.plan
    layers, pack = _pack(parts, plan, checkpoint, config)
    store = WeightStore(layers, plan, device, io)
    try:
        stream = Stream(store, plan.slots, _sites(parts, plan), plan.depth) if plan.slots else None
        owner = PassOwner(stream, device, lambda: _explain_memory(plan), store.check_files)
        install(parts, layers, plan, store, owner, device)
        network.eval()
        engine = None
        if spec is not None:
            host_kv = _host_kv(spec, network.dtype, placed.kv_cpu_bytes, config, device)
            engine = FusedEngine(spec, parts, owner, config.compute, host_kv, placed.prefill_rows)
        Offload(parts, plan, store, owner, device, pack, engine, engine_reason, placed.planned)
    except BaseException:
        store.close()
        if pack is not None:
            pack.remove()
        raise
    return network


def _choose_engine(network: PreTrainedModel, config: OffloadConfig) -> tuple[ModelSpec | None, str]:
    """What the fused engine is to run, or None for the model's own modules; and why.

    Raises UnsupportedError where what was asked for takes the fused engine.
    """
    spec, why = _engine_for(network, config)
    asked = {"kv_on_cpu": config.kv_on_cpu, "kv_dtype": config.kv_dtype if config.int8_kv else ""}
    for name, value in asked.items():
        if value and spec is None:
            raise UnsupportedError(
                f"{name}={value!r} takes the fused engine, and this model runs on {why}: leave it "
                "out, or pass engine='fused', which runs or says what stands against it"
            )
    return spec, why


def _engine_for(network: PreTrainedModel, config: OffloadConfig) -> tuple[ModelSpec | None, str]:
    if config.engine == "transformers":
        return None, "the model's own modules"
    asked, compute = config.engine == "fused", config.compute
    if compute.type == "cpu" and not asked:
        return None, "the model's own modules, as always where the CPU computes"
    if compute.type != "cpu":
        problem = kernels.why_not(compute.index)
        if problem is not None and asked:
            raise UnsupportedError(f"engine='fused' on {compute}: {problem}")
        if problem is not None:
            return None, f"the model's own modules: {problem}"
    try:
        spec = describe(network)
    except CannotExpress as error:
        if asked:
            raise UnsupportedError(
                f"engine='fused' cannot run {type(network).__name__}: no block expresses {error}; "
                "engine='auto' runs the model's own modules then"
            ) from error
        return None, f"the model's own modules: no fused block expresses {error}"
    if compute.type == "cpu":
        return spec, "asked for; on a CPU every kernel is its reference"
    return spec, f"the family {spec.family} on fused kernels"


def _host_kv(
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_cpu_bytes: int,
    config: OffloadConfig,
    device: ComputeDevice,
) -> HostKv | None:
    if not config.kv_on_cpu:
        return None
    # One size for all layers, so that any layer's next cache finds a block.
    sizes = column_bytes(spec, dtype, config)
    row = kv_cpu_bytes * max(sizes) // (sum(sizes) * config.kv_on_cpu)
    lock: Literal["auto", False] = "auto" if config.compute.type == "cuda" else False
    copies, streamed = row_copies(device), config.streamed_kv
    return HostKv(config.gpu_sequences, row, copies, lock, config.int8_kv, streamed)


def _pack_home(config: OffloadConfig) -> Path:
    return Path(config.offload_folder or default_folder() / "packs")


def _pack(
    parts: ModelParts, plan: Plan, checkpoint: Checkpoint | None, config: OffloadConfig
) -> tuple[list[Layer], Pack | None]:
    """The layers with every NVMe tensor in a file as plain bytes; and the pack that must go when
    the model is closed.
    """
    layers = [part.layer for part in parts.layers]
    wanted = [
        layer if tier is Tier.NVME else Layer(layer.name, (), 0)
        for layer, tier in zip(layers, plan.tiers, strict=True)
    ]
    if not any(needs_pack(layer) for layer in wanted):
        return layers, None
    home = _pack_home(config)
    if checkpoint is None:
        pack = live_pack(home)
    else:
        key = checkpoint.fingerprint(
            dtype=parts.model.dtype,
            kind=type(parts.model).__name__,
            transformers=transformers.__version__,
        )
        pack = Pack(home, key)
    try:
        sources = pack.write(wanted)
    except BaseException:
        if checkpoint is None:
            pack.remove()
        raise
    return [layer.with_sources(sources) for layer in layers], pack if checkpoint is None else None


def _sites(parts: ModelParts, plan: Plan) -> list[int]:
    """The layers in the order in which they are expected to run, one entry a place of use; resident
    ones left out.
    """
    return [
        index
        for index, (part, tier) in enumerate(zip(parts.layers, plan.tiers, strict=True))
        if tier is not Tier.DEVICE
        for _ in part.modules
    ]


def _explain_memory(plan: Plan) -> str:
    return (
        f"offload: on the compute device stand {format_size(plan.outside_bytes)} outside the "
        f"layers, {plan.count(Tier.DEVICE)} resident "
        f"layers of {format_size(plan.weight_bytes(Tier.DEVICE))}, and {plan.slots} slots of "
        f"{format_size(plan.slot_bytes)}; "
        f"{format_size(plan.reserve_bytes)} was kept free for activations and KV cache. Lower the "
        f"batch or the length, or pass the "
        "batch_size and max_length that you use, or a smaller max_memory[0] or prefetch"
    )
