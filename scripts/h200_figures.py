"""Measures the GPU figures of the benchmark page, part by part, within a time limit.

    PYTHONPATH=. python scripts/h200_figures.py --out results --seconds 540 --disk /tmp/d prefill

Every part is one run of `offload bench throughput` in a process of its own; its JSON goes to a line
of results/PART.json, its messages to results/PART.log, and a table of all is printed last. A part
that would not fit into the time left is stopped and said to be missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from offload.bench.table import format_table, number

DECODE = "--batch 32 --prompt-len 512 --gen-len 16 --repeat 3 --gpu-memory 24GiB --device-map cpu"
PREFILL = "--batch 64 --prompt-len 512 --gen-len 2 --repeat 3 --device-map cpu --peer resident"
NVME = "--batch 32 --prompt-len 512 --gen-len 5 --gpu-memory 24GiB --device-map nvme"
COLD = "--batch 1 --prompt-len 8 --device-map cpu --cold-start"

# The table of the benchmark page is of the model's own modules.
ENGINE = ["--engine", "transformers"]

PARTS = {
    "overhead": "--overhead",
    "opt-13b": f"--shape opt-13b {DECODE}",
    "accelerate": f"--shape opt-13b {DECODE.replace('--repeat 3 ', '')} --peer accelerate",
    "llama-2-13b": f"--shape llama-2-13b {DECODE}",
    "qwen2.5-14b": f"--shape qwen2.5-14b {DECODE}",
    "prefill": f"--shape opt-13b {PREFILL}",
    "nvme": f"--shape opt-6.7b {NVME} --folder DISK --keep",
    "cold-start": f"--shape opt-6.7b {COLD} --folder DISK --keep",
    "mixtral": "--shape mixtral-8x7b --batch 32 --prompt-len 512 --gen-len 8 --device-map cpu",
    "opt-30b": f"--shape opt-30b {DECODE.replace('32', '24', 1)}",
}
DEFAULT = tuple(name for name in PARTS if name not in ("mixtral", "opt-30b"))
COLUMNS = ("part", "peer", "prefill s", "TFLOP/s", "step s", "tok/s", "GB/s", "bound", "share")
COLUMNS += ("GPU GiB", "host GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", default="figures", metavar="DIR")
    parser.add_argument("--seconds", type=float, default=540, help="in all")
    parser.add_argument("--disk", default="figures/disk", help="where checkpoints are written")
    parser.add_argument("--cpu-memory", default="100GiB", help="for weights")
    parser.add_argument("--more", default="", help="for every run: '--prefetch 3'")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose of {', '.join(PARTS)}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    rows, notes = [COLUMNS], []
    for part in args.parts or DEFAULT:
        options = PARTS[part].replace("DISK", args.disk).split()
        options += ["--cpu-memory", args.cpu_memory, *args.more.split()]
        start = time.monotonic()
        found = measure(part, options, out, end - start)
        print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if isinstance(found, str):
            notes.append(f"{part}: {found}")
        else:
            more, said = summary(part, found)
            rows += more
            notes += said
    print("\n".join([*format_table(rows), *notes]))
    return 0


def measure(part: str, options: list[str], out: Path, seconds: float) -> dict[str, Any] | str:
    """One run's JSON, or why there is none."""
    if seconds < 5:
        return "no time left"
    command = [sys.executable, "-m", "offload", "bench", "throughput", *options, *ENGINE, "--json"]
    with open(out / f"{part}.log", "w") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return "stopped, the time was over"
    if done.returncode:
        return (out / f"{part}.log").read_text().strip().splitlines()[-1]
    (out / f"{part}.json").write_text(done.stdout)
    return json.loads(done.stdout)


def summary(part: str, found: dict[str, Any]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Table rows and notes of one result."""
    if "rows" not in found:
        keys = ("layer_seconds", "link_bound_bytes", "first_token_seconds", "run_seconds")
        keys += ("weight_bytes", "disk_rates", "share_of_bound")
        return [], [f"{part}: " + ", ".join(f"{k} {found[k]}" for k in keys if k in found)]
    rows = []
    for row in found["rows"]:
        bound, share = row["bound_seconds"], row["share_of_bound"]
        rate = row["streamed_bytes"] / bound if bound else None
        rows.append(
            (
                part,
                row["peer"],
                number(row["prefill_seconds"]),
                number(row["prefill_flops"], 1e12),
                number(row["step_seconds"]),
                number(row["decode_tokens"]),
                number(row["streamed_rate"], 1e9),
                number(rate, 1e9),
                "-" if share is None else f"{share:.1%}",
                number(row["gpu_allocated"], 1 << 30),
                number(row["host_peak"], 1 << 30),
            )
        )
    said = [f"{part}: {row['peer']}: {row['equal']}" for row in found["rows"] if row["equal"]]
    return rows, said + [f"{part}: {note}" for note in found["notes"]]


if __name__ == "__main__":
    sys.exit(main())
