"""`offload.pack`: a checkpoint's weights, quantised once into a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from offload.checkpoint import open_checkpoint, resolve_model
from offload.models.build import build_model
from offload.models.quantized.wanted import Wishes
from offload.models.quantized.write import write_quantised


def pack(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    quantization: str | Mapping[str, str],
    *,
    device: torch.device | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write `model`, a plain checkpoint folder or hub id, quantised into the new folder `out`.

    Args:
        quantization: a format for the Linears of the layers (int4, int8, fp8, mxfp4; see
            `WeightFormat.parse`, with -clip at the end: every group's range is chosen by its
            error), or a dict of patterns: {"default": "int4", "lm_head|layers\\\\.0\\\\.": "int8"}.
            A pattern is a regular expression that is searched for in the names of modules; the
            first that is found decides. Heads and embeddings are quantised where one names them;
            "none" leaves a weight as it is.
        device: where the numbers are worked out (default: the GPU, if there is one).
        revision, trust_remote_code: as in from_pretrained.
        progress: called with the bytes of the checkpoint that are done, and with all.

    The folder is in the layout that compressed-tensors publishes, and appears whole; what a
    stopped run left in `out`.partial is used by the next.

    Raises FileExistsError where `out` is there; CheckpointError, ValueError, UnsupportedError,
    BudgetError or OSError, as one line that names weight and file, for what cannot be done.
    """
    wishes = Wishes.of(quantization)
    checkpoint = open_checkpoint(resolve_model(model, revision, trust_remote_code))
    network = build_model(checkpoint, trust_remote_code=trust_remote_code)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return write_quantised(network, checkpoint, wishes, out, device=device, progress=progress)
