"""What this machine can do: which backends run here, and whether the tests are root."""

import os
from pathlib import Path

import pytest

from offload.aio.backends import try_out

ROOT = Path(__file__).resolve().parents[2]

_tried: dict[str, dict] = {}


def why_not(backend: str) -> str | None:
    """Why a backend cannot run here, or None."""
    found = _tried.setdefault(backend, try_out(backend))
    return None if found["ok"] else found["reason"]


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
