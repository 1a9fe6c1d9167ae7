"""Where weights are made whole, and how often anything but that is done."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import folders
import published
import pytest
import torch
import variants
from torch import nn

import offload
from offload.checkpoint.expressions import Held
from offload.checkpoint.lazy import LazyTensor
from offload.errors import BudgetError, UnsupportedError
from offload.kernels import dequantize
from offload.kernels.dequantize import dequantise, dequantiser
from offload.kernels.dequantizer import Dequantize
from offload.kernels.quantize import quantise
from offload.kernels.weight_format import SHAPE, WeightFormat
from offload.models.quantized.coded import stand_for
from offload.models.quantized.modules import keep_quantised, quantised_forwards, scratch_bytes

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from machines import host_library, needs_gpu
from test_dequantizer import FORMS, random_stored, same_bits

Source = Callable[[str], Path]
FORM = WeightFormat.parse("int4-g32")


class Counted(Dequantize):
    """The kernel's call on this processor: counted when it is made, and when it is launched."""

    made = 0
    launched = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Counted.made += 1

    def launch(self, stream: int = 0) -> None:
        Counted.launched += 1
        assert not host_library().offload_dequantize(ctypes.byref(self.arguments), None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counted]]:
    """Stands for a GPU: the library's own code answers, and the reference must not."""
    host_library()
    Counted.made = Counted.launched = 0
    monkeypatch.setattr(dequantize, "Dequantize", Counted)
    monkeypatch.setattr(dequantize, "by_kernel", lambda stored, out: True)
    monkeypatch.setattr(dequantize, "dequantise_reference", None)
    yield Counted


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=needs_gpu)])
def test_every_format_takes_the_kernel(device: str, request: Any) -> None:
    torch.manual_seed(0)
    cases = []
    for form in FORMS:
        outputs, inputs = 48, 192 if form.block[1] != 128 else 256
        shape = (2, inputs, outputs) if form.layout == "gpt_oss" else (outputs, inputs)
        scale = torch.float16 if form.layout == "panels" else torch.float32
        stored = random_stored(form, shape, scale)
        stored.pop(SHAPE, None)  # as modules have it
        cases.append((form, shape, stored, dequantise(form, stored, shape, torch.bfloat16)))
    counted = request.getfixturevalue("kernel") if device == "host" else None
    for form, shape, stored, wanted in cases:
        placed = stored if counted else {n: t.cuda() for n, t in stored.items()}
        found = dequantise(form, placed, shape, torch.bfloat16)
        assert found.is_contiguous() and same_bits(found.cpu(), wanted), form
        if form.layout == "gpt_oss":  # as the kernel has it, without a copy
            turned = torch.empty(shape[0], shape[2], shape[1], dtype=torch.bfloat16)
            turned = turned.to(found.device).transpose(1, 2)
            assert same_bits(dequantise(form, placed, shape, torch.bfloat16, turned), found)
    if counted:
        assert counted.launched == len(FORMS) + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a library without a GPU")
def test_what_the_kernel_does_not_take_is_left_to_the_reference() -> None:
    weight = torch.randn(8, 64)
    stored = quantise(weight, FORM)
    assert not dequantize.by_kernel(stored, weight)
    wide = dequantise(FORM, stored, (8, 64), torch.float64)
    assert torch.equal(wide.float(), dequantise(FORM, stored, (8, 64), torch.float32))
    turned = torch.empty(64, 8).T
    dequantiser(FORM, stored, turned)(0)
    assert torch.equal(turned, wide.float())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_calls_are_made_once_a_slot(
    source: Source, tmp_path: Path, kernel: type[Counted], name: str
) -> None:
    out = folders.pack(source(name), tmp_path / "out", "int4-g32-zp")
    with offload.run(out, device_map="cpu", device="cpu") as model:
        wanted = folders.logits(model)  # slots take turns: two passes see every layer in both
        folders.logits(model)
        made, launched = kernel.made, kernel.launched
        slots = model.offload.plan.slots
        weights = launched // 2
        assert weights <= made <= slots * weights
        for _ in range(3):
            assert torch.equal(folders.logits(model), wanted)
        assert kernel.launched == launched + 3 * weights
        assert kernel.made <= slots * weights
        at = kernel.made
        for _ in range(slots):
            folders.logits(model)
        assert kernel.made == at


def small(seed: int, rows: int, columns: int) -> nn.Linear:
    """A Linear whose weight is quantised, lazily."""
    generator = torch.Generator().manual_seed(seed)
    stored = quantise(torch.randn(rows, columns, generator=generator), FORM)
    module = nn.Linear(columns, rows)
    parts = {n: LazyTensor(Held(t)) for n, t in stored.items() if n != SHAPE}
    lazy = stand_for(FORM, parts, (rows, columns), torch.float32)
    module.weight = nn.Parameter(lazy, requires_grad=True)
    return module


def real(model: nn.Module) -> dict[str, torch.Tensor]:
    """Read what is stored, and give every module's plain weight by its name."""
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and isinstance(parameter.data, LazyTensor):
                module._parameters[key] = nn.Parameter(parameter.data.read(), requires_grad=False)
    return {
        name: forward.weights[0].make(
            [model.get_submodule(name)._parameters[p] for p in forward.weights[0].parts]
        )
        for name, forward in quantised_forwards(model)
    }


class Nested(nn.Linear):
    """A quantised module that calls another one: its child, and one that is not."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.child = small(2, 32, 64)
        self.weight = small(1, 64, 64).weight
        self.others: list[nn.Linear] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.child(x), *(other(x) for other in self.others)]
        return torch.cat([*parts, super().forward(x)], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Nested()
        self.beside = small(3, 96, 64)
        self.outer.others.append(self.beside)


def model_of() -> tuple[Model, dict[str, torch.Tensor]]:
    model = Model()
    keep_quantised(model)
    return model, real(model)


def test_modules_that_run_inside_one_another_do_not_share_memory() -> None:
    model, weights = model_of()
    forwards = dict(quantised_forwards(model))
    scratch = forwards["outer"].scratch
    assert scratch_bytes(model) == scratch.nbytes == 64 * 64 * 4 + 32 * 64 * 4
    x = torch.randn(5, 64)
    linear = nn.functional.linear
    for _ in range(2):
        with torch.no_grad():
            found = model.outer(x)
        wanted = [
            linear(x, weights["outer.child"], model.outer.child.bias),
            linear(x, weights["beside"], model.beside.bias),
            linear(x, weights["outer"], model.outer.bias),
        ]
        assert torch.equal(found, torch.cat(wanted, -1))
        assert scratch.top == 0


def test_a_graph_for_gradients_keeps_its_weights() -> None:
    model, weights = model_of()
    x = torch.randn(5, 64, requires_grad=True)
    found = model.beside(x)
    with torch.no_grad():
        model.outer(x)  # overwrites the scratch
    found.sum().backward()
    assert torch.allclose(x.grad, weights["beside"].sum(0).expand(5, 64), atol=1e-5)


def test_another_thread_has_memory_of_its_own() -> None:
    model, weights = model_of()
    forward = dict(quantised_forwards(model))["beside"]
    x = torch.randn(3, 64)
    found: list[torch.Tensor] = []

    def other() -> None:
        with torch.no_grad():
            found.append(model.beside(x))

    with forward.scratch.lock:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    with torch.no_grad():  # which of its products PyTorch takes on a CPU hangs on this, too
        wanted = nn.functional.linear(x, weights["beside"], model.beside.bias)
    assert torch.equal(found[0], wanted)
    assert forward.scratch._memory is None


LOOKUPS = ["int8", "int4-g32", "fp8", "mxfp4", "int8-channel"]


@pytest.mark.parametrize("form", LOOKUPS)
def test_an_embedding_makes_the_rows_that_are_asked_for(
    source: Source, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"default": "none", "embed_tokens": form}
    out = folders.pack(source("llama"), tmp_path / "out", asked)
    state = folders.whole(out, asked, torch.bfloat16)
    plain = folders.plain_model(source("llama"), state, tmp_path / "whole")
    shapes: list[tuple[int, ...]] = []

    def noted(form: Any, stored: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shapes.append(shape)
        return dequantise(form, stored, shape, dtype)

    monkeypatch.setattr("offload.models.quantized.forward.dequantise", noted)
    with offload.run(out, device="cpu") as model:
        wanted, ids = folders.logits(plain), variants.inputs("llama")["input_ids"]
        assert torch.equal(folders.logits(model), wanted)
        assert shapes == [(ids.numel(), 64)]
        assert scratch_bytes(model) == 0
        made = model.model.embed_tokens(ids[0])  # gradients are recorded here
        assert torch.equal(made, plain.model.embed_tokens(ids[0]))
        with torch.no_grad():
            assert torch.equal(model.model.embed_tokens(ids[0, :0]), made[:0])
            assert torch.equal(model.model.embed_tokens(ids[0, 3]), made[3])
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                model.model.embed_tokens(torch.tensor([131]))


def test_stored_tensors_that_were_put_elsewhere_are_found() -> None:
    model, _ = model_of()
    x = torch.eye(64)
    with torch.no_grad():
        model.beside.bias.zero_()
        before = model.beside(x)
        scale = model.beside.weight_scale
        scale.data = scale.data * 2
        assert torch.equal(model.beside(x), before * 2)


def test_a_module_that_is_not_in_its_place(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    with offload.run(out, device_map="cpu", device="cpu") as model:
        product = model.model.layers[0].mlp.up_proj
        folders.logits(model)
        with (
            torch.no_grad(),
            pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.up_proj\.weight_packed is in"),
        ):
            product(torch.zeros(1, 64, dtype=torch.bfloat16))
        forwards = [forward for _, forward in quantised_forwards(model)]
        assert all(forward._made for forward in forwards)
    assert not any(forward._made for forward in forwards)
    assert forwards[0].scratch._memory is None


def test_the_plan_counts_them(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", {"default": "int4", "lm_head": "int8"})
    with offload.run(out, device_map="cpu", device="cpu") as model:
        plan = model.offload.plan
        head = model.lm_head.weight.nbytes
        assert plan.reserve_bytes == scratch_bytes(model) >= max(head, 64 * 128 * 2)
        need = plan.device_bytes + plan.cpu_bytes + plan.reserve_bytes
    with offload.run(out, device_map="cpu", device="cpu", max_memory={"cpu": need}):
        pass
    with pytest.raises(BudgetError):
        offload.run(out, device_map="cpu", device="cpu", max_memory={"cpu": need - 1})


def on_gpu() -> tuple[Model, dict[str, torch.Tensor]]:
    model, weights = model_of()
    return model.cuda(), {name: weight.cuda() for name, weight in weights.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_allocates_its_output_alone_and_does_not_wait() -> None:
    model, weights = on_gpu()
    x = torch.randn(5, 64, device="cuda")
    wanted = nn.functional.linear(x, weights["beside"], model.beside.bias)
    with torch.no_grad():
        assert torch.equal(model.beside(x), wanted)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [model.beside(x) for _ in range(10)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 10
    assert all(torch.equal(y, wanted) for y in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_that_take_turns_wait_for_one_another() -> None:
    model, weights = on_gpu()
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = torch.randn(4096, 64, device="cuda")
    torch.cuda.synchronize()
    found = []
    with torch.no_grad():
        for i in range(40):
            module = (model.outer.child, model.beside)[i % 2]
            with torch.cuda.stream(streams[i // 3 % 2]):
                torch.cuda._sleep(20000 * (i % 4))  # the one behind would overtake
                found.append((module, module(x)))
    torch.cuda.synchronize()
    for module, y in found:
        name = "beside" if module is model.beside else "outer.child"
        assert torch.equal(y, nn.functional.linear(x, weights[name], module.bias))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "opt", "mixtral", "gpt_oss"])
def test_streamed_logits_on_a_gpu(source: Source, tmp_path: Path, name: str) -> None:
    folder, state = published.save(
        "mxfp4" if name == "gpt_oss" else "gptq-order", source(name), tmp_path / "out"
    )
    plain = folders.plain_model(source(name), state, tmp_path / "whole").cuda()
    ids = variants.inputs("llama")["input_ids"].cuda()
    with torch.no_grad():
        wanted = plain(input_ids=ids).logits
        with offload.run(folder, device_map="cpu", device="cuda", engine="transformers") as model:
            for _ in range(3):
                assert torch.equal(model(input_ids=ids).logits, wanted)
