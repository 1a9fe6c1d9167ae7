"""`offload bench host-attention`: attention on CPU cores beside a plain read of the same bytes."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from offload.commands.arguments import add_device, add_json
from offload.commands.console import say, show


def add_parser(benchmarks: Any) -> None:
    """Add this command to the others that measure."""
    parser = benchmarks.add_parser(
        "host-attention",
        help="attention of decode steps on CPU cores, beside a plain read of the same bytes",
        description="Attention on CPU cores over keys and values in CPU memory, on shapes of real "
        "models, beside a read of the same bytes in the same pieces by the same threads.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument(
        "--shape", action="append", default=[], metavar="TEXT", help="only those with TEXT in them"
    )
    parser.add_argument(
        "--kv",
        action="append",
        default=[],
        choices=("bf16", "fp16", "int8"),
        help="keys and values (default: bf16); may be repeated",
    )
    parser.add_argument(
        "--path",
        default="auto",
        metavar="NAME",
        help="portable, avx2, avx512, ... (default: the quickest of this CPU)",
    )
    parser.add_argument(
        "--spare",
        type=int,
        action="append",
        metavar="N",
        help="all but N cores; may be repeated, to compare numbers of threads (default: all but "
        "one or two, beside a stream as many as the engine)",
    )
    parser.add_argument("--sweep", action="store_true", help="every way to ask for lines ahead")
    parser.add_argument(
        "--beside-stream",
        action="store_true",
        help="while pinned copies run to the GPU (without one: within CPU memory), and their rate",
    )
    add_device(parser, "where those go")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Measure, and print."""
    from offload.bench.host_attention import SHAPES, measure_host_attention
    from offload.config import OffloadConfig
    from offload.device import compute_device
    from offload.kernels.host_library import PATHS, host_library
    from offload.kernels.host_pool import HostPool

    if args.device is not None and not args.beside_stream:
        raise ValueError("--device goes with --beside-stream: attention itself runs on the CPU")
    shapes = [s for s in SHAPES if all(text in s.name for text in args.shape)]
    if not shapes:
        known = ", ".join(shape.name for shape in SHAPES)
        raise ValueError(f"--shape {args.shape[0]}: no shape is called so; there are {known}")
    if args.path not in ("auto", *host_library().paths()):
        known = ", ".join(host_library().paths())
        what = "this CPU has no such path" if args.path in PATHS else "there is no such path"
        raise ValueError(f"--path {args.path}: {what}; it can run {known}")
    device = None
    if args.beside_stream:
        device = compute_device(OffloadConfig(device=args.device).compute)
    with contextlib.ExitStack() as stack:
        result = measure_host_attention(
            shapes,
            args.kv or ["bf16"],
            pools=[stack.enter_context(HostPool(spare=n)) for n in args.spare or [None]],
            path=args.path,
            all_threads=device is None or args.spare is not None,
            sweep=args.sweep,
            device=device,
            say=say,
        )
    show(result, args.json)
    return 0
