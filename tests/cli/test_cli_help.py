"""What `--help` says of every command's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from offload.cli import build_parser


def arguments(
    parser: argparse.ArgumentParser, command: str
) -> Iterator[tuple[str, argparse.Action]]:
    """Of a command and of those below it, each with what it is called."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from arguments(below, f"{command} {name}")
        else:
            yield f"{command} {'/'.join(action.option_strings) or action.dest}", action


ARGUMENTS = dict(arguments(build_parser(), "offload"))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_says_what_it_is_for_and_its_default(name: str) -> None:
    action = ARGUMENTS[name]
    assert action.help
    off = action.default is None or action.default == argparse.SUPPRESS or not action.default
    assert off or not action.option_strings or "default" in action.help
