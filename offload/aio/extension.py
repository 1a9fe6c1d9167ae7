"""The compiled part, `_aio`, or why it is not there."""

from __future__ import annotations

import importlib
from typing import Any

_aio: Any
try:
    _aio = importlib.import_module("offload.aio._aio")
    WHY_NOT = ""
except ModuleNotFoundError as error:
    _aio = None
    WHY_NOT = "the compiled extension was not built"
    if error.name != "offload.aio._aio":
        WHY_NOT = f"the compiled extension does not load: {error}"
except ImportError as error:
    _aio = None
    WHY_NOT = f"the compiled extension does not load: {error}"
