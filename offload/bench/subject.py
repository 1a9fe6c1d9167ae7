"""The model that is measured: a shape with random weights, or a checkpoint folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from offload.assemble import offload_built
from offload.bench.files import drop_cache, weight_files
from offload.bench.random_model import random_model, write_random_checkpoint
from offload.bench.random_quantised import with_random_codes
from offload.bench.shapes import shape_config
from offload.bench.workload import Workload
from offload.checkpoint import Checkpoint, open_checkpoint, resolve_model
from offload.checkpoint.lazy import LazyTensor
from offload.config import OffloadConfig
from offload.home import expanded, home_folder
from offload.models.build import build_model
from offload.models.limits import check_length
from offload.models.modules import find_layers, shared_buffers, shared_parameters
from offload.models.profile import expert_share
from offload.models.quantized.methods import read_method
from offload.models.quantized.modules import quantised_weights, whole_parameters
from offload.models.quantized.wanted import Wishes
from offload.packed import quantised_checkpoint


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model's layers weigh; `active` counts the parameters that one token meets."""

    layers: int
    layer_bytes: int
    layer_parameters: int
    active_parameters: int
    total_bytes: int
    products: tuple[tuple[int, int], ...] = ()  # [outputs, inputs] of the last layer's weights
    formats: tuple[str, ...] = ()  # that quantised weights are stored in
    step_bytes: int = 0  # of weights that a decode step of one token reads, as they are stored

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sizes:
        """Of a model whose weights are real or lazy."""
        layers = find_layers(model)
        whole = [p for layer in layers.values() for p in whole_parameters(layer)]
        share = expert_share(model.config)
        return cls(
            layers=len(layers),
            layer_bytes=sum(p.nbytes for layer in layers.values() for p in layer.parameters()),
            layer_parameters=sum(p.numel() for _, p in whole),
            active_parameters=int(
                sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in whole)
            ),
            total_bytes=sum(p.tensor.nbytes for p in shared_parameters(model)),
            products=tuple(
                (p.shape[0], p.shape[1])
                for _, p in whole_parameters(list(layers.values())[-1])
                if p.ndim == 2
            ),
            formats=tuple(sorted({f for _, w in quantised_weights(model) for f in w.formats})),
            step_bytes=_step_bytes(model, share),
        )


def _step_bytes(model: nn.Module, share: float) -> int:
    """Layers, norms and head, of experts a `share`; an embedding's table only where it is the head,
    too: of the others a step reads a row.
    """
    total = 0.0
    for shared in shared_parameters(model):
        if all(isinstance(b.module, nn.Embedding) for b in shared.bindings):
            continue
        expert = ".experts." in shared.bindings[0].name
        total += shared.tensor.nbytes * (share if expert else 1.0)
    return int(total)


@dataclass(frozen=True)
class Subject:
    """One model; exactly one of `shape` and `folder` names it. `dtype` None is the checkpoint's.
    Its weights are quantised as `wishes` say.
    """

    shape: str | None
    folder: str | None
    dtype: torch.dtype | None
    device: torch.device  # where layers run, and where random weights are made
    wishes: Wishes | None = None
    layers: int | None = None  # of the shape, if not all

    def __post_init__(self) -> None:
        if (self.shape is None) == (self.folder is None):
            raise ValueError("name either a shape or a checkpoint folder to measure")

    @property
    def name(self) -> str:
        """For tables."""
        return self.shape or str(self.folder)

    def build(self) -> PreTrainedModel:
        """The model with lazy weights."""
        if self.shape is not None:
            config = shape_config(self.shape, self._random_dtype, self.layers)
            model = random_model(config, self.device)
            if self.wishes is not None:
                with_random_codes(model, self.wishes, self.device)
            return model
        return build_model(self._checkpoint(), dtype=self.dtype or "auto")

    def sizes_for(self, work: Workload) -> Sizes:
        """Its sizes. Raises ValueError where the work has more positions than the model."""
        model = self.build()
        check_length(model.config, work.prompt, work.gen)
        return Sizes.of(model)

    def _checkpoint(self) -> Checkpoint:
        """The folder's; a plain one is quantised first, if it is to be."""
        checkpoint = open_checkpoint(resolve_model(self.folder or ""), read_method)
        if self.wishes is None:
            return checkpoint
        home = home_folder() / "packs"
        plain = build_model(checkpoint)
        return quantised_checkpoint(plain, checkpoint, self.wishes, home, self.device)

    def offloaded(self, config: OffloadConfig) -> PreTrainedModel:
        """The model under offload; random weights go straight to their tier."""
        if self.folder is not None:
            checkpoint = self._checkpoint()
            return offload_built(build_model(checkpoint, dtype=config.dtype), checkpoint, config)
        return offload_built(self.build(), None, config)

    def plain(self, place: torch.device) -> PreTrainedModel:
        """The model as transformers alone would have it, all weights on `place`."""
        model = self.build()
        for shared in shared_parameters(model):
            # Whether gradients are wanted decides which matrix product PyTorch takes on a CPU.
            parameter = nn.Parameter(_real(shared.tensor, place), shared.tensor.requires_grad)
            for b in shared.bindings:
                b.module._parameters[b.key] = parameter
        for shared in shared_buffers(model):
            buffer = _real(shared.tensor, place)
            for b in shared.bindings:
                b.module._buffers[b.key] = buffer
        return model.eval()

    @contextlib.contextmanager
    def on_disk(self, parent: str | None, keep: bool) -> Iterator[Subject]:
        """The model as a checkpoint folder that no cache holds; one written here goes again."""
        if self.folder is not None:
            used = self._checkpoint().folder
            drop_cache(weight_files(used))
            yield Subject(None, str(used), self.dtype, self.device)
            return
        config = shape_config(self.shape or "", self._random_dtype, self.layers)
        home = expanded(parent or home_folder() / "bench")
        folder = home / f"{self.shape}-{str(self._random_dtype).removeprefix('torch.')}"
        stands = (folder / "config.json").exists()
        used = folder
        try:
            write_random_checkpoint(config, folder, self.device)
            if self.wishes is not None:
                plain = open_checkpoint(folder)
                made = quantised_checkpoint(
                    build_model(plain), plain, self.wishes, home, self.device
                )
                used = made.folder
            drop_cache(weight_files(used))
            yield Subject(None, str(used), self._random_dtype, self.device)
        finally:
            if not keep and not stands:
                shutil.rmtree(folder, ignore_errors=True)
                if used != folder:
                    shutil.rmtree(used, ignore_errors=True)

    @property
    def _random_dtype(self) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        return torch.float16 if self.device.type == "cuda" else torch.float32


def _real(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    value = tensor.read() if isinstance(tensor, LazyTensor) else tensor.detach()
    if place.type == "cpu" and value.is_pinned():
        return value.clone()  # ordinary memory, as any program would have it
    return value.to(place)
