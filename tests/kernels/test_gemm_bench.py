"""`offload bench kernels`: what it measures, what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offload.bench.kernels import gemm, run
from offload.bench.kernels.case import Case, Rates, copies, launches, measure
from offload.bench.kernels.gemm_sweep import Sweep
from offload.cli import main

CPU = torch.device("cpu")
RATES = Rates(read=2e9, copy=1e9, matrix=1e12)


def nothing(i: int) -> None:
    pass


def test_the_bound_is_that_of_bytes_or_of_products() -> None:
    case = Case("op", "shape", bytes=1000, flop=0, ours=nothing)
    assert RATES.bound(case) == 1000 / 1e9
    case.hbm = "read"
    assert RATES.bound(case) == 1000 / 2e9
    case.flop = 1e9
    assert RATES.bound(case) == 1e9 / 1e12


def test_inputs_of_a_gpu_are_more_than_l2_holds() -> None:
    assert copies(100, "cuda") == 512
    assert copies(50 << 20, "cuda") * (50 << 20) > 1 << 30
    assert copies(1 << 40, "cuda") == 3
    assert copies(1, "cpu") == 1


def test_a_peer_that_fails_costs_only_its_own_figure() -> None:
    def fails(i: int) -> None:
        raise ValueError("not here")

    seen: list[int] = []
    case = Case("op", "x", 10, 1.0, seen.append, {"bad": fails, "compile": fails, "good": nothing})
    found = {row.way: row for row in measure(case, RATES, CPU, rounds=3)}
    assert list(found) == ["ours", "bad", "good"]
    assert found["bad"].seconds is None and found["bad"].error == "ValueError: not here"
    assert found["ours"].seconds and found["good"].seconds and set(seen) == {0}
    assert found["good"].as_dict()["share"] == found["good"].bound / found["good"].seconds
    assert "compile" in {row.way for row in measure(case, RATES, CPU, compiled=True, rounds=1)}


def test_launches_are_by_copy() -> None:
    class Call:
        launched = 0

        def launch(self, stream: int = 0) -> None:
            self.launched += 1

    calls = [Call(), Call()]
    launches(calls)(1)
    assert [call.launched for call in calls] == [0, 1]


def test_the_shapes_of_the_figures_are_among_them() -> None:
    assert {(5120, 15360), (20480, 5120), (11008, 4096), (28672, 8192)} <= set(gemm.SHAPES)
    assert gemm.ROWS == (1, 2, 4, 8, 16)


def test_cases_on_a_cpu_agree_with_their_peers() -> None:
    seen = 0
    for case in gemm.cases(CPU, True):
        case.ours(0)
        call = case.ours.__closure__[0].cell_contents[0]  # type: ignore[index]
        [peer] = [way for name, way in case.peers.items() if name != "compile"]
        torch.testing.assert_close(call._arguments.out, peer(0), rtol=0.05, atol=0.05)
        seen += 1
    assert seen == len(gemm.FUSED) + 1


def test_the_sweep_times_a_norm_fused_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "SHAPES", ((24, 40),))
    monkeypatch.setattr(gemm, "ROWS", (2, 4))
    lines: list[str] = []
    found = Sweep(CPU, RATES, lines.append).run(lambda name: name == "K24 N40")
    assert not [swept for swept in found if swept.error or not swept.us]
    normed = {what for what, fused in gemm.FUSED.items() if fused[0]}
    assert {(s.what, s.rows) for s in found if s.way == "apart"} == {(w, 4) for w in normed}
    [costs] = [line.split("cost: ")[1] for line in lines if "fused cost" in line]
    for cost in costs.split("; "):
        match = re.fullmatch(r"(.*) \S+% v\d(?: ([<>]) apart \S+%)?", cost)
        assert match and (match[2] is not None) == (match[1] in normed)
        if match[2]:
            own, apart = (
                min(s.us for s in found if s.us and (s.what, s.way, s.rows) == (match[1], way, 4))
                for way in ("own", "apart")
            )
            assert match[2] == ("<" if own < apart else ">")
    for what in normed:
        [line] = [line for line in lines if line.startswith(f"{what}: ")]
        assert re.search("in [01] of 1 products", line)


def test_the_command_on_a_cpu(capsys: Any) -> None:
    arguments = ["bench", "kernels", "--device", "cpu", "--quick", "--op", "gemm"]
    assert main([*arguments, "--shape", "rows 16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["way"] for row in found["rows"]} == {"ours", "cuBLAS"}
    assert found["rates"]["read"] > 0 and found["machine"]["torch"] == torch.__version__


def test_a_shape_that_no_case_has(capsys: Any) -> None:
    arguments = ["bench", "kernels", "--device", "cpu", "--quick", "--op", "gemm"]
    assert main([*arguments, "--shape", "rows 16", "--shape", "rows 17"]) == 2
    assert "no case has 'rows 16' and 'rows 17' in the name of its shape" in capsys.readouterr().err


def test_the_table_and_the_file(
    capsys: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        OP = "copy"

        @staticmethod
        def cases(device: torch.device, quick: bool) -> Iterator[Case]:
            yield Case("copy", "1 MB", 100, 1.0, nothing, {"eager": nothing})
            raise RuntimeError("the second shape is too large")

    monkeypatch.setattr(run, "modules", lambda: {"copy": Module})
    file = tmp_path / "figures.json"
    arguments = ["bench", "kernels", "--device", "cpu", "--quick", "--out", str(file)]
    assert main(arguments) == 1  # something of ours failed, and is said
    out = capsys.readouterr().out
    assert "copy" in out and "eager" in out and "the second shape is too large" in out
    assert [row["way"] for row in json.loads(file.read_text())["rows"]] == ["ours", "eager", "ours"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--op", "nonsense"], "no kernel is called 'nonsense'; there are .*gemm"),
        (["--device", "nonsense"], "--device nonsense"),
        (["--device", "meta"], "not meta"),
        (["--out", "/no/such/file"], "--out /no/such/file: there is no folder for it"),
        (["--out", "/"], "--out /: it is a folder; name a file"),
        (["--sweep", "--quick"], "--quick is not for --sweep"),
        (["--sweep"], "the sweep needs a CUDA device"),
        (["--sweep", "--op", "attention"], "--sweep is for one of the ops gemm and quant_gemm"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], text: str, capsys: Any) -> None:
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    assert main(["bench", "kernels", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("offload: error: ") and re.search(text, error)


@pytest.mark.parametrize("arguments", [["--op", "nonsense"], ["--sweep", "--op", "nonsense"]])
def test_a_wrong_name_is_said_before_what_is_wrong_with_the_library(
    arguments: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "why_not", lambda device: "the library is of another version")
    assert main(["bench", "kernels", "--device", "cuda", *arguments]) == 2
    assert "the library is of another version" not in capsys.readouterr().err
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "the library is of another version" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: Any) -> None:
    assert main(["bench", "kernels"]) == 2
    error = capsys.readouterr().err
    assert "the kernels cannot run on cuda" in error and "with --device cpu" in error


@pytest.mark.parametrize("name", sorted(run.modules()))
def test_an_op_of_every_printed_line_can_be_asked_for(name: str) -> None:
    module = run.modules()[name]
    ops = {case.op for case in module.cases(torch.device("cpu"), quick=False)}
    assert ops == {*run.ops_of(module)}


def test_one_op_of_a_module_of_several(capsys: Any) -> None:
    arguments = ["bench", "kernels", "--device", "cpu", "--quick", "--op", "scale-sums", "--json"]
    assert main(arguments) == 0
    assert {row["op"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"scale_sums"}
