"""`offload plan` and `offload info --measure`: what they print, and one line for what is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.scheduler.hardware import Hardware, Machine

LIMITS = ("--max-memory", "0=24GiB", "--max-memory", "cpu=110GiB")


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """A machine with a GPU, as `info --measure --json` prints it."""
    found = Hardware(
        machine=Machine("a GPU", 48 << 30, 1, "1", "a CPU", 16, 128 << 30, "a disk"),
        link_up=55e9,
        link_down=55e9,
        disk=2e9,
        hbm=4e12,
        matrix={"float16": ((1, 4e12), (8192, 600e12))},
        cpu_attention={"float16": ((1, 80e9),)},
    )
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"offload": "1", "hardware": found.as_dict()}))
    return file


def test_the_table_has_the_choice_and_the_runner_up(program: Any, rates: Path) -> None:
    done = program("plan", "opt-30b", "--hardware", rates, *LIMITS)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == (
        "opt-30b: 512 + 32 tokens, best for throughput, on a GPU with 24 GiB of GPU memory and 110 "
        "GiB of CPU memory"
    )
    assert lines[1].split() == ["choice", "runner-up"]
    rows = {line[2:32].strip(): line[32:] for line in lines[2:-2]}
    layers = [int(n) for n in re.findall(r"\d+", rows["layers on GPU / CPU / NVMe"])]
    assert len(layers) == 6 and sum(layers[:3]) == sum(layers[3:]) == 48
    assert {"prefill", "decode step", "decode tokens/s", "total tokens/s", "GPU memory"} <= set(
        rows
    )
    assert re.fullmatch(r"limit: .+ \((prefill|decode)\); busy in a decode step: .+", lines[-2])


def test_json_has_what_a_run_would_be_given(program: Any, rates: Path) -> None:
    done = program(
        "plan", "tiny-deep", "--hardware", rates, "--batch", 3, "--prompt-len", 10, "--gen-len", 5,
        "--goal", "latency", "--json",
    )  # fmt: skip
    found = json.loads(done.out)
    how = found["choice"]["setting"]
    assert how["tiers"] == ["device"] * 64 and how["batch"] == 3
    assert found["goal"] == "latency" and found["model"] == "tiny-deep"
    assert found["budget"] == {
        "device": int((48 << 30) * 0.95),
        "cpu": int((128 << 30) * 0.9),
    }
    choice = found["choice"]
    assert choice["tokens_per_second"] == pytest.approx(3 * 5 / choice["seconds"])


def test_a_folder_is_planned_without_its_weights(program: Any, rates: Path, tmp_path: Path) -> None:
    from offload.bench.shapes import shape_config

    shape_config("llama-2-70b", torch.float16).save_pretrained(tmp_path / "model")
    wanted = json.loads(
        program("plan", "llama-2-70b", "--hardware", rates, *LIMITS, "--weights", "fp16,int4",
                "--json").out
    )  # fmt: skip
    found = json.loads(
        program("plan", tmp_path / "model", "--hardware", rates, *LIMITS, "--weights", "fp16,int4",
                "--json").out
    )  # fmt: skip
    assert found["choice"] == wanted["choice"]
    assert found["choice"]["setting"]["weights"] == "int4"


def test_a_plan_is_for_an_engine_that_runs_the_model(program: Any, rates: Path) -> None:
    """Keys and values of experts' models stay on the GPU, as no fused block runs these."""
    limits = ("--hardware", rates, "--max-memory", "0=4MiB", "--batch", "8")
    done = program("plan", "tiny-moe", *limits)
    assert (done.code, done.err) == (0, "")
    assert "engine: transformers; no fused block expresses the family 'mixtral'" in done.out
    assert not re.search(r"KV cache on GPU / CPU +.*/ [1-9]", done.out)
    assert json.loads(program("plan", "tiny-moe", *limits, "--json").out)["engine"] == (
        "transformers"
    )
    assert json.loads(program("plan", "tiny", *limits, "--json").out)["engine"] == "fused"
    done = program("plan", "tiny-moe", *limits, "--engine", "fused")
    assert done.code == 2 and "--engine fused cannot run tiny-moe: no fused block" in done.err
    done = program("plan", "tiny-moe", *limits, "--kv-dtype", "int8")
    assert done.code == 2 and "keeps none there (no fused block expresses" in done.err


def test_a_budget_that_cannot_hold_it_says_the_least(program: Any, rates: Path) -> None:
    def plan(size: object) -> Any:
        return program("plan", "opt-30b", "--hardware", rates, "--max-memory", f"0={size}")

    done = plan("1GiB")
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    match = re.search(r"the least that would do is (\d+) bytes", done.err)
    assert match is not None, done.err
    assert plan(int(match[1])).code == 0
    assert plan(int(match[1]) - 1).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opt-31b"], "'opt-31b' is neither a folder nor a known shape; shapes are tiny, "),
        (["tiny", "--weights", "int3"], "'int3' is none of fp32, fp16, bf16, int8, int4"),
        (["tiny", "--max-memory", "1=3GiB"], "names 1; a plan is for one GPU, 0, and 'cpu'"),
        (["tiny", "--max-memory", "0=3GB", "--max-memory", "00=4GB"], "names 0 twice (3000000000 "),
        (["tiny", "--batch", "0"], "'0' is not a whole number above zero"),
        (["tiny", "--goal", "speed"], "invalid choice: 'speed'"),
        (["tiny", "--prompt-len", "9" * 30], "plans are made for at most"),
        (["tiny", "--max-memory", f"cpu={10**30}GiB"], "is more than any machine has"),
        (["tiny", "--max-memory", "²=1GiB"], "is not PLACE=SIZE"),
        (["tiny", "--engine", "transformers", "--kv-dtype", "int8"], "transformers keeps none th"),
        (["tiny", "--hardware", ""], "the name of a file or folder is empty"),
    ],
)
def test_bad_arguments_are_one_line(
    program: Any, rates: Path, arguments: list[str], message: str
) -> None:
    done = program("plan", *arguments, "--hardware", rates)
    assert done.code == 2 and done.out == ""
    assert message in done.err and done.err.count("\n") == 1


def test_bad_rates_are_one_line(program: Any, tmp_path: Path, rates: Path) -> None:
    missing = program("plan", "tiny", "--hardware", tmp_path / "none.json")
    assert missing.code == 2 and "none.json" in missing.err
    (tmp_path / "x.json").write_text("{")
    assert "x.json holds no JSON" in program("plan", "tiny", "--hardware", tmp_path / "x.json").err
    (tmp_path / "x.json").write_text("9" * 5000)
    assert "x.json holds no JSON" in program("plan", "tiny", "--hardware", tmp_path / "x.json").err
    kept = json.loads(rates.read_text())["hardware"]
    kept["machine"] |= {"gpu": None, "gpu_memory": 0, "gpus": 0}
    (tmp_path / "x.json").write_text(json.dumps({"hardware": kept}))
    done = program("plan", "tiny", "--hardware", tmp_path / "x.json")
    assert done.code == 2 and "rates are of a machine without a GPU" in done.err
    kept = json.loads(rates.read_text())["hardware"]
    del kept["rates"]["hbm"]
    (tmp_path / "x.json").write_text(json.dumps({**kept, "absent": {"hbm": "it was busy"}}))
    done = program("plan", "tiny", "--hardware", tmp_path / "x.json")
    assert "lack the rate 'hbm': it was busy. Measure on the machine" in done.err


def test_without_a_gpu_the_machine_must_be_named(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = program("plan", "tiny")
    assert done.code == 2 and "pass the rates of the machine" in done.err


def test_info_shows_what_was_measured(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: Path
) -> None:
    """Kept rates, of a GPU too; measuring itself has its own tests."""
    from offload.measure.cache import rates_file, read_hardware
    from offload.measure.machine import this_machine

    cpu = torch.device("cpu")
    home = tmp_path / "home"
    kept = replace(
        read_hardware(rates),
        machine=this_machine(home, cpu),
        launch=3e-6,
        absent={"host_read": "broken", "link_beside": "broken"},
    )
    file = rates_file(home, cpu)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(kept.as_dict()))
    options = ("--measure", "--device", "cpu", "--offload-folder", home)
    out = program("info", *options).out
    assert f"rates, kept in {file}:" in out
    for line in (
        "  link up: 55 GB/s",
        "  products in float16, TFLOP/s by rows: 1: 4, 8192: 600",
        "  launch of a kernel: 3 us",
        "  not measured: host_read, link_beside: broken",
    ):
        assert line in out.splitlines()
    found = json.loads(program("info", *options, "--json").out)
    assert Hardware.from_dict(found["hardware"]) == kept and found["hardware_file"] == str(file)
    assert program("info", "--again").err.startswith("offload: error: --again and --device go")
