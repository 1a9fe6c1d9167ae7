"""`offload plan`: how a model would best run, and what that would give, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.commands.arguments import (
    add_job,
    add_json,
    add_kv_dtype,
    max_memory,
    memory,
    path,
    positive,
)
from offload.commands.console import say
from offload.errors import UnsupportedError
from offload.scheduler.engine import ENGINES, FUSED, TRANSFORMERS, CpuAttention, Engine
from offload.scheduler.estimate import Estimate
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import PRECISIONS, ModelProfile
from offload.scheduler.plan import Budget
from offload.scheduler.planner import Planned, plan_job
from offload.scheduler.setting import Goal, Job
from offload.sizes import format_size


def add_parser(commands: Any) -> None:
    """Add this command to the program."""
    parser = commands.add_parser(
        "plan",
        help="the best way to run a model, and what it would give",
        description="Predict, from a model's sizes and a machine's measured rates, the best way to "
        "run a job: which layers rest where, how many sequences at once, where their keys and "
        "values lie. Reads no weights and needs no GPU.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument(
        "model", metavar="MODEL", help="a checkpoint folder (its config.json does), or a shape of "
        "`offload bench`, such as opt-30b",
    )  # fmt: skip
    job = parser.add_argument_group("job")
    add_job(job)
    job.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="sequences at once (default: chosen for throughput, else 1)",
    )
    job.add_argument(
        "--goal",
        choices=[goal.value for goal in Goal],
        default=Goal.THROUGHPUT.value,
        help="tokens a second of the whole job (throughput, the default), the time of a given "
        "batch, or the least GPU memory",
    )
    add_kv_dtype(job)
    job.add_argument(
        "--weights",
        type=_weights,
        default=(),
        metavar="LIST",
        help=f"precisions to choose from: {', '.join(PRECISIONS)} (default: the model's own)",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", *ENGINES),
        default="auto",
        help="who runs it: a plan has nothing that this engine does not do; any: all there is "
        "(default: fused where that can run the model, else transformers)",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--max-memory",
        type=memory,
        action="append",
        default=[],
        metavar="PLACE=SIZE",
        help="a limit for the GPU (0) or 'cpu': 0=20GiB, cpu=64GiB; may be repeated",
    )
    machine.add_argument(
        "--hardware",
        metavar="FILE",
        type=path,
        help="rates of another machine, as `offload info --measure --json` prints them there "
        "(default: this one's)",
    )
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Plan, and print."""
    model = _profile(args.model)
    model = replace(model, engine=_engine(args.engine, args.kv_dtype, model))
    hardware = _hardware(args.hardware)
    job = Job(args.prompt_len, args.gen_len, args.batch)
    budget = _budget(max_memory(args.max_memory), hardware)
    planned = plan_job(model, hardware, budget, job, Goal(args.goal), args.weights)
    if args.json:
        facts = {"model": model.name, "machine": hardware.machine.fingerprint}
        facts |= {"engine": model.engine.name, "kv_dtype": args.kv_dtype}
        print(json.dumps({**facts, **planned.as_dict()}))
    else:
        print("\n".join(table(model, hardware, planned)))
    return 0


def _weights(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PRECISIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PRECISIONS)}")
    return names


def _engine(name: str, kv_dtype: str, model: ModelProfile) -> Engine:
    """The engine of this name that can run the model, with keys and values of that type."""
    if name == FUSED.name and model.unfused:
        raise UnsupportedError(
            f"--engine {name} cannot run {model.name}: {model.unfused}; leave it out to plan for "
            "the model's own modules"
        )
    if name == "auto":
        name = TRANSFORMERS.name if model.unfused else FUSED.name
    engine = ENGINES[name]
    if kv_dtype != "int8":
        return engine
    if not engine.cpu_kv:
        why = f" ({model.unfused})" if model.unfused else f"; take --engine {FUSED.name}"
        raise ValueError(
            "--kv-dtype int8 is for keys and values in CPU memory, and the engine "
            f"{engine.name} keeps none there{why}"
        )
    return replace(engine, int8_kv=True)


def _profile(name: str) -> ModelProfile:
    import torch

    from offload.bench.shapes import SHAPES, shape_config
    from offload.models.profile import config_profile, folder_profile

    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return folder_profile(folder)
    if name in SHAPES:
        return config_profile(shape_config(name, torch.float16), name)
    raise ValueError(
        f"{name!r} is neither a folder nor a known shape; shapes are {', '.join(SHAPES)}"
    )


def _hardware(file: str | None) -> Hardware:
    from offload.measure.cache import measured_hardware, read_hardware

    if file is not None:
        return read_hardware(file)
    from offload.config import OffloadConfig

    compute = OffloadConfig().compute
    if compute.type == "cpu":
        raise ValueError(
            "torch finds no GPU to plan for; pass the rates of the machine that is to run the "
            "model with --hardware (there: offload info --measure --json > rates.json)"
        )
    return measured_hardware(None, compute, progress=say)[0]


def _budget(limits: dict[int | str, int], hardware: Hardware) -> Budget:
    from offload.budget import DEVICE_SHARE, HOST_SHARE

    others = [place for place in limits if place not in (0, "cpu")]
    if others:
        raise ValueError(f"--max-memory names {others[0]!r}; a plan is for one GPU, 0, and 'cpu'")
    if hardware.machine.gpu is None and 0 not in limits:
        raise ValueError(
            "these rates are of a machine without a GPU, and a plan is for one: pass with "
            "--hardware those of the machine that is to run the model (there: offload info "
            "--measure --json > rates.json)"
        )
    return Budget(
        device=limits.get(0, int(hardware.machine.gpu_memory * DEVICE_SHARE)),
        cpu=limits.get("cpu", int(hardware.machine.host_memory * HOST_SHARE)),
    )


def table(model: ModelProfile, hardware: Hardware, planned: Planned) -> list[str]:
    """The choice and the runner-up side by side, as lines of text."""
    job, budget = planned.choice.job, planned.budget
    other = planned.runner_up
    columns = [_column(planned.choice)] + ([_column(other)] if other is not None else [])
    lines = [
        f"{model.name}: {job.prompt} + {job.gen} tokens, best for {planned.goal.value}, on "
        f"{hardware.machine.gpu or hardware.machine.cpu} with {format_size(budget.device)} of GPU "
        f"memory and {format_size(budget.cpu)} of CPU memory",
        f"  {'':<30}{'choice':>22}{'runner-up' if other is not None else '':>22}",
    ]
    for row in columns[0]:
        lines.append(f"  {row:<30}" + "".join(f"{column[row]:>22}" for column in columns))
    lines.append(f"limit: {planned.choice.limit}; {_busy(planned.choice)}")
    if model.engine is TRANSFORMERS and model.unfused:
        lines.append(f"engine: transformers; {model.unfused}")
    if model.engine.int8_kv:
        lines.append("keys and values in CPU memory are int8, with a scale a token and head")
    full = planned.choice.full(budget)
    if full:
        lines.append(f"full: {' and '.join(full)}; more of it may make the plan faster")
    return lines


def _column(found: Estimate) -> dict[str, str]:
    setting = found.setting
    ways = {
        CpuAttention.NONE: "-",
        CpuAttention.CPU: "the CPU",
        CpuAttention.GPU: "the GPU",
    }
    return {
        "weights": setting.weights,
        "layers on GPU / CPU / NVMe": f"{setting.resident} / {setting.cpu} / {setting.nvme}",
        "loads ahead": str(setting.depth if setting.streamed else "-"),
        "sequences": str(setting.batch),
        "  KV cache on GPU / CPU": f"{setting.gpu_sequences} / {setting.cpu_sequences}",
        "  the CPU's are attended by": ways[setting.attention],
        "prefill: rows at once": str(setting.prefill_rows),
        "prefill: passes": str(setting.prefill_passes),
        "decode: micro-batches": str(setting.decode_micro_batches),
        "prefill": f"{found.prefill_seconds:.3g} s",
        "decode step": f"{found.decode.seconds * 1e3:.4g} ms",
        "decode tokens/s": f"{found.decode_rate:.4g}",
        "total tokens/s": f"{found.rate:.4g}",
        "GPU memory": format_size(found.memory.device),
        "CPU memory": format_size(found.memory.cpu),
    }


def _busy(found: Estimate) -> str:
    decode = found.decode
    shares = sorted(decode.busy.items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{n} {s / decode.seconds:.0%}" for n, s in shares if s > 0)
    return f"busy in a decode step: {text}"
