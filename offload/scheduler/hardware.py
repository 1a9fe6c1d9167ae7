"""What a machine can do, as data: rates measured on it, and a fingerprint of what was measured."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from offload.errors import OffloadError

FORMAT = 6  # raised when what is measured, or how, changes: older figures are then measured anew
# Rates and times beyond these are mistakes, and sums of what follows from them would overflow.
LEAST, MOST = 1e-12, 1e24
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

# (rows, tokens or queries a KV head; the rate), by the first.
Curve = tuple[tuple[int, float], ...]
_ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}
# Keys and values to which cores attend most like it, where a dtype's own rate was not measured.
_ATTENDED_ALIKE = {**_ALIKE, "float32": "float16", "int8": "bfloat16"}


class HardwareError(OffloadError, ValueError):
    """A description of a machine is damaged, or lacks a rate that is needed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rates depend on: if any of it changes, it is another machine. Sizes are in bytes."""

    gpu: str | None  # its name; None: no GPU computes
    gpu_memory: int
    gpus: int
    driver: str | None
    cpu: str
    cores: int
    host_memory: int  # that this process may use
    disk: str  # where the offload folder lies: its file system

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits."""
        facts = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one machine, in bytes or FLOP per second, and the seconds that small operations
    take; `_UNITS` has the unit of each. None was not measured, for the reason in `absent`.
    """

    machine: Machine
    link_up: float | None = None  # pinned CPU memory to the GPU
    link_down: float | None = None
    link_up_both: float | None = None  # while the other direction is as busy
    link_down_both: float | None = None
    disk: float | None = None  # direct reads into pinned memory
    hbm: float | None = None  # reads of the compute device's memory
    hbm_copy: float | None = None  # bytes read + written by copies within it
    matrix: Mapping[str, Curve] = field(default_factory=dict)  # by dtype: rows -> FLOP/s, sustained
    # By the dtype or precision of the weights: rows -> bytes of weights per second that the fused
    # engine's products of so few rows read.
    few_rows: Mapping[str, Curve] = field(default_factory=dict)
    # Tokens of a prompt -> FLOP per second of its attention; only what is not masked counts.
    prompt_attention: Curve = ()
    gpu_attention: Curve = ()  # queries a KV head -> bytes per second, while decoding
    # By the dtype of keys and values: queries a KV head -> bytes of them per second, int8's scales
    # included.
    cpu_attention: Mapping[str, Curve] = field(default_factory=dict)
    cpu_attention_by: str = ""  # what measured it
    host_read: float | None = None  # plain reads of CPU memory, by as many cores as attend
    host_read_beside: float | None = None  # the same beside a full stream up the link
    link_beside: float | None = None  # the rate of that stream meanwhile
    # Likewise: attention beside a full stream, and the rate of that stream meanwhile.
    cpu_attention_beside: Mapping[str, Curve] = field(default_factory=dict)
    link_beside_attention: Mapping[str, Curve] = field(default_factory=dict)
    kernel: float | None = None  # a small kernel on the compute device, right behind another
    launch: float | None = None  # launching a kernel by PyTorch, on the host
    launch_after_cores: float | None = None  # the same after the host has waited for CPU cores
    # Making, checking and launching a layer's calls for a part of a prompt, in Python.
    prompt_layer: float | None = None
    # From queries on the compute device to the result of CPU cores back there, without attention.
    exchange: float | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            for rate in _values(value):
                if not (isinstance(rate, float) and math.isfinite(rate) and rate > 0):
                    raise HardwareError(f"{name} is {rate!r}, not a number of {unit} above zero")
                if not LEAST <= rate <= MOST:
                    raise HardwareError(f"{name} is {rate!r} {unit}, which no machine has")
        curves = [getattr(self, name) for name in _CURVES]
        for curve in itertools.chain(curves, *(getattr(self, x).values() for x in _CURVES_BY_KIND)):
            points = [x for x, _ in curve]
            if points != sorted(set(points)) or any(x < 1 for x in points):
                raise HardwareError(f"a curve has the points {points}, not rising from 1 on")

    def matrix_rate(self, dtype: str, rows: float) -> float:
        """FLOP/s of a product of `rows` rows, interpolated between measured counts on logarithmic
        scales. A dtype that was not measured has the rate of another of the same width. Raises
        HardwareError.
        """
        curve = self._products(dtype)
        if not curve:
            raise self.lacks(f"the matrix rate of {dtype}", "matrix")
        first = curve[0]
        return first[1] * rows / first[0] if rows <= first[0] else _between(curve, rows)

    def multiplies(self, dtype: str) -> bool:
        """Whether `matrix_rate` knows the dtype."""
        return bool(self._products(dtype))

    def _products(self, dtype: str) -> Curve:
        return self.matrix.get(dtype) or self.matrix.get(_ALIKE.get(dtype, ""), ())

    def few_rows_rate(self, kept: str, rows: float) -> float | None:
        """Bytes of weights that products of so many rows read per second where they are `kept` in
        that dtype or precision; None where it was not measured, or for as many rows.
        """
        curve = self._few_rows(kept)
        if not curve or rows > curve[-1][0]:
            return None
        return _between(curve, max(rows, curve[0][0]))

    def most_few_rows(self, kept: str) -> int:
        """The most rows for which `few_rows_rate` knows a rate; 0 where it knows none."""
        curve = self._few_rows(kept)
        return curve[-1][0] if curve else 0

    def _few_rows(self, kept: str) -> Curve:
        return self.few_rows.get(kept) or self.few_rows.get(_ALIKE.get(kept, ""), ())

    def attention_rate(self, group: int, dtype: str) -> float | None:
        """Bytes of keys and values of `dtype` per second that the CPU attends to, with nothing
        beside it, for `group` queries a KV head: the rate measured for the next larger group. For
        a dtype that was not measured that of another, but for int8.
        """
        kind = dtype if dtype == "int8" else _attended(self.cpu_attention, dtype)
        return _of_group(self.cpu_attention.get(kind, ()), group)

    def beside(self, group: int, dtype: str) -> tuple[float, float]:
        """The shares of their rates, at most 1, that attention on the CPU and the stream up the
        link keep when both run; from plain reads if attention was not measured so.
        """
        link, kind = self.needed("link_up"), _attended(self.cpu_attention_beside, dtype)
        alone, attends, moves = (
            _of_group(curves.get(kind, ()), group)
            for curves in (
                self.cpu_attention,
                self.cpu_attention_beside,
                self.link_beside_attention,
            )
        )
        if attends is None or moves is None or alone is None:
            alone, attends, moves = self.host_read, self.host_read_beside, self.link_beside
        kept = attends / alone if attends and alone else 1.0
        return min(1.0, kept), min(1.0, (moves or link) / link)

    def prompt_attention_rate(self, tokens: int) -> float | None:
        """FLOP per second of attention within prompts of so many tokens, beyond those that
        were measured that of the nearest; None where none was.
        """
        curve = self.prompt_attention
        return _between(curve, max(tokens, curve[0][0])) if curve else None

    def gpu_attention_rate(self, group: int) -> float:
        """Bytes of keys and values per second that the compute device attends to while decoding,
        for `group` queries a KV head; the rate of its memory if that was not measured.
        """
        return _of_group(self.gpu_attention, group) or self.needed("hbm")

    def needed(self, name: str) -> float:
        """The rate `name`. Raises HardwareError where it was not measured."""
        value = getattr(self, name)
        if value is None:
            raise self.lacks(f"the rate {name!r}", name)
        return value

    def lacks(self, what: str, key: str) -> HardwareError:
        """The error for a rate that is not there."""
        reason = self.absent.get(key, "it was not measured")
        return HardwareError(
            f"these figures of a machine lack {what}: {reason}. Measure on the machine that is to "
            "run the model (offload info --measure --json) and pass the file with --hardware"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types, every rate with its unit; `from_dict` reads it."""
        rates: dict[str, Any] = {}
        for name, unit in _UNITS.items():
            value = getattr(self, name)
            if value is None or value == () or value == {}:
                continue
            if isinstance(value, float):
                rates[name] = {"value": value, "unit": unit}
            elif isinstance(value, Mapping):
                curves = {dtype: _curve_dict(curve) for dtype, curve in value.items()}
                rates[name] = {"value": curves, "unit": unit}
            else:
                rates[name] = {"value": _curve_dict(value), "unit": unit}
        return {
            "format": FORMAT,
            "fingerprint": self.machine.fingerprint,
            "machine": asdict(self.machine),
            "rates": rates,
            "cpu_attention_by": self.cpu_attention_by,
            "absent": dict(self.absent),
        }

    @classmethod
    def from_dict(cls, found: Any) -> Hardware:
        """What `as_dict` gave, or a person wrote, in GB/s or TFLOP/s too. Raises HardwareError. The
        fingerprint is not compared: the file may describe another machine.
        """
        if not isinstance(found, Mapping) or not isinstance(found.get("machine"), Mapping):
            raise HardwareError("no description of a machine: it has no 'machine' with its facts")
        if found.get("format") != FORMAT:
            raise HardwareError(
                f"its format is {found.get('format')!r}, and this version reads {FORMAT}; measure "
                "anew with offload info --measure"
            )
        names = {f.name for f in fields(Machine)}
        facts = found["machine"]
        if facts.keys() != names:
            wrong = sorted(facts.keys() ^ names)[0]
            raise HardwareError(f"'machine' has the fields of no machine: see {wrong!r}")
        for name in ("gpu_memory", "host_memory"):
            if type(facts[name]) is not int or not 0 <= facts[name] < 1 << 62:
                raise HardwareError(
                    f"{name} of 'machine' is {facts[name]!r}, not a number of bytes"
                )
        rates, absent = found.get("rates", {}), found.get("absent", {})
        for name, part in (("rates", rates), ("absent", absent)):
            if not isinstance(part, Mapping):
                raise HardwareError(f"its {name!r} are {part!r}, not an object with names")
        unknown = sorted(rates.keys() - _UNITS.keys())
        if unknown:
            raise HardwareError(f"the rate {unknown[0]!r} is none; known are {', '.join(_UNITS)}")
        values = {name: _read_rate(name, entry) for name, entry in rates.items()}
        return cls(
            machine=Machine(**facts),
            cpu_attention_by=str(found.get("cpu_attention_by", "")),
            absent=dict(absent),
            **values,
        )


def _between(curve: Curve, at: float) -> float:
    """The rate between two that were measured, interpolated on logarithmic scales."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= at <= x1:
            share = math.log(at / x0) / math.log(x1 / x0)
            return y0 * (y1 / y0) ** share
    return curve[-1][1]


def _attended(curves: Mapping[str, Curve], dtype: str) -> str:
    """The dtype of keys and values, among those that were measured, that stands for another."""
    wanted = (dtype, _ATTENDED_ALIKE.get(dtype, ""), *sorted(curves))
    return next((kind for kind in wanted if kind in curves), "")


def _of_group(curve: Curve, group: int) -> float | None:
    """The rate of the next larger number of queries a KV head that was measured."""
    wider = [rate for queries, rate in curve if queries >= group]
    if wider:
        return wider[0]
    return curve[-1][1] if curve else None


_UNITS = {
    "link_up": "B/s",
    "link_down": "B/s",
    "link_up_both": "B/s",
    "link_down_both": "B/s",
    "disk": "B/s",
    "hbm": "B/s",
    "hbm_copy": "B/s",
    "matrix": "FLOP/s",
    "few_rows": "B/s",
    "prompt_attention": "FLOP/s",
    "gpu_attention": "B/s",
    "cpu_attention": "B/s",
    "host_read": "B/s",
    "host_read_beside": "B/s",
    "link_beside": "B/s",
    "cpu_attention_beside": "B/s",
    "link_beside_attention": "B/s",
    "kernel": "s",
    "launch": "s",
    "prompt_layer": "s",
    "launch_after_cores": "s",
    "exchange": "s",
}
# Those that are more than a number: a curve, and one for each dtype or precision.
_CURVES = (
    "prompt_attention",
    "gpu_attention",
)
_CURVES_BY_KIND = (
    "matrix",
    "few_rows",
    "cpu_attention",
    "cpu_attention_beside",
    "link_beside_attention",
)


def _values(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [rate for curve in value.values() for _, rate in curve]
    return [rate for _, rate in value] if isinstance(value, tuple) else [value]


def _curve_dict(curve: Curve) -> dict[str, float]:
    return {str(x): rate for x, rate in curve}


def _read_rate(name: str, entry: Any) -> Any:
    if not isinstance(entry, Mapping) or entry.keys() != {"value", "unit"}:
        raise HardwareError(f"the rate {name!r} is {entry!r}, not a 'value' with a 'unit'")
    scale, value = _scale(name, entry["unit"]), entry["value"]
    try:
        if name in _CURVES_BY_KIND:
            return {dtype: _read_curve(curve, scale) for dtype, curve in value.items()}
        if name in _CURVES:
            return _read_curve(value, scale)
        return float(value) * scale
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise HardwareError(f"the rate {name!r} has the value {value!r}") from None


def _read_curve(curve: Mapping[str, Any], scale: float) -> Curve:
    return tuple(sorted((int(x), float(rate) * scale) for x, rate in curve.items()))


def _scale(name: str, unit: Any) -> float:
    wanted = _UNITS[name]
    if isinstance(unit, str) and wanted == "s" and unit in _TIMES:
        return _TIMES[unit]
    if isinstance(unit, str) and wanted != "s" and unit.endswith(wanted):
        prefix = unit.removesuffix(wanted)
        if prefix in _SCALES:
            return _SCALES[prefix]
    raise HardwareError(f"the rate {name!r} is in {unit!r}; its unit is {wanted}")
