"""`offload bench plan`: whether plans come true."""

from __future__ import annotations

import argparse
from typing import Any

from offload.commands.arguments import add_device, add_job, add_json, positive
from offload.commands.console import quiet_transformers, say, show


def add_parser(benchmarks: Any) -> None:
    """Add this command to the others that measure."""
    parser = benchmarks.add_parser(
        "plan",
        help="plans beside what they become: predicted and achieved times",
        description="Plan and run models with random weights under several caps of GPU memory and "
        "batches, and compare the predicted times of prefill and decode steps with the achieved "
        "ones, and the batch that a plan chose with others. Shapes are cut to a part of their "
        "layers.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument(
        "--case", action="append", default=[], metavar="TEXT", help="only those with TEXT in them"
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="of every shape")
    add_job(parser, gen_len=8)
    add_device(parser)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure all of this machine first, where that is not kept (under a minute; default: "
        "what a plan cannot do without, in seconds)",
    )
    parser.add_argument(
        "--pictures",
        action="store_true",
        help="also a page of the prefill and one of a decode step: what each resource did, and was "
        "predicted to do",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the cases; the exit status says whether all ran."""
    from dataclasses import replace

    from offload.bench.prediction import CPU_CASES, GPU_CASES, measure_predictions
    from offload.config import OffloadConfig
    from offload.measure.cache import kept_hardware, measured_hardware

    quiet_transformers()
    device = OffloadConfig(device=args.device).compute
    known = CPU_CASES if device.type == "cpu" else GPU_CASES
    cases = [case for case in known if all(text in case.name for text in args.case)]
    if not cases:
        names = "; ".join(case.name for case in known)
        asked = " and ".join(map(repr, args.case))
        raise ValueError(f"--case: none has {asked} in its name; there are {names}")
    if args.layers is not None:
        cases = [replace(case, layers=args.layers) for case in cases]
    if args.measure:
        measured_hardware(None, device, progress=say)
    rates = "measured before, and kept" if kept_hardware(None, device) else "measured in seconds"
    result = measure_predictions(
        cases, device, args.prompt_len, args.gen_len, rates, say, args.pictures
    )
    show(result, args.json)
    return 1 if any(row.problem for row in result.rows) else 0
