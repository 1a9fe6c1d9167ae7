"""`offload info`: what this machine and this installation have, what of it is in use, and why not
the rest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from offload.commands.arguments import add_device, add_json, path
from offload.commands.console import say
from offload.scheduler.hardware import Curve, Hardware

PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "numpy")


def add_parser(commands: Any) -> None:
    """Add this command to the program."""
    parser = commands.add_parser(
        "info",
        help="what this machine has, and what of it is in use",
        description="What this machine and this installation have, what of it is in use, and why "
        "not the rest.",
    )
    parser.set_defaults(execute=execute)
    parser.add_argument(
        "--offload-folder",
        type=path,
        metavar="FOLDER",
        help="that of runs, where --measure keeps rates for them (default: the user's cache)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the rates that plans are made from (under a minute), or show those kept of "
        "this machine",
    )
    parser.add_argument(
        "--again", action="store_true", help="with --measure: anew, though some are kept"
    )
    add_device(parser, "with --measure: where layers run")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Look, and print."""
    if not args.measure and (args.again or args.device):
        raise ValueError("--again and --device go with --measure")
    found = collect(args.offload_folder)
    lines = _lines(found)
    if args.measure:
        hardware, file = _measure(args)
        found |= {"hardware": hardware.as_dict(), "hardware_file": str(file)}
        lines += [f"rates, kept in {file}:", *rate_lines(hardware)]
    print(json.dumps(found) if args.json else "\n".join(lines))
    return 0


def _measure(args: argparse.Namespace) -> tuple[Hardware, Path]:
    from offload.config import OffloadConfig
    from offload.measure.cache import measured_hardware

    return measured_hardware(
        args.offload_folder,
        OffloadConfig(device=args.device).compute,
        again=args.again,
        progress=say,
    )


def rate_lines(hardware: Hardware) -> list[str]:
    """The rates as people read them, and the reasons for those that are not there."""
    plain = (
        ("link up", hardware.link_up),
        ("link down", hardware.link_down),
        ("link up, both ways busy", hardware.link_up_both),
        ("link down, both ways busy", hardware.link_down_both),
        ("disk", hardware.disk),
        ("memory of the compute device", hardware.hbm),
        ("copies in it, read + written", hardware.hbm_copy),
        ("CPU memory read", hardware.host_read),
        ("CPU memory read beside a full stream", hardware.host_read_beside),
        ("that stream", hardware.link_beside),
    )
    lines = [f"  {name}: {rate / 1e9:.4g} GB/s" for name, rate in plain if rate is not None]
    for dtype, curve in hardware.cpu_attention.items():
        lines.append(
            f"  CPU attention to {dtype}, GB/s by queries a KV head: {_points(curve, 1e9)} "
            f"(measured by {hardware.cpu_attention_by})"
        )
    if hardware.prompt_attention:
        points = _points(hardware.prompt_attention, 1e12)
        lines.append(f"  attention within prompts, TFLOP/s by tokens: {points}")
    if hardware.gpu_attention:
        points = _points(hardware.gpu_attention, 1e9)
        lines.append(f"  attention while decoding, GB/s by queries a KV head: {points}")
    for dtype, curve in hardware.matrix.items():
        lines.append(f"  products in {dtype}, TFLOP/s by rows: {_points(curve, 1e12)}")
    for kept, curve in hardware.few_rows.items():
        lines.append(
            f"  weights in {kept}, GB/s read by products of few rows: {_points(curve, 1e9)}"
        )
    for dtype, curve in hardware.cpu_attention_beside.items():
        lines.append(f"  CPU attention to {dtype} beside a full stream: {_points(curve, 1e9)}")
        points = _points(hardware.link_beside_attention.get(dtype, ()), 1e9)
        lines.append(f"  that stream: {points}")
    for name, seconds in (
        ("a small kernel behind another one", hardware.kernel),
        ("launch of a kernel", hardware.launch),
        ("the same when the host has waited for CPU cores", hardware.launch_after_cores),
        ("a layer of a prompt issued", hardware.prompt_layer),
        ("the way to CPU cores and back", hardware.exchange),
    ):
        if seconds is not None:
            lines.append(f"  {name}: {seconds * 1e6:.3g} us")
    reasons: dict[str, list[str]] = {}
    for name, reason in hardware.absent.items():
        reasons.setdefault(reason, []).append(name)
    return lines + [f"  not measured: {', '.join(n)}: {r}" for r, n in reasons.items()]


def _points(curve: Curve, unit: float) -> str:
    return ", ".join(f"{at}: {rate / unit:.4g}" for at, rate in curve)


def collect(offload_folder: str | None = None) -> dict[str, Any]:
    """All facts, in plain types."""
    from offload import aio
    from offload.build_report import build_report
    from offload.version import __version__

    return {
        "offload": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": _gpus(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "offload_folder": _folder(offload_folder),
        "io": aio.probe(),
        "kernels": _kernels(),
        "host_kernels": _host_kernels(),
        "built": build_report(),
    }


def _kernels() -> dict[str, Any]:
    from offload.kernels import why_not

    reason = why_not()
    return {"in_use": reason is None, "reason": reason}


def _host_kernels() -> dict[str, Any]:
    from offload.kernels.cores import worker_cpus
    from offload.kernels.host_library import host_library, why_not_host

    reason = why_not_host()
    paths = () if reason else host_library().paths()
    return {"in_use": reason is None, "reason": reason, "paths": paths, "cpus": worker_cpus()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
        reason = f"torch {torch.__version__} ({built}) finds no GPU: layers run on the CPU"
        return {"devices": [], "reason": reason}
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        devices.append({"index": index, "name": name, "free": free, "total": total})
    return {"devices": devices, "reason": None}


def _memory() -> dict[str, Any]:
    import psutil

    from offload.memory_limits import host_memory_available, host_memory_total

    total, machine = host_memory_total(), psutil.virtual_memory().total
    limit = "the machine" if total >= machine else f"a cgroup (the machine has {machine} bytes)"
    return {"available": host_memory_available(), "total": total, "limit": limit}


def _folder(offload_folder: str | None) -> dict[str, Any]:
    from offload.home import expanded, home_folder

    folder = expanded(offload_folder or home_folder()).absolute()
    existing = folder
    while not existing.exists():
        existing = existing.parent
    disk = shutil.disk_usage(existing)
    return {
        "path": str(folder),
        "is_folder": folder.is_dir() if folder.exists() else None,
        "writable": os.access(existing, os.W_OK),
        "free": disk.free,
        "total": disk.total,
    }


def _reads(selected: str | None) -> str:
    """What reads files; where the user named it, that too."""
    from offload.aio.backends import ENVIRONMENT

    named = os.environ.get(ENVIRONMENT, "auto")
    if selected is None:
        return f"none; {ENVIRONMENT} names {named}, which cannot run here"
    return selected if named == "auto" else f"{selected}, as {ENVIRONMENT} says"


def _lines(found: dict[str, Any]) -> list[str]:
    from offload.sizes import format_count, format_size

    memory, folder, io = found["memory"], found["offload_folder"], found["io"]
    packages = ", ".join(f"{n} {v or '(not installed)'}" for n, v in found["packages"].items())
    lines = [
        f"offload {found['offload']}, Python {found['python']}, {found['system']}",
        f"packages: {packages}",
    ]
    for gpu in found["gpus"]["devices"]:
        lines.append(
            f"GPU {gpu['index']}: {gpu['name']}, {format_size(gpu['free'])} of "
            f"{format_size(gpu['total'])} free"
        )
    if found["gpus"]["reason"]:
        lines.append(f"GPU: none; {found['gpus']['reason']}")
    memlock = "no limit" if io["memlock"] is None else format_size(io["memlock"])
    state = {True: "", False: " (a file!)", None: ", not made yet"}[folder["is_folder"]]
    lines += [
        f"CPU: {found['cpu_count']} cores, {format_size(memory['available'])} of "
        f"{format_size(memory['total'])} of memory available; the limit is that of "
        f"{memory['limit']}; locked memory: {memlock}",
        f"offload folder: {folder['path']}{state}, "
        f"{'writable' if folder['writable'] else 'NOT writable'}, {format_size(folder['free'])} of "
        f"{format_size(folder['total'])} free on its disk",
        f"disk reads: {_reads(io['selected'])}",
    ]
    for entry in io["backends"]:
        use = "in use" if entry["backend"] == io["selected"] else "works, not needed"
        lines.append(f"  {entry['backend']}: {use if entry['ok'] else entry['reason']}")
    kernels = found["kernels"]
    lines.append(f"kernels: {'in use' if kernels['in_use'] else 'none; ' + kernels['reason']}")
    host = found["host_kernels"]
    threads = format_count(len(host["cpus"]), "thread")
    cores = f"{host['paths'][-1]}, {threads}" if host["in_use"] else f"none; {host['reason']}"
    lines.append(f"kernels on CPU cores: {cores}")
    for part, reason in found["built"].items():
        state = "built" if reason is None else f"not in use; {reason}"
        lines.append(f"compiled part {part}: {state}")
    if not found["built"]:
        lines.append(
            f"compiled parts: none; these are the sources in {Path(__file__).parents[1]}, which "
            "Python takes before an installed package where it is started beside them: start it "
            "elsewhere, or compile in place with `pip install -e .`"
        )
    return lines
