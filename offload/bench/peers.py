"""Other ways to run the same model, for figures side by side."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from offload.bench.subject import Subject
from offload.config import OffloadConfig
from offload.home import home_folder
from offload.store.folder import check_folder

# (subject, weights rest in files, folder for them) -> the model, ready to generate
Load = Callable[[Subject, bool, "str | None"], AbstractContextManager[PreTrainedModel]]


@dataclass(frozen=True, slots=True)
class Peer:
    """`capped`: runs under the same GPU limit. `streams`: moves the layers in every pass."""

    name: str
    capped: bool
    streams: bool
    load: Load


@contextlib.contextmanager
def _resident(subject: Subject, on_disk: bool, folder: str | None) -> Iterator[PreTrainedModel]:
    """Plain transformers with all weights on the compute device."""
    yield subject.plain(subject.device)


@contextlib.contextmanager
def _offload_resident(
    subject: Subject, on_disk: bool, folder: str | None
) -> Iterator[PreTrainedModel]:
    """offload itself, with nothing to stream."""
    everywhere = OffloadConfig(
        device_map={"": 0}, dtype=subject.dtype or "auto", device=subject.device
    )
    model: Any = subject.offloaded(everywhere)
    with model:
        yield model


@contextlib.contextmanager
def _accelerate(subject: Subject, on_disk: bool, folder: str | None) -> Iterator[PreTrainedModel]:
    """accelerate's cpu_offload, or its disk_offload."""
    try:
        accelerate = importlib.import_module("accelerate")
    except ImportError as error:
        raise ImportError("the peer is not installed: pip install accelerate") from error
    model = subject.plain(torch.device("cpu"))
    if not on_disk:
        accelerate.cpu_offload(model, execution_device=subject.device)
        yield model
        return
    needed = sum(p.nbytes for p in model.parameters())
    home = check_folder(folder or home_folder() / "bench", needed)
    weights = tempfile.mkdtemp(prefix="accelerate-", dir=home)
    try:
        accelerate.disk_offload(model, weights, execution_device=subject.device)
        yield model
    finally:
        shutil.rmtree(weights, ignore_errors=True)


PEERS = {
    "accelerate": Peer("accelerate", capped=True, streams=True, load=_accelerate),
    "resident": Peer("resident", capped=False, streams=False, load=_resident),
    "offload-resident": Peer("offload-resident", False, False, _offload_resident),
}
