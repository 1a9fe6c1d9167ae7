"""CPU memory read, and attended to, beside a full stream up the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.kernels.choices import dtype_name
from offload.kernels.host_library import why_not_host
from offload.measure.host import HostMemory, rates_beside
from offload.measure.link import stream_up


def beside(
    memory: HostMemory,
    device: torch.device,
    link: float,
    dtypes: Sequence[torch.dtype],
    groups: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """Rates of a `Hardware`, by name. `link`: what to expect of the stream, bytes per second;
    `dtypes`: of keys and values; `groups`: queries a KV head; `seconds`: of each measurement.
    """

    def stream() -> float:
        return stream_up(device, link, seconds)

    read, moved = rates_beside(memory.reader(), stream)
    found: dict[str, Any] = {"host_read_beside": read, "link_beside": moved}
    if why_not_host() is None:
        attends, moves = {}, {}
        for dtype in dtypes:
            both = [(n, *rates_beside(memory.attention(n, dtype), stream)) for n in groups]
            attends[dtype_name(dtype)] = tuple((group, rate) for group, rate, _ in both)
            moves[dtype_name(dtype)] = tuple((group, rate) for group, _, rate in both)
        found |= {"cpu_attention_beside": attends, "link_beside_attention": moves}
    return found
