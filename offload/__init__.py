"""Runs language models far larger than the GPU by streaming their layers from CPU memory or NVMe."""

from offload.version import __version__

__all__ = ["__version__"]
