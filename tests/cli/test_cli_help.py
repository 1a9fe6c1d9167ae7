"""What `--help` says of every command's arguments, and that documents name no others."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

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


ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = dict(arguments(build_parser(), "offload"))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_says_what_it_is_for_and_its_default(name: str) -> None:
    action = ARGUMENTS[name]
    assert action.help
    off = action.default is None or action.default == argparse.SUPPRESS or not action.default
    assert off or not action.option_strings or "default" in action.help


def test_defaults_that_are_decided_elsewhere() -> None:
    from offload.aio.bench import nvme
    from offload.aio.bench.sizes import show
    from offload.placement import DEFAULT_PREFETCH

    where = f"{DEFAULT_PREFETCH['cuda']} where a GPU computes, else {DEFAULT_PREFETCH['cpu']}"
    assert f"(default: {where})" in str(ARGUMENTS["offload run --prefetch"].help)
    for name, values in (
        ("--block", [show(size).replace(" ", "") for size in nvme._TUNED_BLOCKS]),
        ("--depth", map(str, nvme._TUNED_DEPTHS)),
        ("--backend", nvme._COMPARED),
    ):
        said = str(ARGUMENTS[f"offload bench nvme {name}"].help).replace(" and ", ", ")
        assert re.search(rf" {','.join(values)}(,with|\))", said.replace(", ", ","))


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "docs/benchmarks.md"])
def test_documents_show_commands_and_options_that_there_are(document: str) -> None:
    text = (ROOT / document).read_text().replace("\\\n", " ")
    known = {name for argument in ARGUMENTS for name in offered(argument)}
    shown = set()
    for line in re.findall(r"(?<![\w/.])offload (?:run|pack|plan|info|bench)\b[^`\n]*", text):
        words = line.partition(" # ")[0].split()
        command = " ".join(words[: 3 if words[1] == "bench" else 2])
        options = (re.fullmatch(r"(--[a-z-]+)(?:=.*)?[.,;:)]?", word) for word in words)
        shown |= {command, *(f"{command} {option[1]}" for option in options if option)}
    assert len(shown) > 1
    assert shown - known == set()


def offered(argument: str) -> Iterator[str]:
    """The command of an argument, and the argument with it under each of its names."""
    command, _, names = argument.rpartition(" ")
    yield command
    for name in names.split("/"):
        yield f"{command} {name}"
