"""`offload bench kernels`: every fused kernel beside PyTorch, and the sweeps of their variants."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.commands.arguments import add_device, add_json, path
from offload.commands.console import say

if TYPE_CHECKING:
    from offload.bench.kernels.run import Wanted


def add_parser(benchmarks: Any) -> None:
    """Add this command to the others that measure."""
    parser = benchmarks.add_parser(
        "kernels",
        help="the fused kernels, beside eager PyTorch and cuBLAS",
        description="Every fused kernel on shapes of real models: time, rates, and the share of "
        "what HBM or the matrix units gave in the same run. Inputs rotate through more than L2 "
        "holds, all is timed in CUDA graphs.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="TEXT",
        help="only shapes with TEXT in their name, such as K5120; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside them, too")
    add_device(parser)
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead: every variant of a small-batch product (op gemm, or quant_gemm)",
    )
    parser.add_argument("--out", type=path, metavar="FILE", help="write all figures there, as JSON")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Measure, and print; the exit status says whether all ran."""
    import torch

    from offload.bench.kernels import run

    try:
        device = torch.device(args.device or "cuda")
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {error}") from None
    if args.out:  # before minutes of measuring
        if Path(args.out).is_dir():
            raise IsADirectoryError(f"--out {args.out}: it is a folder; name a file")
        if not Path(args.out).absolute().parent.is_dir():
            raise FileNotFoundError(f"--out {args.out}: there is no folder for it")
    ops, shapes = tuple(op.replace("-", "_") for op in args.op), tuple(args.shape)
    wanted = run.Wanted(device, ops, shapes, args.quick, args.compile)
    found: dict[str, Any]
    failed = False
    if args.sweep:
        found = _sweep(wanted, say if args.json else print)
    else:
        result = run.run_kernels(wanted, say)
        found, failed = result.as_dict(), result.failed
        if not args.json:
            print(result)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    if args.json:
        print(json.dumps(found))
    return 1 if failed else 0


def _sweep(wanted: Wanted, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every variant of one op; raises ValueError for what cannot be swept."""
    from offload.bench.kernels import gemm, gemm_sweep, quant_gemm, run
    from offload.bench.kernels.case import Rates
    from offload.bench.result import machine
    from offload.kernels.call import on_device

    if wanted.quick or wanted.compiled:
        name = "--quick" if wanted.quick else "--compile"
        raise ValueError(f"{name} is not for --sweep, which measures every variant")
    sweeps = {gemm.OP: gemm_sweep.sweep, quant_gemm.OP: quant_gemm.sweep}
    ops, device = wanted.ops or (gemm.OP,), wanted.device
    if len(ops) > 1 or ops[0] not in sweeps:
        raise ValueError(f"--sweep is for one of the ops {' and '.join(sweeps)}")
    if device.type != "cuda":
        raise ValueError("the sweep needs a CUDA device")
    run.check_device(device)
    with on_device(device):
        rates, facts = Rates.measure(device, 1.0), machine(device)
        tell(run.heading(rates, facts))
        return {
            "machine": facts,
            "rates": asdict(rates),
            "sweep": sweeps[ops[0]](device, rates, wanted.shape, tell),
        }
