"""`offload.run` with a goal: what the planner chose is what runs, and the report compares."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import offload
from offload import planned
from offload.errors import BudgetError
from offload.measure.cache import rates_file
from offload.measure.machine import this_machine
from offload.models.shape import MLP_ROWS, ModelShape
from offload.scheduler.engine import FUSED, TRANSFORMERS, CpuAttention
from offload.scheduler.footprint import footprint
from offload.scheduler.hardware import Hardware
from offload.scheduler.plan import Tier
from offload.scheduler.setting import Job, Setting
from offload.trace import Track

CPU = torch.device("cpu")
JOB = {"prompt_len": 12, "gen_len": 4}


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """This machine, as if it had been measured: rates at which much is worth a thought."""
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path / "home"))
    file = rates_file(None, CPU)
    found = Hardware(
        machine=this_machine(file.parent.parent, CPU),
        link_up=1e6,
        link_down=1e6,
        disk=1e5,
        hbm=1e9,
        matrix={"float32": ((1, 1e9), (64, 4e10))},
        cpu_attention={"float32": ((1, 1e9),)},
    )
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(found.as_dict()))
    return found


def run(folder: Path, **options: Any) -> Any:
    return offload.run(folder, **{"device": "cpu", "dtype": torch.float32, **JOB, **options})


def greedy(model: Any, batch: int, prompt: int = 12, new: int = 4) -> torch.Tensor:
    ids = torch.randint(5, 60, (batch, prompt), generator=torch.Generator().manual_seed(1))
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )


@pytest.mark.parametrize("engine", ["transformers", "fused"])
@pytest.mark.parametrize("goal", ["throughput", "latency", "fits"])
def test_what_was_planned_is_what_runs(
    variant_folder: Callable[[str], Path], hardware: Hardware, engine: str, goal: str
) -> None:
    folder = variant_folder("llama")
    with run(folder, goal="latency", engine=engine) as model:
        whole = model.offload.planned.choice.memory
        assert set(model.offload.plan.tiers) == {Tier.DEVICE}  # it fits, and that is quickest
    limits = {0: whole.device - whole.resident // 4, "cpu": "1GiB"}
    with run(folder, goal=goal, engine=engine, max_memory=limits) as model:
        found = model.offload.planned.choice
        plan, how = model.offload.plan, found.setting
        assert plan.tiers == how.tiers() and plan.depth == min(how.depth, how.streamed - 1)
        assert plan.streamed_bytes > 0 and plan.device_bytes <= plan.budget.device
        assert how.batch == 1 or goal == "throughput"
        tokens = greedy(model, how.batch)
        report = model.offload.report()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(tokens, greedy(plain, how.batch))
    assert f"planned for {goal}: batch {how.batch} of 12 + 4 tokens" in str(report)
    assert ("12 + 4 tokens, keys and values of " in str(report)) == (how.cpu_sequences > 0)
    assert f"times what was predicted for a decode step of batch {how.batch}" in str(report)
    assert report.predicted["pass"] == found.decode.seconds
    assert report.predicted["link up"] == found.decode.busy["link up"]
    told = json.loads(json.dumps(report.as_dict()))["planned"]["choice"]["setting"]
    assert told["batch"] == how.batch


def test_sequences_go_to_cpu_memory_where_that_gives_more(
    variant_folder: Callable[[str], Path], hardware: Hardware
) -> None:
    folder, job = variant_folder("llama"), {"prompt_len": 2, "gen_len": 30}
    with run(folder, goal="latency", engine="fused", **job) as model:
        whole = model.offload.planned.choice.memory
    limits = {0: whole.device - whole.resident // 4, "cpu": "1GiB"}
    job["goal"] = "throughput"
    with run(folder, engine="fused", max_memory=limits, **job) as model:
        how = model.offload.planned.choice.setting
        assert how.attention is CpuAttention.CPU and how.cpu_sequences > 0
        with model.offload.trace():
            tokens = greedy(model, how.batch, 2, 30)
        report = model.offload.report()
        said = str(report)
        assert report.picture.busy[Track.CPU_ATTENTION] > 0
        assert report.picture.compute["waits for CPU attention"] > 0
        assert f"keys and values of {how.cpu_sequences} in CPU memory" in said
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(tokens, greedy(plain, how.batch, 2, 30))
    # The model's own modules do not do it, and no such plan is made for them.
    with run(folder, engine="transformers", max_memory=limits, **job) as model:
        assert model.offload.planned.choice.setting.cpu_sequences == 0


def test_micro_batches_take_turns_where_they_were_planned(
    variant_folder: Callable[[str], Path], hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if not the cores that attend were those that compute."""
    folder, job = variant_folder("llama"), {"prompt_len": 2, "gen_len": 30}
    with run(folder, goal="latency", engine="fused", **job) as model:
        whole = model.offload.planned.choice.memory
        assert model.offload._engine.micro_batches == 1
    job |= {"max_memory": {0: 2 * whole.device, "cpu": "3MiB"}}
    monkeypatch.setattr(planned, "_engine", lambda *args: FUSED)
    attends = {"float32": ((1, 1e7),)}
    even = replace(hardware, link_up=1e8, link_down=1e8, hbm=1e7, cpu_attention=attends)
    rates_file(None, CPU).write_text(json.dumps(even.as_dict()))
    with run(folder, engine="fused", goal="throughput", **job) as model:
        found = model.offload.planned.choice
        assert found.setting.in_turns and found.setting.micro_batch == found.setting.batch
        assert model.offload._engine.micro_batches == 2
        tokens = greedy(model, found.setting.batch, 2, 30)
        assert model.offload._engine.cpu_work.latest[-1].sequences == found.setting.cpu_sequences
        assert "generate` makes them" not in str(model.offload.report())
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(tokens, greedy(plain, found.setting.batch, 2, 30))


@pytest.mark.parametrize("place", [0, "cpu"])
def test_a_budget_that_cannot_hold_it_says_the_least(
    variant_folder: Callable[[str], Path], hardware: Hardware, place: int | str
) -> None:
    """Where the CPU computes max_memory['cpu'] holds all, and may be all that is named."""

    def attempt(nbytes: int) -> Any:
        limits = {"cpu": "1GiB", place: nbytes}
        return run(variant_folder("llama"), goal="latency", engine="fused", max_memory=limits)

    with pytest.raises(BudgetError, match="the least that would do is") as told:
        attempt(4096)
    match = re.search(rf"(\d+) bytes \([^)]*\) as max_memory\[{place!r}\]", str(told.value))
    assert match is not None, told.value
    assert "GPU memory" not in str(told.value)
    with attempt(int(match[1])) as model:
        greedy(model, 1)
    with pytest.raises(BudgetError):
        attempt(int(match[1]) - 1)


@pytest.mark.parametrize("limits", [{"cpu": 8192, 0: 4096}, {"cpu": 4096, 0: 8192}])
def test_two_budgets_that_cannot_hold_it_say_both(
    variant_folder: Callable[[str], Path], hardware: Hardware, limits: dict[Any, int]
) -> None:
    def attempt(limits: dict[Any, int]) -> Any:
        return run(variant_folder("llama"), goal="latency", engine="fused", max_memory=limits)

    with pytest.raises(BudgetError, match="the least that would do is") as told:
        attempt(limits)
    found = re.findall(r"(\d+) bytes \([^)]*\) as max_memory\[('cpu'|0)\]", str(told.value))
    least = {"cpu" if place != "0" else 0: int(nbytes) for nbytes, place in found}
    assert least.keys() == {"cpu", 0}
    attempt(least).offload.close()
    for place in least:
        with pytest.raises(BudgetError):
            attempt(least | {place: least[place] - 1})


def test_a_machine_that_was_not_measured_is_measured_in_seconds_and_the_report_says_so(
    variant_folder: Callable[[str], Path],
    hardware: Hardware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def quick(*arguments: Any) -> Hardware:
        asked.append(arguments)
        return replace(hardware, cpu_attention={})

    monkeypatch.setattr(planned, "quick_hardware", quick)
    with run(variant_folder("llama"), goal="latency") as model:
        assert asked == [] and "`offload info --measure`" not in str(model.offload.report())
    rates_file(None, CPU).unlink()
    with run(variant_folder("llama"), goal="latency") as model:
        assert "`offload info --measure` measures" in str(model.offload.report())
    ((device, dtype, files, _),) = asked
    assert (device, dtype) == (CPU, torch.float32)
    assert files and all(file.endswith(".safetensors") for file in files)


def test_kept_rates_without_the_models_dtype(
    variant_folder: Callable[[str], Path], hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to measure what was measured."""
    halves = replace(hardware, matrix={"bfloat16": hardware.matrix["float32"]})
    rates_file(None, CPU).write_text(json.dumps(halves.as_dict()))
    monkeypatch.setattr(planned, "quick_hardware", lambda *_: hardware)
    with run(variant_folder("llama"), goal="latency") as model:
        (note,) = model.offload.report().notes
    assert "those that `offload info --measure` kept lack products in float32" in note


def test_rates_that_were_kept_in_the_offload_folder(
    variant_folder: Callable[[str], Path],
    hardware: Hardware,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`offload info --measure --offload-folder FOLDER`, then a run with that folder."""
    monkeypatch.setattr(planned, "quick_hardware", None)
    folder = tmp_path / "other"
    file = rates_file(folder, CPU)
    file.parent.mkdir(parents=True)
    slower = replace(hardware, matrix={"float32": ((1, 1e8), (64, 4e9))})
    file.write_text(json.dumps(slower.as_dict()))
    there = run(variant_folder("llama"), goal="latency", offload_folder=folder)
    at_home = run(variant_folder("llama"), goal="latency", offload_folder=tmp_path / "empty")
    seconds = [m.offload.planned.choice.prefill_seconds for m in (there, at_home)]
    assert seconds[0] > 2 * seconds[1]
    there.offload.close()
    at_home.offload.close()


def test_the_disk_that_counts_is_that_of_the_weights(
    variant_folder: Callable[[str], Path], hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(planned, "quick_disk", lambda *a: asked.append(a) or 7e8)
    monkeypatch.setattr(planned, "disk_of", lambda folder: hardware.machine.disk)
    limits = {0: "1MB", "cpu": "1MB"}
    run(variant_folder("llama"), goal="fits", max_memory=limits).offload.close()
    assert asked == []
    monkeypatch.setattr(planned, "disk_of", lambda folder: "another")
    with run(variant_folder("llama"), goal="fits", max_memory=limits) as model:
        found = model.offload.planned.choice
    assert len(asked) == 1 and found.setting.nvme == 3
    nbytes = model.offload.plan.streamed_bytes
    assert found.decode.busy["disk"] == pytest.approx(nbytes / 7e8)


def test_rates_that_lack_the_models_dtype_are_not_used(
    variant_folder: Callable[[str], Path], hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(hardware, matrix={"bfloat16": ((1, 1e9), (64, 4e10))})
    monkeypatch.setattr(planned, "quick_hardware", lambda *arguments: quick)
    with run(variant_folder("llama"), goal="latency", dtype=torch.bfloat16) as model:
        assert "`offload info --measure`" in str(model.offload.report())


def test_without_a_goal_nothing_is_measured(
    variant_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path))
    monkeypatch.setattr(planned, "quick_hardware", lambda *a: pytest.fail("it was measured"))
    with offload.run(variant_folder("llama"), device="cpu") as model:
        assert model.offload.planned is None and model.offload.report().planned is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": "speed"}, "goal='speed' is not known; it is 'throughput' or 'latency' or 'fits'"),
        ({"prompt_len": 3}, "prompt_len=3 needs a goal"),
        ({"goal": "fits", "prompt_len": 3}, "goal='fits' needs gen_len"),
        ({"goal": "fits", **JOB, "prompt_len": 0}, "prompt_len must be between 1 and"),
        ({"goal": "fits", **JOB, "device_map": "cpu"}, "device_map='cpu' says it"),
        ({"goal": "fits", **JOB, "prefetch": 2}, "prefetch=2 is decided by the plan"),
        ({"goal": "fits", **JOB, "max_length": 9}, "max_length=9 is decided by the plan"),
        ({"goal": "fits", **JOB, "kv_on_cpu": 1}, "kv_on_cpu=1 is decided by the plan"),
    ],
)
def test_arguments_that_do_not_go_together(
    variant_folder: Callable[[str], Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        offload.run(variant_folder("llama"), device="cpu", **options)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("rows", [None, 512])
def test_plans_count_no_less_memory_than_runs_without_a_goal_keep_free(
    batch: int, rows: int | None
) -> None:
    from offload.bench.shapes import shape_config
    from offload.models.profile import config_profile

    assert FUSED.mlp_rows == MLP_ROWS
    config = shape_config("llama-2-70b", torch.float16)
    model = config_profile(config, "llama-2-70b")
    shape = ModelShape.of(config)
    for engine in (FUSED, TRANSFORMERS) if rows is None else (FUSED,):
        how = Setting("fp16", 0, 80, 0, 1, batch, 0, CpuAttention.NONE, rows or 1 << 40, 1, 1)
        need = footprint(replace(model, engine=engine), Job(300, 1, batch), how)
        counted = need.kv_device + need.hidden + need.workspace
        kept = shape.reserve_bytes(batch, 300, 2, engine is FUSED, 0, rows)
        # A token more of keys and values, since a prompt is not all of a sequence.
        more = batch * shape.kv_width * 80 * 2
        assert kept <= counted <= 1.01 * (kept + more)


def test_micro_batches_that_were_planned_are_made(
    variant_folder: Callable[[str], Path], hardware: Hardware
) -> None:
    """Of modules that run a whole prompt at once: in parts where all do not fit, of which as many
    run as hold the batch that was planned.
    """
    folder, job = variant_folder("llama"), {"prompt_len": 40, "gen_len": 4, "batch_size": 8}
    with run(folder, goal="latency", engine="transformers", **job) as model:
        whole = model.offload.planned.choice.memory
        assert model.offload.planned.choice.setting.decode_micro_batches == 1
    limits = {0: whole.device - whole.resident // 2 - whole.workspace // 2, "cpu": "1GiB"}
    job |= {"goal": "latency", "engine": "transformers", "max_memory": limits}
    with run(folder, **job) as model:
        how = model.offload.planned.choice.setting
        assert how.decode_micro_batches > 1 and how.micro_batch < how.batch
        assert f"micro-batches of {how.micro_batch} sequences" in str(model.offload.report())
        ids = torch.randint(
            10, 100, (how.batch + 1, 40), generator=torch.Generator().manual_seed(0)
        )
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
        begun: list[int] = []
        generate = model.generate
        model.generate = lambda **given: begun.append(len(given["input_ids"])) or generate(**given)
        tokens = model.offload.generate(ids, **options)
        assert max(begun) == how.micro_batch and sum(begun) == how.batch + 1
        del model.generate
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(tokens, plain.generate(ids, **options))
