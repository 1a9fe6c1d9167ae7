"""What commands say on standard error, and what they let transformers say."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """A line of progress, at once: standard output is for the result alone."""
    print(line, file=sys.stderr, flush=True)


def quiet_transformers() -> None:
    """No warnings and progress bars of transformers' between the lines of a command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
