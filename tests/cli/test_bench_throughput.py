"""`offload bench throughput`: it measures what it says, on weights that are what it says."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.bench.bounds import read_rate
from offload.bench.memory import gpu_limit
from offload.bench.random_model import random_model, tensor_shapes
from offload.bench.shapes import SHAPES, shape_config
from offload.bench.subject import Sizes, Subject
from offload.bench.workload import Timing, Workload, measure
from offload.kernels.weight_format import WeightFormat
from offload.models.quantized.modules import quantised_weights
from offload.models.quantized.wanted import Wishes

CPU = torch.device("cpu")
WORK = ("--batch", 2, "--prompt-len", 8, "--gen-len", 3)


def bench(program: Any, *arguments: object, shape: str = "tiny") -> dict[str, Any]:
    return measured(program, "--shape", shape, *WORK, *arguments)


def measured(program: Any, *arguments: object) -> dict[str, Any]:
    done = program("bench", "throughput", "--device", "cpu", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("shape", ["tiny", "tiny-opt", "tiny-moe"])
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_offload_computes_what_the_resident_model_does(
    program: Any, tmp_path: Path, shape: str, where: str
) -> None:
    options = ("--device-map", where, "--folder", tmp_path, "--peer", "resident")
    found = bench(program, *options, shape=shape)
    offloaded, resident = found["rows"]
    assert offloaded["equal"] == "6 of 6 tokens equal to resident, logits equal"
    assert offloaded["streamed_bytes"] == found["sizes"]["layer_bytes"]
    ratio = resident["prefill_seconds"] / offloaded["prefill_seconds"]
    assert found["notes"] == [f"offload: prefill at {ratio:.1%} of the resident model's speed"]
    assert resident["streamed_bytes"] == 0 and resident["share_of_bound"] is None
    assert len(found["link_rates"]) == 20  # before and after
    assert len(found["disk_rates"]) == (2 if where == "nvme" else 0)
    rates = [statistics.median(r) for r in (found["link_rates"], found["disk_rates"]) if r]
    bound = offloaded["streamed_bytes"] / min(rates)
    assert offloaded["bound_seconds"] == pytest.approx(bound)
    share = offloaded["bound_seconds"] / offloaded["step_seconds"]
    assert offloaded["share_of_bound"] == pytest.approx(share)
    assert list(tmp_path.iterdir()) == []  # the checkpoint went again


def count(file: Path, name: str) -> int:
    return sum(e["name"] == name for e in json.loads(file.read_text())["traceEvents"])


def test_a_trace_of_the_passes_and_one_of_them_drawn(program: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    found = bench(program, "--trace", file)
    assert "pass " in found["placement"] and " of 5 traced: " in found["placement"]
    assert any(e["name"] == "layer 0" for e in json.loads(file.read_text())["traceEvents"])
    one = count(file, "layer 0")
    bench(program, "--trace", file, "--micro-batch", 1)
    assert count(file, "layer 0") == 2 * one
    done = program("bench", "throughput", "--overhead", "--trace", file)
    assert done.code != 0 and "--trace belongs to" in done.err


def test_a_planned_run_has_the_batch_that_was_chosen(program: Any) -> None:
    done = program(
        "bench", "throughput", "--shape", "tiny-deep", "--device", "cpu", "--prompt-len", 8,
        "--gen-len", 3, "--goal", "throughput", "--engine", "fused", "--json",
        "--cpu-memory", "9.3MiB",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(done.out)
    batch = found["work"]["batch"]
    assert f"planned for throughput: batch {batch} of 8 + 3 tokens" in found["placement"]
    assert found["rows"][0]["where"] == "planned"
    assert any(note.startswith("predicted: prefill ") for note in found["notes"])


@pytest.mark.slow
def test_plans_beside_what_they_become(program: Any) -> None:
    done = program(
        "bench", "plan", "--device", "cpu", "--prompt-len", 8, "--gen-len", 3, "--layers", 4,
        "--case", "tiny-deep", "--pictures", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.err.count(" of 4 traced: ") == 3
    found = json.loads(done.out)
    assert [row["case"]["batch"] for row in found["rows"]] == [None, 4, 1]
    for row in found["rows"]:
        for predicted, achieved in (row["prefill"], row["step"], row["rate"]):
            assert predicted > 0 and achieved > 0
    errors = [abs(a / b - 1) for row in found["rows"] for a, b in (row["prefill"], row["step"])]
    assert found["mean_error"] == pytest.approx(sum(errors) / 6)
    assert found["worst_error"] == pytest.approx(max(errors))
    ((chosen, best),) = found["choices"].values()
    assert best == max(row["rate"][1] for row in found["rows"]) >= chosen
    wrong = program("bench", "plan", "--device", "cpu", "--case", "huge")
    assert wrong.code == 2 and "--case: none has 'huge' in its name; there are tiny" in wrong.err


def test_accelerate_runs_the_same_weights(program: Any) -> None:
    pytest.importorskip("accelerate")
    found = bench(program, "--peer", "accelerate", "--peer", "resident")
    assert [row["peer"] for row in found["rows"]] == ["offload", "accelerate", "resident"]
    assert "6 of 6 tokens equal" in found["rows"][1]["equal"]


def test_micro_batches_are_measured_beside_one_batch(program: Any) -> None:
    whole, parts = bench(program, "--batch", 6, "--micro-batch", 2)["rows"]
    assert (whole["peer"], parts["peer"]) == ("offload", "offload-micro-2")
    assert 0 < parts["activation_bytes"] < 0.7 * whole["activation_bytes"]
    named = ("bench", "throughput", "--shape", "tiny", "--device", "cpu", *WORK)
    done = program(*named, "--micro-batch", 1, "--peer", "resident")
    notes = [line for line in done.out.splitlines() if line.startswith("note: offload-micro-1")]
    assert "of the rate" in notes[0] and "6 of 6 tokens equal to it" in notes[1]
    assert "note: activations of a prefill at most:" in done.out


def test_the_table_has_a_line_for_every_peer(program: Any) -> None:
    named = ("bench", "throughput", "--shape", "tiny", "--device", "cpu")
    done = program(*named, *WORK, "--peer", "resident")
    head = next(i for i, line in enumerate(done.out.splitlines()) if line.startswith("peer "))
    names = [line.split()[0] for line in done.out.splitlines()[head + 1 : head + 3]]
    assert names == ["offload", "resident"]
    assert "bound: copies" in done.out and "outside the layers" in done.err


def test_a_kept_checkpoint_serves_again_and_a_strange_folder_is_left_alone(
    program: Any, tmp_path: Path
) -> None:
    options = ("--device-map", "nvme", "--folder", tmp_path)
    bench(program, *options, "--keep")
    (folder,) = tmp_path.iterdir()
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    bench(program, *options)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == written
    (folder / "offload_random_model.json").unlink()
    done = program("bench", "throughput", "--shape", "tiny", "--device", "cpu", *WORK, *options)
    assert done.code == 2 and "holds something else" in done.err
    assert len(list(folder.iterdir())) == len(written) - 1


def test_a_folder_is_measured_as_it_is(program: Any, chat_model: Path) -> None:
    done = program(
        "bench", "throughput", "--model", chat_model, "--device", "cpu", *WORK,
        "--device-map", "nvme", "--peer", "resident", "--json",
    )  # fmt: skip
    found = json.loads(done.out)
    assert found["model"] == str(chat_model) and found["dtype"] == "float32"
    assert "logits equal" in found["rows"][0]["equal"]


def test_overhead_and_cold_start(program: Any, tmp_path: Path) -> None:
    overhead = measured(program, "--shape", "tiny", "--overhead")
    per_layer = overhead["streamed_seconds"] - overhead["resident_seconds"]
    assert overhead["layer_seconds"] == pytest.approx(per_layer / 4)
    assert overhead["link_bound_bytes"] > 0
    work = ("--batch", 2, "--prompt-len", 8)
    cold = measured(program, "--shape", "tiny", *work, "--cold-start", "--folder", tmp_path)
    assert 0 < cold["run_seconds"] < cold["first_token_seconds"]
    assert cold["weight_bytes"] == sum(s.numel() * 4 for s in tensor_shapes(tiny()).values())
    assert list(tmp_path.iterdir()) == []


def tiny() -> Any:
    return shape_config("tiny", torch.float32)


def test_random_weights_depend_on_the_name_alone_and_are_nowhere_equal() -> None:
    model = random_model(tiny(), CPU)
    values = {name: p.read() for name, p in model.named_parameters()}
    again = {name: p.read() for name, p in random_model(tiny(), CPU).named_parameters()}
    assert all(torch.equal(values[name], again[name]) for name in values)
    layers = [values[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(4)]
    for i, a in enumerate(layers):
        assert a.std() == pytest.approx(0.02, rel=0.1) and abs(a.mean()) < 0.002
        assert not any(torch.equal(a, b) for b in layers[:i])
    assert values["model.norm.weight"].mean() == pytest.approx(1.0, abs=0.02)


def test_tied_weights_are_made_and_counted_once() -> None:
    names = tensor_shapes(shape_config("tiny-opt", torch.float32))
    assert "model.decoder.embed_tokens.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("opt-13b", 12.6), ("llama-2-13b", 12.7), ("qwen2.5-14b", 13.2), ("mixtral-8x7b", 46.4)],
)
def test_shapes_have_the_layers_of_their_models(shape: str, billions: float) -> None:
    sizes = Sizes.of(random_model(shape_config(shape, torch.float16), CPU))
    assert sizes.layer_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert sizes.layer_bytes == 2 * sizes.layer_parameters
    active = sizes.active_parameters / sizes.layer_parameters
    assert active == (pytest.approx(0.27, abs=0.01) if "mixtral" in shape else 1.0)


@pytest.mark.parametrize(
    ("shape", "tables"),  # parameters that a step reads a row of
    [("llama-2-7b", 32000 * 4096), ("opt-13b", 2050 * 5120), ("tiny-opt", None)],
)
def test_what_a_step_reads(shape: str, tables: int | None) -> None:
    """All but embeddings; a table that is the head as well is read whole."""
    model = random_model(shape_config(shape, torch.float16), CPU)
    if tables is None:
        tables = model.model.decoder.embed_positions.weight.numel()
    assert Sizes.of(model).step_bytes == 2 * (sum(p.numel() for p in model.parameters()) - tables)


def test_of_experts_a_step_reads_those_that_a_token_meets() -> None:
    model = random_model(shape_config("tiny-moe", torch.float16), CPU)
    config = model.config
    share = config.num_experts_per_tok / config.num_local_experts
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    table = model.get_input_embeddings().weight.numel()
    rest = sum(p.numel() for p in model.parameters()) - experts - table
    assert Sizes.of(model).step_bytes == int(2 * (rest + share * experts))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_config(shape: str) -> None:
    config = shape_config(shape, torch.float16)
    assert config.hidden_size % config.num_attention_heads == 0


def test_every_run_makes_all_its_tokens_and_times_each() -> None:
    work = Workload(batch=3, prompt=5, gen=4, repeat=2)
    model = Subject("tiny", None, torch.float32, CPU).plain(CPU)
    model.generation_config.eos_token_id = list(range(257))  # any token would end it
    timing = measure(model, work, CPU)
    assert timing.tokens is not None and timing.tokens.shape == (3, 4)
    assert len(timing.prefills) == len(timing.totals) == 2
    assert len(timing.steps) == 2 * 3
    assert timing.total >= timing.prefill > 0


def test_first_steps_are_in_the_mean_and_not_in_the_median() -> None:
    model = Subject("tiny", None, torch.float32, CPU).plain(CPU)
    timing = measure(model, Workload(batch=1, prompt=5, gen=7, repeat=2), CPU)
    assert timing.later_steps == [*timing.steps[3:6], *timing.steps[9:12]]
    assert timing.step == statistics.median(timing.later_steps)
    assert timing.mean_step == statistics.fmean(timing.steps)
    assert Timing(steps=[1.0, 3.0]).step == 2.0  # too few to leave any out


def test_a_difference_is_told() -> None:
    a = Timing(tokens=torch.tensor([[1, 2]]), logits=[torch.tensor([[1.0, 2.0]])])
    b = Timing(tokens=torch.tensor([[1, 3]]), logits=[torch.tensor([[1.0, 2.5]])])
    assert a.compared_with(b) == "1 of 2 tokens equal to resident, logits differ by 0.5 at most"


@pytest.mark.parametrize(
    "work",
    [("--prompt-len", 2040, "--gen-len", 9), ("--prompt-len", 2060, "--cold-start")],
)
def test_positions_that_the_model_does_not_have(
    program: Any, tmp_path: Path, work: tuple[object, ...]
) -> None:
    where = ("--device", "cpu", "--folder", tmp_path)
    done = program("bench", "throughput", "--shape", "tiny-opt", "--batch", 1, *where, *work)
    assert (done.code, done.out) == (2, "")
    assert "new ones are more than the model's 2048 positions" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [4096, (9 << 20) + 5])
def test_the_plain_reader_reads_past_the_cache(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    assert read_rate([file]) > 0
    with pytest.raises(OSError, match="cannot read past the page cache"):
        read_rate(["/proc/self/maps"])


def test_the_gpu_limit_holds_and_is_lifted() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    with gpu_limit(device, 1 << 30), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 30, dtype=torch.uint8, device=device)
    torch.empty(2 << 30, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("where", "asked"),
    [("cpu", "int4-g32-zp"), ("nvme", "int8-channel"), ("cpu", "fp8"), ("nvme", "mxfp4")],
)
def test_quantised_weights_move_as_they_are_stored(
    program: Any, tmp_path: Path, where: str, asked: str
) -> None:
    options = ("--device-map", where, "--folder", tmp_path, "--peer", "resident")
    found = bench(program, *options, "--weights", asked)
    plain = Sizes.of(Subject("tiny", None, torch.float32, CPU).build())
    offloaded, _ = found["rows"]
    assert offloaded["equal"] == "6 of 6 tokens equal to resident, logits equal"
    sizes = found["sizes"]
    assert sizes["formats"] == [WeightFormat.parse(asked).name]
    assert sizes["layer_parameters"] == plain.layer_parameters
    assert [tuple(p) for p in sizes["products"]] == list(plain.products)
    assert offloaded["streamed_bytes"] == sizes["layer_bytes"] < 0.3 * plain.layer_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_quantised_weights_on_the_fused_engine(program: Any, tmp_path: Path, where: str) -> None:
    options = ("--device-map", where, "--folder", tmp_path, "--peer", "resident")
    found = bench(program, *options, "--weights", "int4", "--engine", "fused", shape="tiny-opt")
    offloaded, _ = found["rows"]
    assert "engine fused" in found["placement"] and "24 weights are quant" in found["placement"]
    assert offloaded["equal"].startswith("6 of 6 tokens equal to resident")
    assert offloaded["streamed_bytes"] == found["sizes"]["layer_bytes"]
    assert found["sizes"]["formats"] == ["int4-g64"]


def test_random_codes_make_weights_of_the_usual_size() -> None:
    for asked in ("int4", "int4-zp", "int8", "fp8", "mxfp4"):
        subject = Subject("tiny", None, torch.float32, CPU, Wishes.of(asked))
        model = subject.build()
        (name, weight), *_ = quantised_weights(model)
        module = model.get_submodule(name.rpartition(".")[0])
        parts = [module._parameters[part].expression.read() for part in weight.parts]
        assert 0.014 < float(weight.make(parts).std()) < 0.028, asked


def test_keys_and_values_on_the_cpu(program: Any) -> None:
    options = ("--engine", "fused", "--batch", 5, "--kv-on-cpu", 3, "--peer", "resident")
    found = bench(program, *options, shape="tiny-opt")
    assert found["rows"][0]["equal"].startswith("15 of 15 tokens equal")
    assert found["notes"][0].startswith("attention on the CPU: 3 sequences")
    assert "of a decode step of" in found["notes"][1]
    found = bench(program, *options[:-2], "--kv-dtype", "int8", shape="tiny-opt")
    assert any(note.startswith("keys and values in CPU memory: int8") for note in found["notes"])
    found = bench(program, *options, "--kv-attention", "gpu", shape="tiny-opt")
    assert found["rows"][0]["equal"].startswith("15 of 15 tokens equal")
    assert found["notes"][0].startswith("attention on the compute device to 3 sequences")
    assert "of a decode step of" in found["notes"][1]
    named = ("bench", "throughput", "--shape", "tiny", "--device", "cpu", *WORK)
    refused = program(*named, "--kv-attention", "gpu")
    assert refused.code == 2 and "say with kv_on_cpu how many sequences" in refused.err
    refused = program(*named, "--kv-dtype", "int8")
    assert refused.code == 2 and "say with kv_on_cpu how many sequences" in refused.err
    refused = program(*named, "--kv-on-cpu", 3)
    assert refused.code == 2 and "kv_on_cpu=3 of batch_size=2" in refused.err
