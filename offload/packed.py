"""`offload.pack`: a checkpoint's weights, quantised once into a folder; and the folders that
`offload.run(..., quantization=...)` makes for itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from offload.checkpoint import Checkpoint, open_checkpoint, resolve_model
from offload.config import OffloadConfig
from offload.errors import CheckpointError, UnsupportedError
from offload.models.build import build_model
from offload.models.quantized.methods import read_method
from offload.models.quantized.wanted import Wishes
from offload.models.quantized.write import write_quantised
from offload.progress import LoggedProgress

_log = logging.getLogger(__name__)
_ANEW = "was written by an earlier run; remove the folder, and it is written anew"


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
        quantization: a format for the Linears of the layers (int4, int8, fp8, mxfp4, w8a8; see
            `WeightFormat.parse`, with -clip at the end: every group's range is chosen by its
            error), or a dict of patterns: {"default": "int4", "lm_head|layers\\\\.0\\\\.": "int8"}.
            A pattern is a regular expression that is searched for in the names of modules; the
            first that is found decides. Heads and embeddings are quantised where one names them,
            both as one tensor where they are tied and the embeddings are named; a head that is
            given another format than they is untied. "none" leaves a weight as it is.
        device: where the numbers are worked out (default: the GPU, if there is one).
        revision, trust_remote_code: as in from_pretrained.
        progress: called with the bytes of the checkpoint that are done, and with all.

    The folder is in the layout that compressed-tensors publishes, and appears whole; what a
    stopped run left in `out`.partial is used by the next.

    Raises FileExistsError where `out` is there; CheckpointError, ValueError, UnsupportedError,
    BudgetError or OSError, as one line that names weight and file, for what cannot be done.
    """
    wishes = Wishes.of(quantization)
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise TypeError(f"out must be the path of a folder that is not there yet, got {out!r}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of two numbers of bytes, got {progress!r}")
    compute = OffloadConfig(device=device).compute
    checkpoint = open_checkpoint(resolve_model(model, revision, trust_remote_code))
    network = build_model(checkpoint, trust_remote_code=trust_remote_code)
    return write_quantised(network, checkpoint, wishes, out, device=compute, progress=progress)


def quantised_checkpoint(
    network: PreTrainedModel,
    checkpoint: Checkpoint,
    wishes: Wishes,
    home: Path,
    device: torch.device,
) -> Checkpoint:
    """`checkpoint`, on which the lazy `network` was built, quantised into a folder of `home`:
    written once, used by every later run that asks for the same. The log tells how far it is.

    Raises UnsupportedError for a checkpoint that is quantised already, else as `pack`.
    """
    if checkpoint.quantization is not None:
        raise UnsupportedError(
            f"{checkpoint.folder} is quantised already "
            f"({checkpoint.quantization['quant_method']}); leave out quantization= to run it so"
        )
    folder = home / f"quantised-{checkpoint.fingerprint(quantization=wishes.key)}"
    if not folder.is_dir():
        try:
            _log.info("quantising %s into %s", checkpoint.folder, folder)
            told = LoggedProgress(_log, "quantised")
            write_quantised(network, checkpoint, wishes, folder, device=device, progress=told)
        except FileExistsError:  # another process was quicker
            if not folder.is_dir():
                raise
    try:
        found = open_checkpoint(folder, read_method)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {folder} {_ANEW}") from error
    if found.quantization is None:
        raise CheckpointError(
            f"{folder} has no config.json that says how it is quantised. It {_ANEW}"
        )
    return found
