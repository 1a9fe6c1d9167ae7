"""A Hugging Face checkpoint as byte ranges in files, and as tensors that stand for them."""

from offload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from offload.checkpoint.extent import Extent
from offload.checkpoint.hub import resolve_model

__all__ = ["Checkpoint", "Extent", "open_checkpoint", "resolve_model"]
