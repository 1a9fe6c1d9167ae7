"""Rates of the machine that the tests run on: plausible, kept, anew when it changes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from offload.bench.shapes import shape_config
from offload.errors import OffloadError
from offload.measure import cache, compute, fused, hardware, host, machine, quick
from offload.measure.cache import kept_hardware, measured_hardware, rates_file, read_hardware
from offload.measure.exchange import exchange_seconds
from offload.measure.hardware import measure_hardware
from offload.measure.host import (
    HostMemory,
    PlainReader,
    attention_rates,
    rates_beside,
    read_rate,
)
from offload.measure.link import LinkRates
from offload.models.profile import config_profile
from offload.scheduler.hardware import HardwareError
from offload.scheduler.plan import Budget
from offload.scheduler.planner import plan_job
from offload.scheduler.setting import Goal, Job

CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is measured as ever, but for a moment."""
    monkeypatch.setattr(host, "BYTES", 16 << 20)
    monkeypatch.setattr(host, "GROUPS", (1, 4))
    monkeypatch.setattr(hardware, "GROUPS", (1, 4))
    monkeypatch.setattr(hardware, "DISK_BYTES", 32 << 20)
    monkeypatch.setattr(hardware, "ROWS", (1, 8, 64))
    monkeypatch.setattr(compute, "TIMED_SECONDS", 0.01)
    for measured in (read_rate, attention_rates):
        monkeypatch.setattr(measured, "__defaults__", (0.02,))


def test_all_that_this_machine_has_is_measured(brief: None, tmp_path: Path) -> None:
    steps: list[str] = []
    found = measure_hardware(CPU, tmp_path / "new", steps.append)
    assert found.host_read is not None and 1e8 < found.host_read < 1e13
    assert found.disk is not None or "disk" in found.absent
    assert found.hbm == found.host_read  # here the CPU's memory is the compute device's
    assert [rows for rows, _ in found.matrix["float32"]] == [1, 8, 64]
    assert found.matrix_rate("float32", 64) > 1e7
    assert found.cpu_attention.keys() >= {"bfloat16", "float16"} and found.cpu_attention_by
    assert "measuring: disk" in steps
    assert list((tmp_path / "new").iterdir()) == []  # the test file is gone
    assert found.link_up is not None and found.link_up > 1e7  # copies within that memory
    for name in ("link_down", "link_down_both", "host_read_beside", "launch"):
        assert getattr(found, name) is None
        assert found.absent[name] == "no GPU: layers run on cpu"


def test_a_part_that_fails_is_absent_with_the_reason(
    brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the drive is on fire")

    monkeypatch.setattr(hardware, "measure_disk", fail)
    monkeypatch.setattr(hardware, "read_rate", fail)
    found = measure_hardware(CPU, tmp_path)
    assert found.disk is None and found.absent["disk"] == "the drive is on fire"
    assert found.host_read is None and found.absent["cpu_attention"] == "the drive is on fire"
    assert found.hbm is None and "hbm" in found.absent
    assert found.matrix["float32"]


def test_rates_are_kept_until_the_machine_changes(
    brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_hardware(tmp_path, CPU) is None
    found, file = measured_hardware(tmp_path, CPU)
    assert file == rates_file(tmp_path, CPU) and read_hardware(file) == found
    assert file.stem == found.machine.fingerprint
    measured: list[int] = []

    def again(*args: object) -> object:
        measured.append(1)
        return measure_hardware(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "measure_hardware", again)
    assert measured_hardware(tmp_path, CPU) == (found, file) and not measured
    assert measured_hardware(tmp_path, CPU, again=True)[1] == file and len(measured) == 1
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(77)))
    assert kept_hardware(tmp_path, CPU) is None
    other, elsewhere = measured_hardware(tmp_path, CPU)
    assert other.machine == replace(found.machine, cores=77) and elsewhere != file
    assert len(measured) == 2 and file.exists()


@pytest.mark.parametrize("junk", ["{", '{"machine": {}}', "[" * 100_000], ids=["{", "{}", "["])
def test_a_file_that_cannot_be_read_is_measured_anew(
    brief: None, tmp_path: Path, junk: str
) -> None:
    file = rates_file(tmp_path, CPU)
    file.parent.mkdir()
    file.write_text(junk)
    with pytest.raises(HardwareError, match=str(file)):
        read_hardware(file)
    assert kept_hardware(tmp_path, CPU) is None
    found, _ = measured_hardware(tmp_path, CPU)
    assert kept_hardware(tmp_path, CPU) == found


def test_rates_of_another_machine_under_this_ones_name_are_not_taken(
    brief: None, tmp_path: Path
) -> None:
    found, file = measured_hardware(tmp_path, CPU)
    other = replace(found, machine=replace(found.machine, cpu="another"))
    file.write_text(json.dumps(other.as_dict()))
    assert kept_hardware(tmp_path, CPU) is None


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="is a file"):
        measured_hardware(tmp_path / "file", CPU)


def test_readers_read_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(20 << 20)
    assert memory._memory.data_ptr() % (2 << 20) == 0  # huge pages, as the engine's
    sequence = memory._cache(torch.float32)[:, :1].nbytes
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    readers = [memory.reader(), *(memory.attention(2, dtype) for dtype in kinds)]
    for reader in readers:
        assert reader.read() >= 20 << 20
    monkeypatch.setattr(host, "CALL_BYTES", 2 * sequence)  # five sequences: two, two and one
    for reader in (memory.reader(), *(memory.attention(2, dtype) for dtype in kinds)):
        read = [reader.read() for _ in range(4)]
        assert read[0] == read[1] == 2 * read[2] == read[3]
    plain = PlainReader(torch.zeros(3, 1 << 20, dtype=torch.bfloat16))
    assert plain.read() == 6 << 20
    assert read_rate(plain, 0.01) > 1e8


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=GPU)])
def test_what_the_engines_own_parts_give(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "WIDTH", 256)
    monkeypatch.setattr(fused, "ROTATED", 1 << 20)
    found = fused.few_rows(device, (1, 3))
    assert set(found) == {"bfloat16", "int8", "int4"}
    for curve in found.values():
        assert [rows for rows, _ in curve] == [1, 3] and min(rate for _, rate in curve) > 1e4
    if device.type == "cuda":  # on a CPU the reference takes its time for so many keys
        assert [group for group, _ in fused.attention(device)] == [1, 8]
        assert [tokens for tokens, _ in fused.prompt_attention(device)] == [128, 512, 4096]
        assert 1e-5 < fused.prompt_layer_seconds(device) < 1e-2
        assert 1e-7 < fused.kernel_seconds(device) < 1e-4
        launch, way = exchange_seconds(device)
        assert 1e-6 < launch < 1e-2 and 1e-6 < way < 1e-2


def test_parts_that_were_measured_before_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("few_rows", "prompt_attention", "attention"):
        monkeypatch.setattr(fused, name, lambda device, *rows, name=name: (name, rows))
    monkeypatch.setattr(fused, "kernel_seconds", lambda device: _fail())
    found = {}
    with pytest.raises(OffloadError):
        for name, value in fused.own_rates(CPU, (1, 2)):
            found[name] = value
    assert found == {
        "few_rows": ("few_rows", ((1, 2),)),
        "prompt_attention": ("prompt_attention", ()),
        "gpu_attention": ("attention", ()),
    }
    monkeypatch.setattr(fused, "kernel_seconds", lambda device: 1.0)
    assert tuple(name for name, _ in fused.own_rates(CPU)) == fused.RATES


def test_rates_of_two_that_work_at_once() -> None:
    """A reader of a known pace, beside something else."""

    class Paced:
        how = "by the clock"

        def read(self) -> int:
            time.sleep(0.01)
            return 1000

    def other() -> float:
        time.sleep(0.2)
        return 5.0

    rate, found = rates_beside(Paced(), other)
    assert found == 5.0 and 20_000 < rate <= 100_000
    with pytest.raises(RuntimeError, match="too short"):
        rates_beside(Paced(), lambda: 1.0)
    with pytest.raises(OffloadError):  # what fails beside the reader ends the reader, too
        rates_beside(Paced(), _fail)


@pytest.mark.parametrize("after", [0, 3])
def test_a_reader_that_fails_beside_something_else_says_why(after: int) -> None:
    """Neither waited for for ever, nor taken for work that was too short."""

    class Failing:
        how = "until it fails"
        left = after

        def read(self) -> int:
            if not self.left:
                raise OffloadError("the cores went away")
            self.left -= 1
            return 1000

    with pytest.raises(OffloadError, match="went away"):
        rates_beside(Failing(), lambda: 5.0)


def _fail() -> float:
    raise OffloadError("no")


def test_the_gpu_that_is_measured_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Events and graphs are of the current GPU: of another one they would time nothing."""
    gpu, seen = torch.device("cuda", 1), []
    now = [0]

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        now.append(device.index)
        yield
        now.pop()

    def measured(name: str, value: object) -> Callable[..., object]:
        return lambda *_: seen.append((name, now[-1])) or value

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 34, 1 << 34))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    here = machine.this_machine(tmp_path, CPU)
    for where in (hardware, quick):
        for name, value in (
            *((name, 1.0) for name in ("launch_seconds", "prompt_layer_seconds", "product_rate")),
            *(("measure_disk", 1.0), ("read_rate", 1.0), ("hbm_rates", (1.0, 1.0))),
            *(("exchange_seconds", (1.0, 1.0)), ("link_rates", LinkRates(1.0, 1.0, 1.0, 1.0))),
            *((name, {}) for name in ("own_rates", "attention_rates", "beside")),
            *(("HostMemory", Mock()), ("why_not_host", None), ("this_machine", here)),
        ):
            if name not in ("why_not_host", "this_machine"):
                monkeypatch.setattr(where, name, measured(name, value))
            else:
                monkeypatch.setattr(where, name, lambda *_, value=value: value)
    assert measure_hardware(gpu, tmp_path).link_up == 1.0
    assert len({name for name, _ in seen}) == 12 and {index for _, index in seen} == {1}
    seen.clear()
    quick.quick_hardware.cache_clear()
    assert quick.quick_hardware(gpu, torch.float16, (), tmp_path).link_up == 1.0
    assert len({name for name, _ in seen}) == 12 and {index for _, index in seen} == {1}
    assert now == [0]


@GPU
@pytest.mark.gpu
def test_a_gpu_and_its_link(tmp_path: Path) -> None:
    start = time.perf_counter()
    found = measure_hardware(torch.device("cuda"), tmp_path)
    assert time.perf_counter() - start < 60
    assert not found.absent
    assert found.link_up and found.link_up_both and found.link_down and found.link_down_both
    assert 0.3 < found.link_up_both / found.link_up < 1.05
    assert found.host_read and found.host_read_beside and found.link_beside
    assert 0.3 < found.link_beside / found.link_up < 1.05
    assert found.matrix_rate("bfloat16", 8192) > 20 * found.matrix_rate("bfloat16", 16)
    assert found.hbm and found.hbm > 3 * found.link_up


@pytest.fixture
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick rates in a moment."""
    monkeypatch.setattr(quick, "LONGER", 0.05)
    monkeypatch.setattr(quick, "SECONDS", 0.01)
    monkeypatch.setattr(quick, "DISK_BYTES", 1 << 20)
    quick.quick_hardware.cache_clear()


def test_quick_rates_on_a_full_disk(
    quicker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that needs no files is made all the same."""
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    found = quick.quick_hardware(CPU, torch.float32, (), tmp_path)
    assert found.disk is None and "1 MiB free" in found.absent["disk"]
    assert found.link_up and found.matrix


def test_quick_rates_are_enough_for_a_plan(quicker: None, tmp_path: Path) -> None:
    found = quick.quick_hardware(CPU, torch.float32, (), tmp_path)
    assert quick.quick_hardware(CPU, torch.float32, (), tmp_path) is found
    assert list(tmp_path.iterdir()) == []
    assert found.link_up and found.disk and found.hbm
    assert [rows for rows, _ in found.matrix["float32"]] == [1, 16, 128]
    model = config_profile(shape_config("tiny", torch.float32), "tiny")
    budget = Budget(1 << 30, 1 << 30)
    assert plan_job(model, found, budget, Job(8, 4, 2), Goal.LATENCY).choice.seconds > 0
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    again = quick.quick_hardware(CPU, torch.float32, (str(file),), tmp_path)
    assert again.disk and again is not found
