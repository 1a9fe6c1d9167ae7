"""Runs language models far larger than the GPU: their layers stream from CPU memory or NVMe."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offload.version import __version__

if TYPE_CHECKING:
    from offload.api import run
    from offload.config import OffloadConfig
    from offload.errors import (
        BudgetError,
        CheckpointError,
        ClosedError,
        JobError,
        MissingWeightError,
        ModelNotFoundError,
        OffloadError,
        UnsupportedError,
    )
    from offload.packed import pack
    from offload.report import Report
    from offload.scheduler.plan import Plan

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ClosedError",
    "JobError",
    "MissingWeightError",
    "ModelNotFoundError",
    "OffloadConfig",
    "OffloadError",
    "Plan",
    "Report",
    "UnsupportedError",
    "__version__",
    "pack",
    "run",
]

# Where each name lives. torch and transformers take seconds to import: `offload --help` and
# `import offload.aio` do without them.
_HOMES = {
    "run": "offload.api",
    "pack": "offload.packed",
    "OffloadConfig": "offload.config",
    "Report": "offload.report",
    "Plan": "offload.scheduler.plan",
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module("offload.aio")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "offload.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
