"""A machine's rates as data: to a file and back, and what is asked of them."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import GIB, H200, machine

import offload.scheduler.hardware as hardware_module
from offload.scheduler.hardware import FORMAT, Curve, Hardware, HardwareError, Machine

rates = st.floats(1e-9, 1e18)
curves = st.dictionaries(st.integers(1, 1 << 20), rates, min_size=1, max_size=5).map(
    lambda points: tuple(sorted(points.items()))
)
hardware = st.builds(
    Hardware,
    machine=st.builds(machine, st.text(), st.integers(0, 1 << 40), st.integers(0, 1 << 40)),
    link_up=st.none() | rates,
    disk=st.none() | rates,
    matrix=st.dictionaries(st.text(), curves, max_size=3),
    cpu_attention=st.dictionaries(st.text(), curves, max_size=3),
    cpu_attention_by=st.text(),
    launch=st.none() | rates,
    absent=st.dictionaries(st.text(), st.text(), max_size=3),
)


@given(hardware)
def test_a_file_gives_back_what_was_measured(found: Hardware) -> None:
    assert Hardware.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_units_are_given_and_read() -> None:
    kept = H200.as_dict()
    assert kept["rates"]["link_up"] == {"value": 55e9, "unit": "B/s"}
    assert kept["rates"]["matrix"]["unit"] == "FLOP/s"
    kept["rates"]["link_up"] = {"value": 55, "unit": "GB/s"}
    kept["rates"]["hbm"] = {"value": 4.39, "unit": "TB/s"}
    kept["rates"]["launch"] = {"value": 3, "unit": "us"}
    kept["rates"]["matrix"] = {"value": {"bfloat16": {"64": 1, "2": 0.5}}, "unit": "TFLOP/s"}
    read = Hardware.from_dict(kept)
    assert (read.link_up, read.hbm, read.launch) == pytest.approx((55e9, 4.39e12, 3e-6))
    assert read.matrix == {"bfloat16": ((2, 0.5e12), (64, 1e12))}


def test_every_rate_has_a_unit_and_is_read_as_what_it_is() -> None:
    others = {"machine", "cpu_attention_by", "absent"}
    rates = {f.name: f for f in fields(Hardware) if f.name not in others}
    assert hardware_module._UNITS.keys() == rates.keys()
    curves = {name for name, f in rates.items() if f.default == ()}
    assert set(hardware_module._CURVES) == curves
    by_kind = {name for name, f in rates.items() if f.default_factory is dict}
    assert set(hardware_module._CURVES_BY_KIND) == by_kind


BROKEN: list[tuple[tuple[str, ...], Any, str]] = [
    (("machine",), None, "no description of a machine"),
    (("machine", "gpu_memory"), "24GiB", "gpu_memory of 'machine' is '24GiB'"),
    (("machine", "host_memory"), -1, "host_memory of 'machine' is -1, not a number of bytes"),
    (("machine", "gpu_memory"), 10**400, "not a number of bytes"),
    (("rates",), None, "its 'rates' are None, not an object"),
    (("absent",), ["disk"], r"its 'absent' are \['disk'\], not an object"),
    (("format",), 0, f"its format is 0, and this version reads {FORMAT}"),
    (("machine", "cores"), ..., "see 'cores'"),
    (("rates", "speed"), {"value": 1.0, "unit": "B/s"}, "the rate 'speed' is none"),
    (("rates", "disk"), 5e9, "'disk' is 5000000000.0, not a 'value' with a 'unit'"),
    (("rates", "disk", "unit"), "GiB/s", "'disk' is in 'GiB/s'; its unit is B/s"),
    (("rates", "launch", "unit"), "B/s", "its unit is s"),
    (("rates", "launch", "unit"), ["us"], r"is in \['us'\]; its unit is s"),
    (("rates", "disk", "value"), "fast", "'disk' has the value 'fast'"),
    (("rates", "disk", "value"), -1, "disk is -1.0, not a number of B/s above zero"),
    (("rates", "hbm", "value"), float("nan"), "hbm is nan"),
    (("rates", "hbm", "value"), 10**400, "'hbm' has the value 1000"),
    (("rates", "link_up", "value"), 1e-300, "link_up is 1e-300 B/s, which no machine has"),
    (
        ("rates", "cpu_attention", "value"),
        {"int8": {"1": 1e30}},
        "cpu_attention is 1e[+]30 B/s, which no",
    ),
    (("rates", "matrix", "value"), 3.0, "'matrix' has the value 3.0"),
    (("rates", "matrix", "value", "bfloat16"), {"0": 1.0}, r"points \[0\], not rising from 1"),
    (("rates", "cpu_attention", "value"), {"int8": {"one": 1.0}}, "'cpu_attention' has the value"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_a_damaged_description_is_one_clear_error(
    path: tuple[str, ...], value: Any, message: str
) -> None:
    kept: Any = copy.deepcopy(H200.as_dict())
    inner = kept
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(HardwareError, match=message):
        Hardware.from_dict(kept)


@pytest.mark.parametrize("junk", [None, 3, [], "x", {}, {"machine": 3}])
def test_what_is_no_description(junk: Any) -> None:
    with pytest.raises(HardwareError, match="no description of a machine"):
        Hardware.from_dict(junk)


@pytest.mark.parametrize("name", [f.name for f in fields(Machine)])
def test_every_fact_of_a_machine_changes_the_fingerprint(name: str) -> None:
    one = machine("H200", 141 * GIB, 128 * GIB)
    other = replace(one, **{name: 7 if isinstance(getattr(one, name), int) else "another"})
    assert one.fingerprint == machine("H200", 141 * GIB, 128 * GIB).fingerprint
    assert one.fingerprint != other.fingerprint


@given(curves, st.integers(1, 1 << 21))
def test_a_rate_between_two_counts_of_rows_lies_between_theirs(curve: Curve, rows: int) -> None:
    found = replace(H200, matrix={"float32": curve}).matrix_rate("float32", rows)
    below = [y for x, y in curve if x <= rows]
    above = [y for x, y in curve if x >= rows]
    if not below:
        assert found == pytest.approx(curve[0][1] * rows / curve[0][0])
    elif not above:
        assert found == curve[-1][1]
    else:
        low, high = sorted((below[-1], above[0]))
        assert low * (1 - 1e-9) <= found <= high * (1 + 1e-9)


def test_one_16_bit_type_stands_for_the_other() -> None:
    assert H200.matrix_rate("float16", 8192) == 670e12
    with pytest.raises(HardwareError, match="lack the matrix rate of float32: it was not measured"):
        H200.matrix_rate("float32", 1)


def test_attention_of_a_group_that_was_not_measured() -> None:
    some = replace(H200, cpu_attention={"float16": ((1, 80e9), (4, 60e9), (16, 20e9))})
    assert [some.attention_rate(g, "float16") for g in (1, 2, 4, 7, 16, 64)] == [
        80e9,
        60e9,
        60e9,
        20e9,
        20e9,
        20e9,
    ]
    assert replace(H200, cpu_attention={}).attention_rate(1, "float16") is None


def test_attention_to_a_dtype_that_was_not_measured() -> None:
    def rates(*measured: str) -> list[float | None]:
        curves = {dtype: ((1, float(place + 1)),) for place, dtype in enumerate(measured)}
        some = replace(H200, cpu_attention=curves)
        return [some.attention_rate(1, d) for d in ("float32", "float16", "bfloat16", "int8")]

    assert rates("bfloat16", "float16", "int8") == [2, 2, 1, 3]
    assert rates("bfloat16") == [1, 1, 1, None]  # a gain from int8 takes a measurement
    assert rates("float16", "int8") == [1, 1, 1, 2]
    assert rates("float32") == [1, 1, 1, None]
    assert rates("int8") == [1, 1, 1, 1]


def test_what_attention_keeps_beside_a_stream_is_its_dtypes_own() -> None:
    some = replace(
        H200,
        cpu_attention={d: ((1, rate),) for d, rate in (("bfloat16", 80e9), ("int8", 100e9))},
        cpu_attention_beside={"bfloat16": ((1, 60e9),)},
        link_beside_attention={"bfloat16": ((1, 44e9),)},
    )
    # The share that the other kept, not its rate beside a stream.
    assert [some.beside(1, d) for d in ("float16", "int8")] == [pytest.approx((0.75, 0.8))] * 2
    own = {"float16": ((1, 50e9),), **some.cpu_attention}
    beside = {"float16": ((1, 45e9),), **some.cpu_attention_beside}
    both = replace(
        some,
        cpu_attention=own,
        cpu_attention_beside=beside,
        link_beside_attention={"float16": ((1, 55e9),), **some.link_beside_attention},
    )
    assert both.beside(1, "float16") == pytest.approx((0.9, 1.0))
    assert both.beside(1, "bfloat16") == pytest.approx((0.75, 0.8))
