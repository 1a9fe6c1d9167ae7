"""One call of a decoder: what the fused engine can serve of it, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from offload.models.fused.padding import Holes, Padding, PaddingCheck, read_padding
from offload.models.fused.step import Step
from offload.models.kv.cache import adopt, dtype_of, layers_of, new_cache, session_of
from offload.models.kv.host_kv import HostKv
from offload.models.specs.spec import ModelSpec

_SERVED = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids"),
    *("cache", "past_key_values", "use_cache", "return_dict"),
    "num_items_in_batch",  # for the loss: no business of the layers
}


class Unserved(Exception):
    """A call that is left to transformers' modules; the message says why."""


@dataclass(slots=True)
class Request:
    """The arguments of one call, checked."""

    ids: torch.Tensor | None  # [batch, tokens]
    embeddings: torch.Tensor | None  # [batch, tokens, width], in place of ids
    positions: torch.Tensor  # int64 [1 or batch, tokens]
    cache: DynamicCache | None  # of KvLayers
    past: int  # columns that it holds already
    padding: Padding | None
    check: PaddingCheck | None  # of `padding`, where it is only expected
    as_tuple: bool

    @property
    def batch(self) -> int:
        """Sequences."""
        given = self.embeddings if self.ids is None else self.ids
        assert given is not None
        return given.shape[0]

    @property
    def tokens(self) -> int:
        """New tokens of every row."""
        return self.positions.shape[1]

    @classmethod
    def read(
        cls,
        given: Mapping[str, Any],
        holder: Any,
        spec: ModelSpec,
        dtype: torch.dtype,
        expect: bool = True,
        step: Step | None = None,
        host: HostKv | None = None,
    ) -> Request:
        """From the arguments by name; raises Unserved. A transformers cache becomes one of
        KvLayers.

        `expect`: take a decode step's padding to be that of the step before, and check it later;
        in a `step` that was begun with these arguments, the check is under way. `host`: where the
        last rows' keys and values go, in a cache that becomes one of KvLayers.
        """
        config = holder.config
        for name, value in given.items():
            if name not in _SERVED and value is not None and value is not False:
                if name == "is_causal" and value is True:
                    continue
                raise Unserved(f"the argument {name}")
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, False):
                raise Unserved(f"config.{name}")
        if getattr(config, "_attn_implementation", None) != spec.attention:
            raise Unserved(f"the attention implementation {config._attn_implementation!r}")
        if holder.training:
            raise Unserved("training mode")
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        batch, tokens, device = _shape(ids, embeddings, dtype)
        if torch.is_autocast_enabled(device.type):
            raise Unserved("autocast")
        cache = given.get("cache")
        if cache is None:
            cache = given.get("past_key_values")
        use_cache = given.get("use_cache")
        use_cache = getattr(config, "use_cache", True) if use_cache is None else use_cache
        if cache is not None and not use_cache:
            raise Unserved("a cache that is not to be used")
        if cache is not None and not isinstance(cache, DynamicCache):
            raise Unserved(f"a cache of the kind {type(cache).__name__}")
        past = 0 if cache is None else cache.get_seq_length()
        if past and (kept_as := dtype_of(cache)) != dtype:
            raise Unserved(f"a cache in {kept_as} beside {dtype}")
        mask = given.get("attention_mask")
        _check_mask(mask, batch, past + tokens, device)
        session = session_of(cache, spec) if expect and past and tokens == 1 else None
        check = None
        if session is not None and not (session.batch == batch and past < session.capacity):
            session = None
        if session is not None and mask is not None:
            padding, check = session.padding, session.check
            if step is None:
                check.ask(mask)
        else:
            padding = _padding(mask)
        if padding is not None and padding.at_end and past and tokens == 1:
            raise Unserved("an attention mask that hides the new token")
        positions = given.get("position_ids")
        if positions is None:
            positions = _positions(mask, past, tokens, device, spec)
        elif (
            not isinstance(positions, torch.Tensor)
            or positions.dim() != 2
            or positions.shape[0] not in (1, batch)
            or positions.shape[1] != tokens
            or positions.device != device
        ):
            raise Unserved("position_ids of another shape or device")
        if cache is None:
            cache = new_cache(spec, host=host) if use_cache else None
        else:
            problem = adopt(cache, spec, host=host)
            if problem is not None:
                raise Unserved(problem)
            if layers_of(cache)[0].batch_size not in (0, batch):
                raise Unserved("a cache of another batch")
        as_dict = given.get("return_dict")
        as_dict = getattr(config, "return_dict", True) if as_dict is None else as_dict
        return cls(ids, embeddings, positions.long(), cache, past, padding, check, not as_dict)


def _shape(ids: Any, embeddings: Any, dtype: torch.dtype) -> tuple[int, int, torch.device]:
    """Batch, tokens and device of a call."""
    if (ids is None) == (embeddings is None):
        raise Unserved("not one of input_ids and inputs_embeds")
    given = embeddings if ids is None else ids
    if not isinstance(given, torch.Tensor) or given.dim() != (3 if ids is None else 2):
        raise Unserved("inputs of another shape")
    if ids is None and given.dtype != dtype:
        raise Unserved(f"inputs_embeds in {given.dtype} beside {dtype}")
    batch, tokens = given.shape[:2]
    if not batch or not tokens:
        raise Unserved("no tokens")
    return batch, tokens, given.device


def _check_mask(mask: Any, batch: int, columns: int, device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise Unserved("an attention mask that is not two-dimensional")
    if tuple(mask.shape) != (batch, columns) or mask.device != device:
        raise Unserved("an attention mask of another shape or device")


def _padding(mask: torch.Tensor | None) -> Padding | None:
    try:
        return None if mask is None else read_padding(mask)
    except Holes as problem:
        raise Unserved(str(problem)) from problem


def _positions(
    mask: torch.Tensor | None, past: int, tokens: int, device: torch.device, spec: ModelSpec
) -> torch.Tensor:
    """As the family counts them where none are given."""
    if spec.positions_from_mask and mask is not None:
        mask = mask.long()
        return (mask.cumsum(1) * mask - 1)[:, past:]
    return torch.arange(past, past + tokens, device=device)[None]
