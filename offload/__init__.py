"""Runs language models far larger than the GPU: their layers stream from CPU memory or NVMe."""

from offload.api import run
from offload.config import OffloadConfig
from offload.errors import (
    BudgetError,
    CheckpointError,
    ClosedError,
    MissingWeightError,
    OffloadError,
    UnsupportedError,
)
from offload.report import Report
from offload.scheduler.plan import Plan
from offload.version import __version__

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ClosedError",
    "MissingWeightError",
    "OffloadConfig",
    "OffloadError",
    "Plan",
    "Report",
    "UnsupportedError",
    "__version__",
    "run",
]
