"""`offload pack`: quantises a checkpoint into a folder."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from offload.commands.arguments import (
    add_device,
    add_remote_code,
    add_weights,
    path,
    quantization,
)
from offload.commands.console import quiet_transformers
from offload.progress import Pace
from offload.sizes import format_size

SAY_EVERY = 2.0  # seconds


def add_parser(commands: Any) -> None:
    """Add this command to the program."""
    parser = commands.add_parser(
        "pack",
        help="quantise a checkpoint into a folder",
        description="Quantise the weights of MODEL into the new folder OUT, which this program and "
        "other engines read (compressed-tensors). A run that was stopped is taken up where it was.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, or a hub id")
    parser.add_argument("out", metavar="OUT", type=path, help="a folder that is not there yet")
    add_weights(parser, required=True)
    add_device(parser, "where numbers are worked out")
    parser.add_argument("--revision", metavar="REV", help="of a hub id")
    add_remote_code(parser)


def execute(args: argparse.Namespace) -> int:
    """Write the folder; progress goes to standard error, the folder's name to standard output."""
    wanted = quantization(args)
    assert wanted is not None

    from offload.packed import pack

    quiet_transformers()
    folder = pack(
        args.model,
        args.out,
        wanted,
        device=args.device,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        progress=Progress(),
    )
    print(folder)
    return 0


class Progress:
    """Lines on standard error, not too often, and one at the end."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._pace = Pace(SAY_EVERY)
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        first = self._first = done if self._first is None else self._first
        if not self._pace.due() and done < total:
            return
        text = f"offload: packed {format_size(done)} of {format_size(total)}"
        if first < done < total:
            left = (total - done) * (now - self._start) / (done - first)
            text += f", about {left:.0f} s left"
        elif done == total:
            text += f" in {now - self._start:.1f} s"
        print(text, file=sys.stderr, flush=True)
