"""Where a function becomes an op of `torch.ops.offload`, and how one issues its call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from offload.kernels.call import Call, current_stream

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


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensors' GPU the current one: streams, choices and launches are that one's."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch(call: Call, device: torch.device) -> None:
    """Issue a call whose tensors are on `device`, on torch's current stream there."""
    with guard(device):
        call.launch(current_stream(device))
