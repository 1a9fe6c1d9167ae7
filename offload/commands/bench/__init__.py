"""`offload bench`: measures, beside the bound of the same run; a module for each benchmark."""

from __future__ import annotations

from typing import Any

from offload.aio import benchmark
from offload.commands.bench import host_attention, kernels, plan, quality, throughput


def add_parser(commands: Any) -> None:
    """Add this command to the program."""
    parser = commands.add_parser(
        "bench",
        help="measure throughput beside the bound of the same run",
        description="Measure, beside the bound of the same run.",
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    throughput.add_parser(benchmarks)
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
    kernels.add_parser(benchmarks)
    plan.add_parser(benchmarks)
    quality.add_parser(benchmarks)
    host_attention.add_parser(benchmarks)
