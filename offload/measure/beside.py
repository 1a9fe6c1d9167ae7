"""CPU memory read, and attended to, beside a full stream up the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.kernels.host_library import why_not_host
from offload.measure.host import HostMemory, rates_beside
from offload.measure.link import stream_up


def beside(
    memory: HostMemory, device: torch.device, link: float, groups: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Rates of a `Hardware`, by name. `link`: what to expect of the stream, bytes per second;
    `seconds`: of each measurement; `groups`: queries a KV head.
    """

    def stream() -> float:
        return stream_up(device, link, seconds)

    read, moved = rates_beside(memory.reader(), stream)
    found: dict[str, Any] = {"host_read_beside": read, "link_beside": moved}
    if why_not_host() is None:
        both = [rates_beside(memory.attention(group), stream) for group in groups]
        for place, name in enumerate(("cpu_attention_beside", "link_beside_attention")):
            found[name] = tuple(
                (group, rates[place]) for group, rates in zip(groups, both, strict=True)
            )
    return found
