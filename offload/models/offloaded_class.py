"""What an offloaded model does otherwise than the plain one, as a class mixed in before its own."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from offload.errors import UnsupportedError
from offload.models.hooked import NotCopied
from offload.models.install import refuse_move
from offload.models.parts import ModelParts
from offload.models.placeholder import Placeholder
from offload.models.quantized.modules import quantised_weights
from offload.scheduler.plan import Plan, Tier


class Offloading(Protocol):
    """What the model asks of its attribute `offload`."""

    @property
    def device(self) -> torch.device: ...
    def refuse_closed(self) -> None: ...
    def prepare_cache(self, cache: Any, max_length: int) -> None: ...
    def close(self) -> None: ...


def become_offloaded(offload: Offloading, parts: ModelParts, plan: Plan) -> None:
    """Give the object a class of its own, with the name and module of its old one, and `offload` as
    its attribute.
    """
    model, device = parts.model, offload.device
    cls = type(model)
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "from_pretrained": cls.from_pretrained,  # what it makes is a plain model
    }
    model.__class__ = type(cls.__name__, (OffloadedModel, cls), body)
    compute: Any = device.index if device.type == "cuda" else "cpu"
    names = {Tier.DEVICE: compute, Tier.CPU: "cpu", Tier.NVME: "disk"}
    # The compute device comes first: transformers sends inputs to the first entry, and compiles
    # over no entry of "cpu" or "disk".
    model.hf_device_map = {  # type: ignore[assignment]
        "": compute,
        **{
            part.layer.name: names[tier]
            for part, tier in zip(parts.layers, plan.tiers, strict=True)
            if tier is not Tier.DEVICE
        },
    }
    model.offload = offload  # type: ignore[assignment]


class OffloadedModel(NotCopied, PreTrainedModel):
    """What is different about an offloaded model, mixed in before the model's own class."""

    offload: Offloading

    def __enter__(self) -> PreTrainedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.offload.close()

    @property
    def device(self) -> torch.device:
        """Where layers run and inputs belong."""
        return self.offload.device

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The model itself, if it is there already and has that dtype; an offloaded model cannot be
        moved or cast.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = (
            device is None
            or device == self.device
            or (device.type == "cuda" == self.device.type and device.index is None)
        )
        if here and (dtype is None or dtype == self.dtype):
            return self
        refuse_move()

    # The same by other names, which scripts call of habit.
    def cuda(self, device: Any = None) -> Any:  # type: ignore[override]
        number = isinstance(device, int)
        return self.to("cuda" if device is None else f"cuda:{device}" if number else device)

    def cpu(self) -> Any:
        return self.to("cpu")

    def half(self, *args: Any) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def float(self, *args: Any) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """As in the plain model; the fused engine learns how long the sequences may become."""
        prepare = super()._prepare_cache_for_generation  # type: ignore[misc]
        # Older releases keep a static cache for the next call, which may be another job's.
        vars(self).pop("_cache", None)
        result = prepare(*args, **kwargs)
        given = inspect.signature(prepare).bind(*args, **kwargs).arguments
        caches = given.get("model_kwargs", {})
        cache = caches.get("cache", caches.get("past_key_values"))
        self.offload.prepare_cache(cache, given.get("max_cache_length", 0))
        return result

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As in the plain model; a closed one, or one with quantised weights, writes no file."""
        self.offload.refuse_closed()
        if any(True for _ in quantised_weights(self)):
            # It would write their codes, and a config that says nothing of them.
            raise UnsupportedError(
                "save_pretrained() of a model with quantised weights: copy their folder instead, "
                "or write one with offload.pack()"
            )
        return super().save_pretrained(*args, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As in the plain model, unless the embedding or the head is streamed."""
        for module in (self.get_input_embeddings(), self.get_output_embeddings()):
            weight = getattr(module, "weight", None)
            if isinstance(weight, Placeholder):
                raise UnsupportedError(
                    f"{weight.weight} is streamed and cannot change its size: resize the "
                    "plain model first, or leave the embedding out of device_map"
                )
        return super().resize_token_embeddings(*args, **kwargs)
