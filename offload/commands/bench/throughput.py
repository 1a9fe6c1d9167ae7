"""`offload bench`: measure a model's throughput, the disk, the link to the GPU, or kernels."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from offload.aio import benchmark
from offload.commands import predictions, quality
from offload.commands.arguments import (
    add_goal,
    add_placement,
    add_trace,
    add_weights,
    count,
    positive,
    quantization,
    size,
)


def add_parser(commands: Any) -> None:
    """Add this command to the program."""
    parser = commands.add_parser(
        "bench",
        help="measure throughput beside the bound of the same run",
        description="Measure, beside the bound of the same run.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_throughput(benchmarks)
    nvme = benchmarks.add_parser(
        "nvme",
        help="plain reads and writes of a drive",
        description="What a drive gives by block size, requests in flight and backend, through "
        "the engine that streams weights.",
    )
    benchmark.add_nvme_arguments(nvme)
    nvme.set_defaults(execute=benchmark.run_nvme)
    link = benchmarks.add_parser(
        "link",
        help="copies between pinned CPU memory and a GPU",
        description="What the link to a GPU gives by size of the copy.",
    )
    benchmark.add_link_arguments(link)
    link.set_defaults(execute=benchmark.run_link)
    _add_kernels(benchmarks)
    predictions.add_parser(benchmarks)
    quality.add_parser(benchmarks)
    _add_host_attention(benchmarks)


def _add_throughput(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "throughput",
        help="prefill and decode of a model, streamed",
        description="Prefill and decode of a model whose layers are streamed: seconds, tokens per "
        "second, and the share of what pinned copies or direct reads reached in the same run. All "
        "layers are streamed, each with random bytes of its own; what stands outside the layers "
        "(embedding, head) stays on the compute device.",
    )
    parser.set_defaults(execute=_throughput)
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights in the shape of a model, such as opt-13b; an unknown name lists them",
    )
    subject.add_argument("--model", metavar="FOLDER", help="a checkpoint folder or hub id")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="sequences (default: 32; with the goal throughput, as many as the plan says)",
    )
    work.add_argument("--prompt-len", type=positive, default=512, metavar="N")
    work.add_argument("--gen-len", type=positive, default=32, metavar="N")
    work.add_argument("--repeat", type=positive, default=1, metavar="N", help="take medians of N")
    work.add_argument(
        "--micro-batch",
        type=positive,
        metavar="N",
        help="also in micro-batches of N sequences, beside one batch: tokens/s, peak activations",
    )
    add_weights(work)
    add_placement(parser)
    parser.set_defaults(device_map=None)  # cpu, or auto where there is a goal
    add_goal(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument("--gpu-memory", type=size, metavar="SIZE", help="cap the GPU: 24GiB")
    limits.add_argument("--cpu-memory", type=size, metavar="SIZE", help="for weights and buffers")
    limits.add_argument("--folder", metavar="DIR", help="where a random checkpoint is written")
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
        "--engine", default="auto", metavar="NAME", help="auto, fused, or transformers"
    )
    parser.add_argument(
        "--kv-on-cpu",
        type=count,
        default=0,
        metavar="N",
        help="sequences of the batch that keep keys and values in CPU memory, where CPU cores "
        "attend to them (default: 0)",
    )
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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _throughput(args: argparse.Namespace) -> int:
    if args.shape is None and args.model is None:
        if not args.overhead:
            raise ValueError("name what to measure: --shape NAME or --model FOLDER")
        args.shape = "tiny-deep"

    from transformers.utils import logging

    from offload.bench.cold_start import measure_cold_start
    from offload.bench.overhead import measure_overhead
    from offload.bench.subject import Subject
    from offload.bench.throughput import Setup, run_throughput
    from offload.bench.workload import Workload
    from offload.config import OffloadConfig
    from offload.models.quantized.wanted import Wishes

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checked = OffloadConfig(device=args.device, dtype=args.dtype or "auto")
    dtype: Any = None if checked.dtype == "auto" else checked.dtype
    wanted = quantization(args)
    wishes = None if wanted is None else Wishes.of(wanted)
    subject = Subject(args.shape, args.model, dtype, checked.compute, wishes)
    work = Workload(args.batch or 32, args.prompt_len, args.gen_len, args.repeat)
    setup = Setup(
        device_map=args.device_map or ("cpu" if args.goal is None else "auto"),
        gpu_memory=args.gpu_memory,
        cpu_memory=args.cpu_memory,
        prefetch=args.prefetch,
        folder=args.folder,
        keep=args.keep,
        peers=tuple(args.peer),
        engine=args.engine,
        kv_on_cpu=args.kv_on_cpu,
        kv_dtype=args.kv_dtype,
        trace=args.trace,
        micro_batch=args.micro_batch,
        goal=args.goal,
        choose_batch=args.goal == "throughput" and args.batch is None,
    )
    if args.goal and (args.overhead or args.cold_start):
        raise ValueError("--goal belongs to the measurement of throughput itself")
    if args.micro_batch and (args.overhead or args.cold_start):
        raise ValueError("--micro-batch belongs to the measurement of throughput itself")
    if args.trace and (args.overhead or args.cold_start):
        raise ValueError("--trace belongs to the measurement of throughput itself")
    result: Any
    if args.overhead:
        result = measure_overhead(subject, setup)
    elif args.cold_start:
        result = measure_cold_start(subject, work, setup)
    else:
        result = run_throughput(subject, work, setup)
        if not args.json:
            print(result.placement, end="\n\n", file=sys.stderr, flush=True)
    print(json.dumps(result.as_dict()) if args.json else result)
    return 0


def _add_kernels(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "kernels",
        help="the fused kernels, beside eager PyTorch and cuBLAS",
        description="Every fused kernel on shapes of real models: time, rates, and the share of "
        "what HBM or the matrix units gave in the same run. Inputs rotate through more than L2 "
        "holds, all is timed in CUDA graphs.",
    )
    parser.set_defaults(execute=_kernels)
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
    parser.add_argument("--device", metavar="DEVICE", help="cuda:1, cpu, ... (default: the GPU)")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead: every variant of a small-batch product (op gemm, or quant_gemm)",
    )
    parser.add_argument("--out", metavar="FILE", help="write all figures there, as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _kernels(args: argparse.Namespace) -> int:
    import torch

    from offload.bench.kernels import gemm, quant_gemm, run
    from offload.bench.kernels.case import Rates
    from offload.bench.result import machine

    try:
        device = torch.device(args.device or "cuda")
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {error}") from None
    run.check_device(device)
    ops = tuple(op.replace("-", "_") for op in args.op)
    wanted = run.Wanted(device, ops, tuple(args.shape), args.quick, args.compile)
    found: dict[str, Any]
    failed = False

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if args.sweep:
        swept = {gemm.OP: gemm, quant_gemm.OP: quant_gemm}
        if len(ops) > 1 or set(ops) - swept.keys():
            raise ValueError(f"--sweep is for one of the ops {' and '.join(swept)}")
        rates, facts = Rates.measure(device, 1.0), machine(device)
        say = progress if args.json else print
        say(run.heading(rates, facts))
        found = {
            "machine": facts,
            "rates": asdict(rates),
            "sweep": swept[ops[0] if ops else gemm.OP].sweep(device, rates, wanted.shape, say),
        }
    else:
        result = run.run_kernels(wanted, progress)
        found, failed = result.as_dict(), result.failed
        if not args.json:
            print(result)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    if args.json:
        print(json.dumps(found))
    return 1 if failed else 0


def _add_host_attention(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "host-attention",
        help="attention of decode steps on CPU cores, beside a plain read of the same bytes",
        description="Attention on CPU cores over keys and values in CPU memory, on shapes of real "
        "models, beside a read of the same bytes in the same pieces by the same threads.",
    )
    parser.set_defaults(execute=_host_attention)
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
        "--path", default="auto", metavar="NAME", help="portable, avx2, avx512, ..."
    )
    parser.add_argument(
        "--spare",
        type=int,
        metavar="N",
        help="all but N cores (default: all but one or two, beside a stream as many as the engine)",
    )
    parser.add_argument("--sweep", action="store_true", help="every way to ask for lines ahead")
    parser.add_argument(
        "--beside-stream",
        action="store_true",
        help="while pinned copies run to the GPU at full rate, and their rate",
    )
    parser.add_argument("--device", metavar="DEVICE", help="where those go (default: the GPU)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _host_attention(args: argparse.Namespace) -> int:
    from offload.bench.host_attention import SHAPES, measure_host_attention
    from offload.config import OffloadConfig
    from offload.device import compute_device
    from offload.kernels.host_library import PATHS, host_library
    from offload.kernels.host_pool import HostPool

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
    with HostPool(spare=args.spare) as pool:
        result = measure_host_attention(
            shapes,
            args.kv or ["bf16"],
            pool=pool,
            path=args.path,
            all_threads=device is None or args.spare is not None,
            sweep=args.sweep,
            device=device,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(json.dumps(result.as_dict()) if args.json else result)
    return 0
