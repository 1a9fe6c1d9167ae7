"""The documents: nothing stands there twice, tables are whole, and what they point at is there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path

import pytest
from source_tree import ROOT

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# A markdown link, and a file of the project by its path.
LINK = re.compile(r"\]\(<?([^)>\s]+)")
PATH = re.compile(r"(?<![\w/.-])(?:docs|examples|offload|scripts|tests)/[\w/.-]*\.[a-z]+\b")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)


def prose(document: Path) -> str:
    """The text without its fenced blocks, in which # begins a comment."""
    return re.sub(r"(?ms)^```.*?^```$", "", document.read_text(encoding="utf-8"))


def headings(document: Path) -> list[tuple[str, ...]]:
    """Every heading, behind those that it stands under."""
    found, way = [], [""] * 6
    for marks, title in re.findall(r"(?m)^(#{1,6}) +(.+?) *$", prose(document)):
        way[len(marks) - 1 :] = [title] + [""] * (6 - len(marks))
        found.append(tuple(way[: len(marks)]))
    return found


def anchors(document: Path) -> set[str]:
    """The headings, as links name them."""
    return {re.sub(r"[^\w -]", "", way[-1].lower()).replace(" ", "-") for way in headings(document)}


def twice(things: Iterable[Hashable]) -> list[Hashable]:
    return [thing for thing, count in Counter(things).items() if count > 1]


@each_document
def test_nothing_stands_there_twice(document: Path) -> None:
    assert twice(headings(document)) == []
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", prose(document))
    assert twice(text.strip() for text in paragraphs if len(text) > 80) == []


@each_document
def test_rows_of_a_table_have_as_many_cells_as_its_head(document: Path) -> None:
    wrong = []
    for table in re.findall(r"(?m)(?:^\|.*\n)+", prose(document)):
        head, rule, *rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        wrong += [row for row in (rule, *rows) if row != head]
        assert re.fullmatch(r"[|: -]+", table.splitlines()[1]), table
    assert wrong == []


@each_document
def test_what_it_points_at_is_there(document: Path) -> None:
    text, missing = prose(document), []
    for target in LINK.findall(text):
        file, _, anchor = target.partition("#")
        there = document.parent / file if file else document
        if not re.match(r"\w+:", target) and (
            not there.exists() or (anchor and anchor not in anchors(there))
        ):
            missing.append(target)
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert missing == []
