"""ARCHITECTURE.md's map of the house: every module has its place there, and nothing else has."""

from __future__ import annotations

import re

from source_tree import ROOT, files

# Folders of which the map says that they have a module for each thing of a kind.
ALIKE = ("aio/bench", "bench/kernels", "commands", "commands/bench", "kernels/ops")


def named() -> set[str]:
    """The modules on the map, as paths below offload/: a name belongs to the folder that stands
    ahead of it, at its own place of the indentation or further out.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text()
    house = text[text.index("    offload/\n") : text.index("    tests/ ")].splitlines()[1:]
    folders: list[tuple[int, str]] = []  # with their indentation
    found = set()
    for line in house:
        indentation = len(line) - len(line.lstrip())
        entry = indentation < 20  # else the description of one, which goes on
        while entry and folders and folders[-1][0] >= indentation:
            folders.pop()
        for name in re.findall(r"\w+\.py\b|\b\w+/(?=\s)", line):
            if name.endswith(".py"):
                found.add("".join(folder for _, folder in folders) + name)
            elif entry:
                folders.append((indentation, name))
    return found


def test_every_module_is_on_the_map_and_nothing_else() -> None:
    modules = {
        file.relative_to("offload").as_posix()
        for file in files()
        if file.parts[0] == "offload" and file.suffix == ".py"
    }
    on_the_map = named()
    assert on_the_map - modules == set(), "ARCHITECTURE.md names what is not there"
    alike = {m for m in modules if m.rpartition("/")[0].startswith(ALIKE)}
    missing = {m for m in modules - on_the_map - alike if not m.endswith("__.py")}
    assert missing == set(), "ARCHITECTURE.md does not name"
