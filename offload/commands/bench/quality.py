"""`offload bench quality`: perplexity of a text under a plain and a quantised model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from offload.commands.arguments import (
    add_json,
    add_placement,
    add_weights,
    path,
    positive,
    quantization,
)
from offload.commands.console import quiet_transformers, show


def add_parser(benchmarks: Any) -> None:
    """Add this benchmark to those of the program."""
    parser = benchmarks.add_parser(
        "quality",
        help="perplexity of a text, plain and quantised",
        description="Perplexity of a text under MODEL and under the same weights quantised, and "
        "their difference.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument("model", metavar="MODEL", help="a plain checkpoint folder, or a hub id")
    parser.add_argument(
        "--text", type=path, required=True, metavar="FILE", help="the text, in UTF-8"
    )
    add_weights(parser)
    parser.add_argument(
        "--against", type=path, metavar="FOLDER", help="a quantised folder, in place of --weights"
    )
    parser.add_argument(
        "--window",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens that see each other (default: 1024)",
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help="of the text (default: all of it)"
    )
    add_placement(parser)
    parser.add_argument(
        "--offload-folder",
        type=path,
        metavar="FOLDER",
        help="for the quantised weights (default: in the user's cache)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Measure, and print."""
    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.text} is not UTF-8 text: {error}") from error

    from offload.bench.quality import measure_quality

    quiet_transformers()
    result = measure_quality(
        args.model,
        text,
        quantization(args),
        against=args.against,
        window=args.window,
        tokens=args.tokens,
        device_map=args.device_map,
        device=args.device,
        dtype=args.dtype or "auto",
        prefetch=args.prefetch,
        offload_folder=args.offload_folder,
        engine="transformers",
    )
    show(result, args.json)
    return 0
