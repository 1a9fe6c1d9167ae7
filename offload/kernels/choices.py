"""Which way to compute a product was quickest on this machine: the table of choices, in a file."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from offload.home import expanded, home_folder
from offload.kernels.library import FILE

Way = Literal["own", "apart", "cublas", "whole", "rows", "columns"]
SKINNY = ("own", "apart")  # a kernel of the project, for few rows
PIECES = ("whole", "rows", "columns")  # cuBLAS with many rows
WAYS = get_args(Way)
BUCKETS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Key:
    """What the choice depends on. `rows` is a bucket: of `BUCKETS`, or for many rows a power of
    two. The flags say what is computed around the product: the kind of norm before it, an
    activation, a residual sum after it, and whether it begins before the kernel ahead of it has
    ended (`early`). With many rows only `transposed` and `bias` count, as the rest is done by other
    kernels.
    """

    dtype: str
    outputs: int
    depth: int
    rows: int
    gated: bool = False
    norm: str = ""
    activation: bool = False
    residual: bool = False
    early: bool = False
    transposed: bool = False
    bias: bool = False
    form: str = ""

    def __str__(self) -> str:
        flags = ("gated", "norm", "activation", "residual", "early", "transposed", "bias")
        named = [
            f"{self.norm}_norm" if flag == "norm" else flag for flag in flags if getattr(self, flag)
        ]
        return " ".join(
            [
                self.dtype,
                *filter(None, [self.form]),
                f"N{self.outputs}",
                f"K{self.depth}",
                f"rows{self.rows}",
                *named,
            ]
        )


@dataclass(frozen=True)
class Choice:
    """A way to compute a product.

    With few rows, "own": QuantGemm, or SkinnyGemm with its variant and splits; "apart": SkinnyGemm
    with the norm in a kernel before it; "cublas": torch's product, the rest in kernels around it.
    With many rows, torch's product: "whole", or in `splits` pieces of the "rows" or of the outputs,
    "columns".
    """

    way: Way
    variant: int = 0
    splits: int = 0
    us: float | None = None  # as measured
    cublas_us: float | None = None

    @classmethod
    def parse(cls, entry: Any) -> Choice:
        """The choice in an entry of the file; raises ValueError for an entry that is no choice."""
        if not isinstance(entry, dict) or entry.get("way") not in WAYS:
            raise ValueError(f"no choice: {entry!r}")
        variant, splits = entry.get("variant", 0), entry.get("splits", 0)
        for number in (variant, splits):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"no variant or splits: {number!r}")
        us, cublas_us = entry.get("us"), entry.get("cublas_us")
        for time in (us, cublas_us):
            if time is not None and not isinstance(time, (int, float)):
                raise ValueError(f"no time: {time!r}")
        if entry["way"] in ("rows", "columns") and not splits:
            raise ValueError(f"no pieces: {entry!r}")
        return cls(entry["way"], variant, splits, us, cublas_us)


OWN, CUBLAS = Choice("own"), Choice("cublas")


def dtype_name(dtype: torch.dtype) -> str:
    """As measurements are kept by it."""
    return str(dtype).removeprefix("torch.")


def bucket(rows: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The smallest bucket that holds `rows`, which is at least 1."""
    for most in buckets:
        if rows <= most:
            return most
    raise ValueError(f"rows must be at most {buckets[-1]}, not {rows}")


def cache_path() -> str:
    """The file that holds this user's measurements."""
    return str(expanded(home_folder() / "kernels.json"))


@functools.cache
def build_id(file: Path = FILE) -> str:
    """A hash that identifies this build of the kernels library; "none" where there is none."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return "none"


class Table:
    """The choices for one GPU, one build of the library and one torch, backed by the user's file.

    Entries of other machines and builds in the file are kept.
    """

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self._choices: dict[str, Choice] = {}
        damaged = 0
        for key, entry in _read().get(machine, {}).items():
            try:
                self._choices[key] = Choice.parse(entry)
            except ValueError:
                damaged += 1
        if damaged:
            warnings.warn(
                f"{damaged} entries of {cache_path()} make no sense; they are measured again",
                stacklevel=2,
            )

    def get(self, key: Key) -> Choice | None:
        """The choice for `key`, if it was measured."""
        return self._choices.get(str(key))

    def keep(self, key: Key, choice: Choice) -> None:
        """Remember a choice, in the file too; a file that cannot be written costs a warning."""
        self._choices[str(key)] = choice
        try:
            _write(self.machine, {str(key): asdict(choice)})
        except OSError as error:
            warnings.warn(
                f"the kernels' measurements are not kept: {error}; they are repeated next time",
                stacklevel=2,
            )

    def won(self) -> tuple[int, int]:
        """How many of the measured products of few rows an own kernel computes, and how many there
        are.
        """
        few = [
            choice.way in SKINNY for choice in self._choices.values() if choice.way not in PIECES
        ]
        return sum(few), len(few)

    def cut(self) -> tuple[int, int]:
        """How many of the measured products of many rows run in pieces, and how many there are."""
        many = [choice.way != "whole" for choice in self._choices.values() if choice.way in PIECES]
        return sum(many), len(many)

    def __str__(self) -> str:
        own, measured = self.won()
        share = f" ({own / measured:.0%})" if measured else ""
        text = f"{own} of {measured} measured products{share} run on the own kernel, else cuBLAS"
        pieces, many = self.cut()
        return f"{text}; {pieces} of {many} of many rows in pieces" if many else text


@functools.cache
def table(device: int) -> Table:
    """The table of GPU `device`."""
    name = torch.cuda.get_device_name(device)
    return Table(f"{name}, library {build_id()}, torch {torch.__version__}")


def _read() -> dict[str, dict[str, Any]]:
    try:
        path = cache_path()
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read ({error}); it is written anew", stacklevel=3)
        return {}
    if not isinstance(found, dict):
        warnings.warn(f"{path} holds no measurements; it is written anew", stacklevel=3)
        return {}
    return {name: entries for name, entries in found.items() if isinstance(entries, dict)}


def _write(machine: str, entries: dict[str, Any]) -> None:
    path = cache_path()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was said when the table was read
        found = _read()
    found.setdefault(machine, {}).update(entries)
    # Written beside and renamed: another process may be reading it.
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
