"""Arguments of attention: tests vary those of scores one by one, calls take them as `Scores`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offload.kernels.scores import Scores

NAMES = {field.name for field in fields(Scores)}


def scored(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments as the calls, and the references, take them."""
    found = {name: value for name, value in arguments.items() if name not in NAMES}
    scores = {name: value for name, value in arguments.items() if name in NAMES}
    return {**found, "scores": Scores(**scores)}
