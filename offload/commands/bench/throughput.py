"""`offload bench throughput`: a streamed model beside the bound of the same run and its peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offload.commands.arguments import (
    add_goal,
    add_job,
    add_json,
    add_kv,
    add_placement,
    add_trace,
    add_weights,
    positive,
    quantization,
    size,
)
from offload.commands.console import quiet_transformers, show

if TYPE_CHECKING:
    from offload.bench.setup import Setup
    from offload.bench.subject import Subject
    from offload.bench.workload import Workload

# Arguments that the other measurements of this command do not heed.
NOT_OF_COLD_START = (
    "gen_len", "repeat", "micro_batch", "goal", "kv_on_cpu", "kv_dtype", "kv_attention", "trace",
    "peer",
)  # fmt: skip
NOT_OF_OVERHEAD = ("batch", "prompt_len", *NOT_OF_COLD_START, "keep")


def add_parser(benchmarks: Any) -> None:
    """Add this command to the others that measure."""
    parser = benchmarks.add_parser(
        "throughput",
        help="prefill and decode of a model, streamed",
        description="Prefill and decode of a model whose layers are streamed: seconds, tokens per "
        "second, and the share of what pinned copies or direct reads reached in the same run. All "
        "layers are streamed from CPU memory, unless --device-map or --goal says otherwise; what "
        "stands outside the layers (embedding, head) stays on the compute device. A --shape gets "
        "random bytes, each layer its own.",
    )
    parser.set_defaults(execute=execute)
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights in the shape of a model, such as opt-13b; float16 on a GPU, else "
        "float32, unless --dtype says otherwise; an unknown name lists them",
    )
    subject.add_argument("--model", metavar="FOLDER", help="a checkpoint folder or hub id")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="sequences (default: 32; with the goal throughput, as many as the plan says)",
    )
    add_job(work)
    work.add_argument("--repeat", type=positive, metavar="N", help="take medians of N (default: 1)")
    work.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help="also in micro-batches of N sequences, beside one batch: tokens/s, peak activations",
    )
    add_weights(work)
    add_goal(add_placement(parser, default="cpu, or auto with a --goal"))
    parser.set_defaults(device_map=None)  # cpu, or auto where there is a goal
    parser.set_defaults(prompt_len=None, gen_len=None)  # those of Workload, as --help says them
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--gpu-memory", type=size, metavar="SIZE", help="cap the GPU: 24GiB (default: no cap)"
    )
    limits.add_argument(
        "--cpu-memory",
        type=size,
        metavar="SIZE",
        help="for weights and buffers (default: most of what is free)",
    )
    limits.add_argument(
        "--folder",
        metavar="DIR",
        help="where a random checkpoint is written (default: in the user's cache)",
    )
    limits.add_argument("--keep", action="store_true", help="leave it there")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="also measure: accelerate, resident (plain transformers, all weights on the compute "
        "device, not capped), or offload-resident (the same with this package's engine); may be "
        "repeated",
    )
    parser.add_argument(
        "--engine", default="auto", metavar="NAME", help="auto (default), fused, or transformers"
    )
    add_kv(parser.add_argument_group("keys and values in CPU memory"))
    add_trace(parser)
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--overhead",
        action="store_true",
        help="instead: the Python cost of streaming a layer (shape tiny-deep unless named)",
    )
    other.add_argument(
        "--cold-start",
        action="store_true",
        help="instead: seconds from offload.run to the first token, with nothing in the page cache",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Measure, and print."""
    if args.shape is None and args.model is None:
        if not args.overhead:
            raise ValueError("name what to measure: --shape NAME or --model FOLDER")
        args.shape = "tiny-deep"
    if args.overhead:
        _refuse_unheeded(args, NOT_OF_OVERHEAD)
    elif args.cold_start:
        _refuse_unheeded(args, NOT_OF_COLD_START)

    from offload.bench.cold_start import measure_cold_start
    from offload.bench.overhead import measure_overhead
    from offload.bench.throughput import run_throughput

    quiet_transformers()
    subject, work, setup = _subject(args), _work(args), _setup(args)
    if setup.micro_batch and setup.micro_batch >= work.batch and not setup.choose_batch:
        raise ValueError(f"--micro-batch {setup.micro_batch} is no part of --batch {work.batch}")
    result: Any
    if args.overhead:
        result = measure_overhead(subject, setup)
    elif args.cold_start:
        result = measure_cold_start(subject, work, setup)
    else:
        result = run_throughput(subject, work, setup)
        if not args.json:
            print(result.placement, end="\n\n", file=sys.stderr, flush=True)
    show(result, args.json)
    return 0


def _refuse_unheeded(args: argparse.Namespace, names: Sequence[str]) -> None:
    for name in names:
        if getattr(args, name) not in (None, False, 0, "auto", []):  # their defaults
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} belongs to the measurement of throughput itself")


def _subject(args: argparse.Namespace) -> Subject:
    """What is measured."""
    from offload.bench.subject import Subject
    from offload.config import OffloadConfig
    from offload.models.quantized.wanted import Wishes

    checked = OffloadConfig(device=args.device, dtype=args.dtype or "auto")
    if args.gpu_memory is not None and checked.compute.type == "cpu":
        raise ValueError("--gpu-memory caps a GPU, and layers run on the CPU: see --cpu-memory")
    dtype: Any = None if checked.dtype == "auto" else checked.dtype
    wanted = quantization(args)
    wishes = None if wanted is None else Wishes.of(wanted)
    return Subject(args.shape, args.model, dtype, checked.compute, wishes)


def _work(args: argparse.Namespace) -> Workload:
    """What it is given to do."""
    from offload.bench.workload import Workload

    asked = {
        "batch": args.batch,
        "prompt": args.prompt_len,
        "gen": args.gen_len,
        "repeat": args.repeat,
    }
    return Workload(**{name: value for name, value in asked.items() if value is not None})


def _setup(args: argparse.Namespace) -> Setup:
    """Where weights rest, and what may be used."""
    from offload.bench.setup import Setup

    places = args.device_map
    if places is None:
        places = "cpu" if args.goal is None else "auto"
    return Setup(
        device_map=places,
        gpu_memory=args.gpu_memory,
        cpu_memory=args.cpu_memory,
        prefetch=args.prefetch,
        folder=args.folder,
        keep=args.keep,
        peers=tuple(args.peer),
        engine=args.engine,
        kv_on_cpu=args.kv_on_cpu,
        kv_dtype=args.kv_dtype,
        kv_attention=args.kv_attention,
        trace=args.trace,
        micro_batch=args.micro_batch,
        goal=args.goal,
        choose_batch=args.goal == "throughput" and args.batch is None,
    )
