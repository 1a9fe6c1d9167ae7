"""Asynchronous file I/O into memory that a GPU can copy from: files and buffers, nothing else."""

from .buffer import AlignedBuffer, alloc
from .errors import AioClosedError, AioError, AlignmentError, BackendUnavailable, ShortReadError
from .file import AioFile, open
from .future import IOFuture
from .handle import AioHandle
from .pinning import Chunk
from .probe import probe
from .stream import Stream
from .tuning import tuned

__all__ = [
    "AioClosedError",
    "AioError",
    "AioFile",
    "AioHandle",
    "AlignedBuffer",
    "AlignmentError",
    "BackendUnavailable",
    "Chunk",
    "IOFuture",
    "ShortReadError",
    "Stream",
    "alloc",
    "open",
    "probe",
    "tuned",
]
