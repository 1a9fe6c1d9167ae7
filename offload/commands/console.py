"""What commands say on standard error, and what they let transformers say."""

from __future__ import annotations

import json
import sys
from typing import Any


def say(line: str) -> None:
    """A line of progress, at once: standard output is for the result alone."""
    print(line, file=sys.stderr, flush=True)


def show(result: Any, as_json: bool) -> None:
    """A result as text, or its `as_dict()` as one JSON object."""
    print(json.dumps(result.as_dict()) if as_json else result)


def quiet_transformers() -> None:
    """No warnings and progress bars of transformers' between the lines of a command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
