"""Where a function becomes an op of `torch.ops.offload`, and how one issues its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.kernels.call import Call, current_stream, on_device

_library = torch.library.Library("offload", "DEF")


def define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Make an op of `run`, whose outputs on fake tensors are those of `shape`."""
    name = schema[: schema.index("(")]
    # The kernels read what they are given where it lies: no compiler may change the strides.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _library.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"offload::{name}", shape, lib=_library)


def launch(call: Call, device: torch.device) -> None:
    """Issue a call whose tensors are on `device`, on torch's current stream there."""
    with on_device(device):
        call.launch(current_stream(device))
