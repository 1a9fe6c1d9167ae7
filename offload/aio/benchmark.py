"""The arguments of `offload bench nvme` and `offload bench link`, and what runs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .backends import BACKENDS
from .bench import link, nvme
from .bench.peers import PEERS
from .bench.sizes import parse


def add_nvme_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run_nvme` reads."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "folder",
        nargs="?",
        default=".",
        help="a folder on the drive to measure, in which a test file is made and removed again "
        "(default: the current one)",
    )
    where.add_argument(
        "--file", type=_path, metavar="FILE", help="only read this existing file instead"
    )
    parser.add_argument(
        "--max-size",
        type=_size,
        default=4 << 30,
        metavar="SIZE",
        help="of the test file, or of what is read of --file (default: 4GiB)",
    )
    sweep = parser.add_argument_group("what is varied (lists: 1MiB,16MiB)")
    sweep.add_argument(
        "--block",
        type=_list_of(_size),
        metavar="SIZES",
        help="bytes a transfer (default: 128KiB,1MiB,8MiB; with --tune 1MiB,4MiB,8MiB,16MiB, with "
        "--compare 16MiB)",
    )
    sweep.add_argument(
        "--depth",
        type=_list_of(_count),
        metavar="N,...",
        help="in flight (default: 4,16; with --tune 4,8,16,32, with --compare 16)",
    )
    sweep.add_argument(
        "--threads", type=_list_of(_count), metavar="N,...", help="I/O threads (default: 1)"
    )
    sweep.add_argument(
        "--backend",
        type=_list_of(_backend),
        metavar="NAMES",
        help=f"of {', '.join(BACKENDS)}; or all (default: what auto takes; with --compare "
        "uring-fixed, libaio, threads and ctypes-libaio)",
    )
    sweep.add_argument("--write", action="store_true", help="measure writing too")
    sweep.add_argument(
        "--pattern",
        choices=("sequential", "layers"),
        default="sequential",
        help="layers: requests of 64 MiB at odd offsets, two in flight, as the weight stream's "
        "(default: sequential)",
    )
    _add_rounds(parser)
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        choices=PEERS,
        help="have the installed peer do the same work in the same rounds; may be repeated",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="keep the best setting for this drive; runs that stream from it will use it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--plot", type=_path, metavar="PNG", help="draw the sweep (needs matplotlib)"
    )


def run_nvme(args: argparse.Namespace) -> int:
    """Measure a drive; 0, or an exception whose text says what was wrong."""
    return nvme.measure(args)


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run_link` reads."""
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the GPU's number")
    parser.add_argument(
        "--size", type=_list_of(_size), metavar="SIZES", help="of a copy (default: 4KiB to 1GiB)"
    )
    parser.add_argument(
        "--max-size",
        type=_size,
        default=1 << 30,
        metavar="SIZE",
        help="of a copy (default: 1GiB)",
    )
    _add_rounds(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=_count, default=5, metavar="N", help="take medians of N (default: 5)"
    )


def run_link(args: argparse.Namespace) -> int:
    """Measure the link to a GPU."""
    return link.measure(args)


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    return text


def _size(text: str) -> int:
    try:
        found = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 4KiB")
    return found


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _backend(text: str) -> str:
    if text not in (*BACKENDS, "all", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(BACKENDS)}, all, auto")
    return text


def _list_of(parse_one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_all(text: str) -> list[Any]:
        return [parse_one(part) for part in text.split(",")]

    return parse_all


def main(argv: list[str] | None = None) -> int:
    """`python -m offload.aio.benchmark nvme|link ...`: the same without the program."""
    parser = argparse.ArgumentParser(prog="offload.aio.benchmark")
    kinds = parser.add_subparsers(required=True)
    for name, add, run in (
        ("nvme", add_nvme_arguments, run_nvme),
        ("link", add_link_arguments, run_link),
    ):
        kind = kinds.add_parser(name)
        add(kind)
        kind.set_defaults(execute=run)
    args = parser.parse_args(argv)
    code: int = args.execute(args)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
