"""The program `offload`: its commands, and how it ends when something goes wrong."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TextIO

from offload.commands import COMMANDS
from offload.version import __version__

DEBUG = "OFFLOAD_DEBUG"  # set to 1 to see where an error came from
FAILED = 2  # exit codes; those of signals are as a shell reports them
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Some releases of argparse take the value of `--option=--` away and leave an empty list,
        whatever the option's type.
        """
        for text in args or ():
            name, equals, value = text.partition("=")
            if name.startswith("--") and equals and value == "--":
                self.error(f"argument {name}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"offload: error: {message} (see `{self.prog} --help`)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="offload",
        description="Run language models far larger than the GPU: their layers stream from CPU "
        "memory or NVMe.",
        epilog=f"An error is one line and exit code {FAILED}; {DEBUG}=1 shows where it came from.",
    )
    parser.add_argument("--version", action="version", version=f"offload {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        if sys.stdout is None:  # so does Python without file descriptor 1
            raise OSError("standard output is closed: there is nowhere to write the result")
        args = build_parser().parse_args(argv)
        _plain_messages()
        with _terminated_in_order():
            code = args.execute(args)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse: --help, --version, a bad argument
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        print("\noffload: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        if os.environ.get(DEBUG) == "1" or not _is_for_the_user(error):
            traceback.print_exc()
        print(f"offload: error: {_one_line(error)}", file=sys.stderr)
        return FAILED


@contextlib.contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: what it made for itself, such as the gigabytes that a
    benchmark reads, is removed.
    """

    def end(number: int, frame: Any) -> NoReturn:
        raise SystemExit(TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread: the program is somebody's function
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message says it all; anything else is a fault of the program."""
    if isinstance(error, (OSError, ValueError, ImportError, NotImplementedError, MemoryError)):
        return True
    from offload.errors import OffloadError

    torch = sys.modules.get("torch")
    return isinstance(error, OffloadError) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^\[Errno \d+\] ", "", text)


def _plain_messages() -> None:
    """Warnings and log records are for people here: no file names, no line numbers."""
    logging.basicConfig(format="offload: %(message)s")
    for name in ("offload.store.pack", "offload.packed"):  # they may take minutes
        logging.getLogger(name).setLevel(logging.INFO)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> Any:
        print(f"offload: warning: {' '.join(str(message).split())}", file=file or sys.stderr)

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
