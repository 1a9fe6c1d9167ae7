"""A model that is built, and its weights' bytes, put together: placed, stored and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import transformers
from transformers import PreTrainedModel

from offload import aio
from offload.checkpoint import Checkpoint
from offload.config import OffloadConfig
from offload.device import ComputeDevice, compute_device
from offload.engine_choice import choose_engine
from offload.home import home_folder
from offload.models.fused.decoder import FusedEngine
from offload.models.hooked import PassOwner
from offload.models.install import install
from offload.models.kv.host_kv import HostKv
from offload.models.parts import ModelParts, take_apart
from offload.models.quantized.layer import adjacent
from offload.models.specs.spec import ModelSpec
from offload.offloaded import Offload
from offload.placement import column_bytes, own_tier_modules, place
from offload.row_copies import row_copies
from offload.scheduler.plan import Plan, Tier
from offload.scheduler.stream import Stream
from offload.sizes import format_size
from offload.store import WeightStore
from offload.store.layout import Layer
from offload.store.pack import Pack, live_pack, needs_pack


def offload_built(
    network: PreTrainedModel, checkpoint: Checkpoint | None, config: OffloadConfig
) -> PreTrainedModel:
    """`network`, streamed as `config` says. Its weights are LazyTensors of `checkpoint`, or real
    ones where that is None.
    """
    device = compute_device(config.compute)
    own_tier = own_tier_modules(network, config.tiers)
    spec, engine_reason = choose_engine(network, config)
    parts = take_apart(network, own_tier, adjacent(network, spec) if spec is not None else None)
    io = aio.tuned(checkpoint.folder if checkpoint is not None else pack_home(config))
    placed = place(network, parts, spec, checkpoint, pack_home(config), config, io)
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
            engine = FusedEngine(
                spec,
                parts,
                owner,
                config.compute,
                host_kv,
                placed.prefill_rows,
                placed.micro_batches,
            )
        Offload(parts, plan, store, owner, device, pack, engine, engine_reason, placed.planned)
    except BaseException:
        store.close()
        if pack is not None:
            pack.remove()
        raise
    return network


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


def pack_home(config: OffloadConfig) -> Path:
    """The folder for weights that must be written once."""
    return Path(config.offload_folder or home_folder() / "packs")


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
    home = pack_home(config)
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
        f"layers, {plan.count(Tier.DEVICE)} resident layers of "
        f"{format_size(plan.weight_bytes(Tier.DEVICE))}, and {plan.slots} slots of "
        f"{format_size(plan.slot_bytes)}; {format_size(plan.reserve_bytes)} was kept free for "
        "activations and KV cache. Lower the batch or the length, or pass the batch_size and "
        "max_length that you use, or a smaller max_memory[0] or prefetch"
    )
