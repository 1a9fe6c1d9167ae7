"""The offloaded model as an object: its class, its life and end, and what is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comparison
import process
import pytest
import torch
import transformers
import variants
from comparison import output
from transformers import PreTrainedModel

import offload

Folder = Callable[[str], Path]
TIERS = ["cpu", "nvme"]


@pytest.fixture(params=TIERS)
def model(request: pytest.FixtureRequest, variant_folder: Folder) -> Iterator[PreTrainedModel]:
    with offload.run(variant_folder("llama"), device_map=request.param, prefetch=1) as offloaded:
        yield offloaded


@pytest.fixture(scope="module")
def plain(variant_folder: Folder) -> PreTrainedModel:
    return comparison.plain_model(variant_folder("llama"))


@pytest.mark.compat
def test_class(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    cls = transformers.LlamaForCausalLM
    assert isinstance(model, cls) and isinstance(model, torch.nn.Module)
    assert issubclass(type(model), cls)
    assert type(model).__name__ == cls.__name__
    assert type(model).__module__ == cls.__module__
    assert type(model).__qualname__ == cls.__qualname__
    assert repr(model) == repr(plain)
    assert not model.training and model.device == torch.device("cpu")
    assert model.name_or_path == plain.name_or_path
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.compat
def test_numbers(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    assert model.num_parameters() == plain.num_parameters()
    shapes = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    assert shapes == {n: (p.shape, p.dtype) for n, p in plain.named_parameters()}
    assert model.get_memory_footprint() == plain.get_memory_footprint()
    tiers = model.hf_device_map
    assert next(iter(tiers.values())) == "cpu" and len(tiers) == 4
    assert set(tiers.values()) <= {"cpu", "disk"}


@pytest.mark.compat
def test_closed(model: PreTrainedModel, tmp_path: Path) -> None:
    output(model)
    model.offload.close()
    assert model.offload.closed and not process.own_threads()
    with pytest.raises(offload.ClosedError, match="released"):
        model.state_dict()
    with pytest.raises(offload.ClosedError, match=r"offload\.run again"):
        output(model)
    with pytest.raises(offload.ClosedError):
        model.generate(**variants.inputs("llama"), max_new_tokens=2)
    with pytest.raises(offload.ClosedError):
        model.model.layers[0](torch.zeros(1, 3, 32))
    with pytest.raises(offload.ClosedError):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.offload.close()
    str(model.offload.report())


def test_closed_by_with(variant_folder: Folder) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        offload.run(variant_folder("llama"), device_map="nvme") as model,
    ):
        1 / 0  # noqa: B018
    with pytest.raises(offload.ClosedError):
        output(model)


@pytest.mark.compat
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("live", [False, True])
def test_deleted_without_close(
    variant_folder: Folder, tmp_path: Path, tier: str, live: bool
) -> None:
    """Threads end, files are closed, memory and stored copies go."""
    source: Any = variant_folder("llama")
    gc.collect()
    threads, files = process.own_threads(), len(process.open_files())
    if live:
        source = comparison.plain_model(source)
    model = offload.run(source, device_map=tier, offload_folder=tmp_path)
    del source
    output(model)
    gone = weakref.ref(model)
    del model
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread that filled the CPU tier may be ending
        gc.collect()
    assert gone() is None
    assert process.own_threads() == threads and len(process.open_files()) == files
    assert not list(tmp_path.rglob("*.safetensors"))


def test_copies_are_refused(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    for copied in (model, model.model, model.model.layers[0]):
        with pytest.raises(TypeError, match=r"offload\.run a second time"):
            copy.deepcopy(copied)
        with pytest.raises(TypeError, match="path instead"):
            pickle.dumps(copied)
    with pytest.raises(TypeError, match="path instead"):
        torch.save(model, io.BytesIO())
    assert copy.deepcopy(model.config).to_dict() == model.config.to_dict()
    assert torch.equal(output(model), output(plain))


def test_moves(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Where it is already is no move; every other is refused and changes nothing."""
    assert model.to("cpu") is model and model.to(torch.float32) is model
    assert model.to(device="cpu", dtype=torch.float32) is model and model.eval() is model
    assert model.cpu() is model and model.float() is model
    moves: list[Callable[[], Any]] = [
        lambda: model.to("meta"),
        lambda: model.to(torch.float16),
        lambda: model.to("cpu", torch.bfloat16),
        model.half,
        model.double,
        model.bfloat16,
        lambda: model.cuda(0),
        model.cuda,
        lambda: model.cuda(torch.device("cuda:0")),
        lambda: model.to_empty(device="cpu"),
        lambda: model.model.to(torch.float16),
        lambda: model.model.layers[0].half(),
    ]
    for move in moves:
        with pytest.raises((offload.UnsupportedError, NotImplementedError)):
            move()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(output(model), output(plain))


@pytest.mark.compat
def test_state_dict(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    output(model)
    state, want = model.state_dict(), plain.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(state[k], want[k]) for k in want)
    part = model.model.layers[1].state_dict()
    assert torch.equal(part["mlp.up_proj.weight"], want["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(offload.UnsupportedError, match="load_state_dict"):
        model.load_state_dict(want)
    assert torch.equal(output(model), output(plain))


@pytest.mark.compat
def test_gradients(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    inputs = variants.inputs("llama")
    with torch.enable_grad():
        logits = model(**inputs).logits
        assert not logits.requires_grad and torch.equal(logits, output(plain))
        with pytest.raises(RuntimeError):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
        embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        with pytest.raises(offload.UnsupportedError, match="no_grad"):
            model(inputs_embeds=embedded)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embedded).logits, output(plain))


@pytest.mark.compat
def test_inference_mode(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Modes may alternate: nothing that lasts is made inside of one."""
    with torch.inference_mode():
        first = model(**variants.inputs("llama")).logits
    second = output(model)
    with torch.inference_mode():
        third = model(**variants.inputs("llama")).logits
    for got in (first, second, third):
        assert torch.equal(got, output(plain))


def test_built_in_inference_mode(variant_folder: Folder, plain: PreTrainedModel) -> None:
    with torch.inference_mode():
        model = offload.run(variant_folder("llama"), device_map="nvme")
    assert torch.equal(output(model), output(plain))
    assert torch.equal(model(**variants.inputs("llama")).logits, output(plain))
    model.offload.close()


@pytest.mark.compat
def test_exception_in_a_users_hook(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("from the hook")

    for place in (model.model.layers[1].mlp, model.model.layers[2], model.model.norm, model):
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            handle = getattr(place, register)(fail)
            with pytest.raises(LookupError):
                output(model)
            handle.remove()
            assert torch.equal(output(model), output(plain))
    assert all(p.is_meta for p in model.model.layers.parameters())


def test_hooks_see_weights(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Inside a layer its weights are the real ones."""
    seen = []

    def look(module: torch.nn.Module, *_: Any) -> None:
        seen.append(module.weight.clone())

    with torch.no_grad():
        handles = [layer.mlp.up_proj.register_forward_hook(look) for layer in model.model.layers]
        output(model)
    for handle in handles:
        handle.remove()
    want = [layer.mlp.up_proj.weight for layer in plain.model.layers]
    assert len(seen) == 3 and all(torch.equal(a, b) for a, b in zip(seen, want, strict=True))


@pytest.mark.parametrize("tier", [*TIERS, "mixed"])
def test_interrupted(variant_folder: Folder, plain: PreTrainedModel, tier: str) -> None:
    """Ctrl-C at any moment of a pass leaves a model that answers rightly, in every thread."""
    place: Any = {"": "nvme", "model.layers.1": "cpu"} if tier == "mixed" else tier
    model = offload.run(variant_folder("llama"), device_map=place, prefetch=1)
    want = output(plain)
    inputs = variants.inputs("llama")
    main = threading.main_thread().ident
    assert main is not None
    interrupted = 0
    stop = threading.Event()

    def press() -> None:
        delay = 0.0005
        while not stop.is_set():
            time.sleep(delay)
            delay = delay * 1.37 % 0.02 + 0.0005
            if armed.is_set():
                signal.pthread_kill(main, signal.SIGINT)

    armed = threading.Event()
    presser = threading.Thread(target=press)
    presser.start()
    try:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline and interrupted < 100:
            try:
                armed.set()
                with torch.no_grad():
                    for _ in range(20):
                        model(**inputs)
                armed.clear()
            except KeyboardInterrupt:
                armed.clear()
                interrupted += 1
                while True:  # one more may be on its way
                    try:
                        time.sleep(0.001)
                        break
                    except KeyboardInterrupt:
                        continue
            assert torch.equal(output(model), want)
    finally:
        armed.clear()
        stop.set()
        presser.join()
    assert interrupted >= 3  # many more, unless the machine is very busy
    other: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: other.append(output(model)), daemon=True)
    thread.start()
    thread.join(30)
    assert other and torch.equal(other[0], want), "the interrupted pass still holds the model"
    model.offload.close()


@pytest.mark.compat
@pytest.mark.parametrize("name", ["t5", "t5-v1.1-untied"])
def test_several_layer_lists(variant_folder: Folder, name: str) -> None:
    with offload.run(variant_folder(name), device_map="nvme") as model:
        names = [layer.name for layer in model.offload.plan.layers]
        assert names[0] == "encoder.block.0" and names[-1].startswith("decoder.block.")
        assert len(names) == 5 + (name == "t5")
        plain = comparison.plain_model(variant_folder(name))
        encoded = variants.inputs(name)["input_ids"]
        with torch.no_grad():
            for _ in range(2):  # the encoder alone, twice: passes of half the layers
                got = model.get_encoder()(encoded).last_hidden_state
                assert torch.equal(got, plain.get_encoder()(encoded).last_hidden_state)
        assert torch.equal(output(model, name), output(plain, name))


# -- live models -------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto", "dict"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "t5", "gpt_neo", "deepseek_v3"])
def test_live_model(tmp_path: Path, name: str, tier: str) -> None:
    """The same object, with the same answers; its stored copy goes with close()."""
    plain = variants.build(name)
    want = comparison.ask(plain, name)
    names = comparison.layer_names(plain)
    place: Any = {"": "nvme", names[0]: 0, names[-1]: "cpu"} if tier == "dict" else tier
    memory = {"cpu": 10**9} if tier == "auto" else None
    model = offload.run(plain, device_map=place, offload_folder=tmp_path, max_memory=memory)
    assert model is plain
    assert bool(list(tmp_path.rglob("*.safetensors"))) == (tier in ("nvme", "dict"))
    assert not comparison.differences(comparison.ask(model, name), want)
    model.offload.close()
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(offload.ClosedError):
        output(model, name)


def test_memory_of_a_live_model(tmp_path: Path) -> None:
    """What moves to files leaves memory; two hundred megabytes show it."""
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=768, intermediate_size=2048, num_hidden_layers=8
    )
    model = transformers.LlamaForCausalLM(config).eval()
    gc.collect()
    process.trim()
    before = process.resident_bytes()
    offload.run(model, device_map="nvme", offload_folder=tmp_path)
    gc.collect()
    process.trim()
    weights = model.offload.plan.streamed_bytes
    assert weights > 200 << 20
    held = model.offload.plan.slot_total + model.offload.plan.ring_bytes
    released = before - process.resident_bytes()
    assert released > weights - held - (24 << 20)
    model.offload.close()


def test_live_model_is_refused(tmp_path: Path, variant_folder: Folder) -> None:
    model = offload.run(variants.build("llama"), device_map="cpu")
    with pytest.raises(ValueError, match="offloaded already"):
        offload.run(model, device_map="cpu")
    model.offload.close()
    with torch.device("meta"):
        empty = variants.VARIANTS["llama"].model()
    with pytest.raises(ValueError, match="meta device"):
        offload.run(empty, device_map="cpu")
    with pytest.raises(ValueError, match="cast the model first"):
        offload.run(variants.build("llama"), device_map="cpu", dtype="float16")
    of_files = {"model_class": "AutoModel", "revision": "main", "attn_implementation": "eager"}
    for name, value in of_files.items():
        with pytest.raises(ValueError, match=f"^{name}='{value}' .* not to a live model"):
            offload.run(variants.build("llama"), device_map="cpu", **{name: value})


def test_live_model_after_a_refused_budget() -> None:
    """An error before anything moved leaves the model as it was."""
    model = variants.build("llama")
    want = output(model)
    with pytest.raises(offload.BudgetError):
        offload.run(model, device_map="cpu", max_memory={"cpu": 5000})
    assert type(model) is transformers.LlamaForCausalLM and torch.equal(output(model), want)
    assert not hasattr(model, "hf_device_map")


def test_frozen_and_half_live_model(tmp_path: Path) -> None:
    """A live model's own dtypes stay, buffers that were cast with it too."""
    model = variants.build("llama").to(torch.bfloat16).requires_grad_(False)
    want = output(model)
    with offload.run(model, device_map="nvme", offload_folder=tmp_path) as model:
        assert not any(p.requires_grad for p in model.parameters())
        assert torch.equal(output(model), want)
