"""One call of a decoder: what the fused engine can serve of it, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from offload.models.fused.decode import DecodeSession
from offload.models.fused.padding import Holes, Padding, PaddingCheck, read_padding
from offload.models.fused.step import Step, cache_argument
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
        _check_mode(given, holder, spec)
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        batch, tokens, device = _shape(ids, embeddings, dtype)
        if torch.is_autocast_enabled(device.type):
            raise Unserved("autocast")
        config = holder.config
        cache = _given_cache(given, config)
        past = 0 if cache is None else cache.get_seq_length()
        if past and (kept_as := dtype_of(cache)) != dtype:
            raise Unserved(f"a cache in {kept_as} beside {dtype}")
        mask = given.get("attention_mask")
        _check_mask(mask, batch, past + tokens, device)
        session = session_of(cache, spec) if expect and past and tokens == 1 else None
        if session is not None and session.batch == batch and past < session.capacity:
            padding, check = _expected_padding(session, mask, asked=step is not None)
        else:
            padding, check = _padding(mask), None
        if padding is not None and padding.at_end and past and tokens == 1:
            raise Unserved("an attention mask that hides the new token")
        positions = given.get("position_ids")
        if positions is None:
            positions = _positions(mask, past, tokens, device, spec)
        else:
            _check_positions(positions, batch, tokens, device)
        if cache is not None:
            _adopt(cache, spec, batch, host)
        elif _flag(given, config, "use_cache"):
            cache = new_cache(spec, host=host)
        as_tuple = not _flag(given, config, "return_dict")
        return cls(ids, embeddings, positions.long(), cache, past, padding, check, as_tuple)


def _flag(given: Mapping[str, Any], config: Any, name: str) -> bool:
    """What the call says of `name`, else the model's config, else True."""
    value = given.get(name)
    return getattr(config, name, True) if value is None else value


def _check_mode(given: Mapping[str, Any], holder: Any, spec: ModelSpec) -> None:
    """Refuse what is asked for beside the inputs, by an argument or in the model's config."""
    config = holder.config
    for name, value in given.items():
        if name in _SERVED or value is None or value is False:
            continue
        if not (name == "is_causal" and value is True):
            raise Unserved(f"the argument {name}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise Unserved(f"config.{name}")
    if config.num_hidden_layers != len(spec.layers):  # an early exit
        raise Unserved(f"{config.num_hidden_layers} of the model's layers")
    if getattr(config, "_attn_implementation", None) != spec.attention:
        raise Unserved(f"the attention implementation {config._attn_implementation!r}")
    if holder.training:
        raise Unserved("training mode")


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


def _given_cache(given: Mapping[str, Any], config: Any) -> DynamicCache | None:
    cache = cache_argument(given)
    if cache is not None and not _flag(given, config, "use_cache"):
        raise Unserved("a cache that is not to be used")
    if cache is not None and not isinstance(cache, DynamicCache):
        raise Unserved(f"a cache of the kind {type(cache).__name__}")
    return cache


def _adopt(cache: DynamicCache, spec: ModelSpec, batch: int, host: HostKv | None) -> None:
    """Make it a cache of KvLayers, for this batch."""
    problem = adopt(cache, spec, host=host)
    if problem is not None:
        raise Unserved(problem)
    if layers_of(cache)[0].batch_size not in (0, batch):
        raise Unserved("a cache of another batch")


def _check_mask(mask: Any, batch: int, columns: int, device: torch.device) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise Unserved("an attention mask that is not two-dimensional")
    if tuple(mask.shape) != (batch, columns) or mask.device != device:
        raise Unserved("an attention mask of another shape or device")


def _expected_padding(
    session: DecodeSession, mask: torch.Tensor | None, asked: bool
) -> tuple[Padding | None, PaddingCheck | None]:
    """That of the step before, and its check against the mask; `asked`: it is under way."""
    if mask is None:
        return None, None
    if not asked:
        session.check.ask(mask)
    return session.padding, session.check


def _padding(mask: torch.Tensor | None) -> Padding | None:
    try:
        return None if mask is None else read_padding(mask)
    except Holes as problem:
        raise Unserved(str(problem)) from problem


def _check_positions(positions: Any, batch: int, tokens: int, device: torch.device) -> None:
    if (
        not isinstance(positions, torch.Tensor)
        or positions.dim() != 2
        or positions.shape[0] not in (1, batch)
        or positions.shape[1] != tokens
        or positions.device != device
    ):
        raise Unserved("position_ids of another shape or device")


def _positions(
    mask: torch.Tensor | None, past: int, tokens: int, device: torch.device, spec: ModelSpec
) -> torch.Tensor:
    """As the family counts them where none are given."""
    if spec.positions_from_mask and mask is not None:
        mask = mask.long()
        return (mask.cumsum(1) * mask - 1)[:, past:]
    return torch.arange(past, past + tokens, device=device)[None]
