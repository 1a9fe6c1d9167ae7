"""The table of measured products: what it keeps, what it ignores, and how it picks."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.kernels import choices, tuning
from offload.kernels.choices import Choice, Key, Table

KEY = Key("bfloat16", 5120, 20480, 4, False, "rms", False, True, True)
OTHER = Key("float16", 64, 32, 1, True, "", True, False, False)
CUBLAS, OWN = Choice("cublas"), Choice("own", 1)
DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("OFFLOAD_HOME", str(home))
    return home / "kernels.json"


@pytest.fixture
def one_table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table("a GPU")
    monkeypatch.setattr(tuning, "table", lambda device: table)
    monkeypatch.setattr(tuning, "captured", lambda device: False)
    return table


def test_what_is_kept_is_there_in_the_next_process(file: Path) -> None:
    assert not file.exists()
    choice = Choice("own", 3, 4, 12.5, 14.0)
    Table("a GPU").keep(KEY, choice)
    again = Table("a GPU")
    assert again.get(KEY) == choice and again.get(OTHER) is None
    assert Table("another GPU").get(KEY) is None
    assert [path.name for path in file.parent.iterdir()] == ["kernels.json"]


def test_two_processes_do_not_lose_each_others_entries() -> None:
    one, two, other = Table("a GPU"), Table("a GPU"), Table("another GPU")
    one.keep(KEY, OWN)
    two.keep(OTHER, CUBLAS)
    other.keep(KEY, CUBLAS)
    again = Table("a GPU")
    assert again.get(KEY) == OWN and again.get(OTHER) == CUBLAS
    assert Table("another GPU").get(KEY) == CUBLAS


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"x"', "null", "\x00"])
def test_a_damaged_file_is_said_and_written_anew(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=r"kernels\.json"):
        table = Table("a GPU")
    assert table.get(KEY) is None
    table.keep(KEY, OWN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Table("a GPU").get(KEY) == OWN


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"way": "magic"},
        {"way": "own", "variant": -1},
        {"way": "own", "variant": "2"},
        {"way": "own", "splits": True},
        {"way": "own", "us": "fast"},
        {"way": "rows"},
        {"way": "columns", "splits": 0},
    ],
)
def test_entries_that_make_no_sense_are_left_out(file: Path, entry: Any) -> None:
    file.parent.mkdir()
    good = {"way": "cublas", "something": "newer"}
    file.write_text(json.dumps({"a GPU": {str(KEY): entry, str(OTHER): good}, "another": 3}))
    with pytest.warns(UserWarning, match="1 entries of .* make no sense"):
        table = Table("a GPU")
    assert table.get(KEY) is None and table.get(OTHER) == CUBLAS


def test_a_file_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file where a folder should be")
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path / "taken"))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        table = Table("a GPU")
    with pytest.warns(UserWarning, match="are not kept"):
        table.keep(KEY, OWN)
    assert table.get(KEY) == OWN


def test_keys_differ_in_every_field() -> None:
    fields = vars(KEY)
    texts = {str(KEY)}
    for name, value in fields.items():
        changed = "x" if isinstance(value, str) else value + 1
        if isinstance(value, bool):
            changed = not value
        texts.add(str(Key(**{**fields, name: changed})))
    assert len(texts) == len(fields) + 1


@pytest.mark.parametrize(
    ("rows", "most"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)]
)
def test_buckets(rows: int, most: int) -> None:
    assert choices.bucket(rows) == most


def test_no_bucket_beyond_the_kernels_rows() -> None:
    with pytest.raises(ValueError, match="at most 16, not 17"):
        choices.bucket(17)


def test_the_quickest_is_picked_once_and_kept(one_table: Table) -> None:
    times = {CUBLAS: 10.0, OWN: 8.0, Choice("own", 2): 9.0, Choice("own", 1, 4): 7.0}
    asked: list[Choice] = []

    def measure(choice: Choice) -> float:
        asked.append(choice)
        return times.get(choice, 11.0)

    def refine(choice: Choice) -> tuple[Choice, ...]:
        return (Choice("own", choice.variant, 4),) if choice.way == "own" else ()

    def candidates() -> tuple[Choice, ...]:
        return CUBLAS, OWN, Choice("own", 2)

    chosen = tuning.pick(KEY, DEVICE, candidates, measure, refine, otherwise=OWN)
    assert chosen == Choice("own", 1, 4, 7.0, 10.0)
    assert len(asked) == 5
    assert tuning.pick(KEY, DEVICE, candidates, measure, refine, otherwise=OWN) == chosen
    assert len(asked) == 5
    assert Table("a GPU").get(KEY) == chosen
    assert one_table.won() == (1, 1)
    assert "1 of 1 measured products (100%)" in str(one_table)


def test_products_of_many_rows_are_counted_apart(one_table: Table) -> None:
    for rows, choice in ((2048, Choice("whole")), (4096, Choice("columns", splits=3)), (1, OWN)):
        one_table.keep(Key("float16", 15360, 5120, rows), choice)
    assert one_table.won() == (1, 1) and one_table.cut() == (1, 2)
    assert str(one_table).endswith("; 1 of 2 of many rows in pieces")
    assert Table("a GPU").cut() == (1, 2)


def test_turns_are_taken_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0  # ms
    asked: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = math.nan

        def record(self, stream: Any) -> None:
            self.at = now

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Stream:
        def synchronize(self) -> None: ...

    def call(i: int) -> Any:
        def run() -> None:
            nonlocal now
            slow = 1.0 + 0.2 * len(asked)  # clocks fall
            asked.append(i)
            now += slow * (8.0, 7.0, 9.0)[i]

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    times = tuning.time_turns([call(0), call(1), call(2)], DEVICE)
    assert times[1] < times[0] < times[2], "the first was timed on higher clocks"
    assert asked == [0, 0, 1, 2, *(tuning.TURNS * [0, 1, 2])]

    asked.clear()
    begin = now
    few = tuning.time_turns([call(0), call(1), call(2)], DEVICE, seconds=0.05)
    assert len(few) == 2 and now - begin < 200
    asked.clear()
    assert len(tuning.time_turns([call(0), call(1)], DEVICE, seconds=1e-4)) == 1


def test_what_fails_is_left_out(one_table: Table) -> None:
    def measure(choice: Choice) -> float:
        if choice.way == "own":
            raise RuntimeError("no such kernel")
        return 5.0

    assert tuning.pick(KEY, DEVICE, lambda: (OWN, CUBLAS), measure, otherwise=OWN).way == "cublas"
    assert one_table.won() == (0, 1)
    with pytest.raises(RuntimeError, match=r"float16 N64 K32.*no such kernel"):
        tuning.pick(OTHER, DEVICE, lambda: (OWN,), measure, otherwise=OWN)


def test_no_room_to_measure_is_not_kept(one_table: Table) -> None:
    def measure(choice: Choice) -> float:
        raise torch.OutOfMemoryError("full")

    chosen = tuning.pick(KEY, DEVICE, lambda: (OWN, CUBLAS), measure, otherwise=CUBLAS)
    assert chosen == CUBLAS
    assert one_table.won() == (0, 0)
    assert str(one_table).startswith("0 of 0 measured products run")


@pytest.fixture
def two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "rotation", lambda nbytes, device: nbytes // 100)


def test_copies_take_turns_and_the_quickest_is_kept(
    one_table: Table, two_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def time(products: Any, device: torch.device) -> float:
        assert device == CPU
        asked.append(products)
        return {"own": 9.0, "cublas": 7.0}[products[0][0]]

    monkeypatch.setattr(tuning, "time_products", time)

    def choose() -> Choice:
        return tuning.choose(
            KEY,
            CPU,
            weight_bytes=200,
            copies=lambda count: [f"copy {i}" for i in range(count)],
            candidates=lambda copy: (OWN, CUBLAS) if copy == "copy 0" else (),
            launches=lambda copy, choice, workspace: (choice.way, copy),  # type: ignore
        )

    assert choose() == Choice("cublas", us=7.0, cublas_us=7.0) == choose()
    assert asked == [[(way, "copy 0"), (way, "copy 1")] for way in ("own", "cublas")]


def test_what_is_taken_where_nothing_can_be_measured(
    one_table: Table, two_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(count: int) -> list[int]:
        raise torch.OutOfMemoryError("full")

    given: Any = {
        "weight_bytes": 200,
        "copies": full,
        "candidates": lambda copy: (OWN, CUBLAS),
        "launches": lambda copy, choice, workspace: (),
    }
    assert tuning.choose(KEY, CPU, **given) == tuning.OWN
    assert one_table.won() == (0, 0)
    monkeypatch.setattr(tuning, "captured", lambda device: True)
    given["copies"] = None  # nothing is made while a graph is captured
    assert tuning.choose(KEY, CPU, **given) == tuning.OWN
    one_table.keep(KEY, CUBLAS)
    assert tuning.choose(KEY, CPU, **given) == CUBLAS


def test_the_build_has_a_name(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    assert choices.build_id(library) == "none"
    choices.build_id.cache_clear()
    library.write_bytes(b"one")
    one = choices.build_id(library)
    choices.build_id.cache_clear()
    library.write_bytes(b"two")
    assert len(one) == 16 and choices.build_id(library) not in (one, "none")
    choices.build_id.cache_clear()
