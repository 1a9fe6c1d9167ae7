"""Runs language models far larger than the GPU: their layers stream from CPU memory or NVMe."""

from offload.version import __version__

__all__ = ["__version__"]
