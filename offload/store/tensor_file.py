"""safetensors files as they are written here: data from a multiple of 4 KiB on, each tensor aligned
to its elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint import safetensors_header
from offload.errors import OffloadError
from offload.store.reads import SECTOR

_DTYPE_NAMES = {dtype: name for name, dtype in safetensors_header.DTYPES.items()}

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape by name


def file_head(tensors: Tensors) -> tuple[bytes, dict[str, int]]:
    """What a file of these tensors begins with, and where in the file each has its place.

    No gaps are allowed between tensors; those of large elements come first, which aligns all.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    at = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        offsets[name] = at
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % SECTOR)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in offsets.items()}


def holds(file: Path, tensors: Tensors) -> bool:
    """Whether a whole file with these tensors is there already; a damaged one is not."""
    try:
        extents = safetensors_header.read_header(str(file))[0]
    except (OSError, OffloadError):
        return False
    return {n: (e.dtype, tuple(e.shape)) for n, e in extents.items()} == dict(tensors)
