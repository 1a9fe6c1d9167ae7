"""A decode step as its arguments look at a glance, before they are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from offload.kernels.step_inputs import MASKS
from offload.models.fused.decode import DecodeSession
from offload.models.kv.cache import layers_of, session_of
from offload.models.specs.spec import ModelSpec


@dataclass(slots=True)
class Step:
    """One more token for every sequence of a cache that has had such a step before."""

    session: DecodeSession
    ids: torch.Tensor  # int64 [batch, 1]
    positions: torch.Tensor | None  # int64 [1 or batch, 1]; None: `past`
    mask: torch.Tensor | None  # [batch, past + 1], of one of MASKS
    past: int

    @classmethod
    def glance(cls, given: Mapping[str, Any], spec: ModelSpec, stream: int) -> Step | None:
        """From a call's arguments by name, if it is safe to issue the step before they are checked:
        what it writes on `stream` goes into the session's own buffers, behind the cache's end.
        """
        cache = cache_argument(given)
        session = session_of(cache, spec) if type(cache) is DynamicCache else None
        if session is None or given.get("inputs_embeds") is not None:
            return None
        layers = layers_of(cache)
        past, batch = layers[0].length, session.batch
        ids: Any = given.get("input_ids")
        mask = given.get("attention_mask")
        positions = given.get("position_ids")
        if (
            0 < past < session.capacity
            and session.serves(layers, session.padded, stream)
            and _fits(ids, session, (batch, 1))
            and (
                _fits(positions, session, (batch, 1), (1, 1))
                if positions is not None
                else mask is None or not spec.positions_from_mask
            )
            and (
                _fits(mask, session, (batch, past + 1), dtypes=MASKS)
                if mask is not None
                else session.padding is None
            )
        ):
            return cls(session, ids, positions, mask, past)
        return None


def cache_argument(given: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments by name: transformers' releases name it differently."""
    cache = given.get("cache")
    return given.get("past_key_values") if cache is None else cache


def _fits(
    tensor: Any,
    session: DecodeSession,
    *shapes: tuple[int, int],
    dtypes: tuple[torch.dtype, ...] = (torch.int64,),
) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.shape in shapes
        and tensor.dtype in dtypes
        and tensor.device == session.device
    )
