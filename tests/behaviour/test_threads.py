"""Several threads on one model, and several models, each get their own right answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import comparison
import pytest
import torch
import transformers
import variants

import offload

Folder = Callable[[str], Path]


def run_threads(jobs: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.compat
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_threads_on_one_model(variant_folder: Folder, tier: str) -> None:
    folder = variant_folder("llama")
    plain = comparison.plain_model(folder)
    inputs = [variants.inputs("llama", seed=seed, length=5 + seed) for seed in range(4)]
    with torch.no_grad():
        want = [plain(**x).logits for x in inputs]
    tokens = [plain.generate(**x, max_new_tokens=5, do_sample=False) for x in inputs]
    with offload.run(folder, device_map=tier, prefetch=1) as model:

        def work(i: int) -> None:
            for _ in range(15):
                with torch.no_grad():
                    assert torch.equal(model(**inputs[i]).logits, want[i])
            got = model.generate(**inputs[i], max_new_tokens=5, do_sample=False)
            assert torch.equal(got, tokens[i])

        run_threads([lambda i=i: work(i) for i in range(4)])


@pytest.mark.compat
def test_models_in_threads(variant_folder: Folder) -> None:
    """Built, used and closed at the same time."""
    names = ["llama", "gpt2", "t5"]
    want = {n: comparison.ask(comparison.plain_model(variant_folder(n)), n) for n in names}

    def work(name: str) -> None:
        for tier in ("nvme", "cpu"):
            with offload.run(variant_folder(name), device_map=tier) as model:
                for _ in range(3):
                    assert not comparison.differences(comparison.ask(model, name), want[name])

    run_threads([lambda n=n: work(n) for n in names])


def test_close_while_another_thread_runs(variant_folder: Folder) -> None:
    """The pass under way ends well; the next one says that the model was closed."""
    folder = variant_folder("llama")
    inputs = variants.inputs("llama")
    with torch.no_grad():
        want = comparison.plain_model(folder)(**inputs).logits
    for _ in range(5):
        model = offload.run(folder, device_map="nvme")
        started = threading.Event()
        ended: list[BaseException] = []

        def work(model=model, started=started, ended=ended) -> None:
            try:
                with torch.no_grad():
                    while True:
                        assert torch.equal(model(**inputs).logits, want)
                        started.set()
            except offload.ClosedError as error:
                ended.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        started.wait(60)
        model.offload.close()
        thread.join(60)
        assert not thread.is_alive() and ended


def test_layers_called_from_outside_a_pass(variant_folder: Folder) -> None:
    """A block of the model is a module like any other, also when called by itself."""
    folder = variant_folder("gpt2")
    plain = comparison.plain_model(folder)
    hidden = torch.randn(1, 4, 32)
    with offload.run(folder, device_map="nvme") as model, torch.no_grad():
        for i in (2, 0, 1, 1, 2):
            want = plain.transformer.h[i](hidden)
            assert torch.equal(model.transformer.h[i](hidden), want)


def test_layers_skipped_and_reversed(variant_folder: Folder) -> None:
    """The order of layers is a hint: other orders are slower, never wrong."""
    folder = variant_folder("llama")
    plain = comparison.plain_model(folder)
    with offload.run(folder, device_map="nvme", prefetch=1) as model, torch.no_grad():
        for order in ([2, 1, 0], [0, 2], [1], [0, 1, 2], [2, 0, 1]):
            results = []
            for m in (plain, model):
                layers = m.model.layers
                m.model.layers = torch.nn.ModuleList([layers[i] for i in order])
                results.append(m(**variants.inputs("llama"), use_cache=False).logits)
                m.model.layers = layers
            assert torch.equal(*results), order


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_fork_while_another_thread_is_in_a_pass(variant_folder: Folder, tier: str) -> None:
    """The forked process has the pass's lock, but not the thread that would release it."""
    name = "llama"
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(60)

    def run_pass() -> None:
        with torch.no_grad():
            model(**variants.inputs(name))

    with offload.run(variant_folder(name), device_map=tier, prefetch=1) as model:
        hook = model.model.layers[1].mlp.register_forward_hook(wait)
        thread = threading.Thread(target=run_pass)
        thread.start()
        assert inside.wait(60)
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                run_pass()
            except offload.OffloadError as error:
                model.offload.close()
                ended = 0 if "forked" in str(error) else 2
            finally:
                os._exit(ended)
        go_on.set()
        thread.join(60)
        hook.remove()
        assert exit_code(child) == 0
        run_pass()


def exit_code(child: int) -> int:
    """How the forked process ended; it has half a minute."""
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")


def test_fork_while_another_thread_builds_a_model(
    variant_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers changes meanwhile, and the lock around that, stay out of the child."""
    name = "llama-tied"
    inside = threading.Event()
    finalize = type(variants.build(name))._finalize_model_loading

    def slow(*arguments: object) -> object:
        inside.set()
        time.sleep(0.5)  # the fork comes now
        return finalize(*arguments)

    def tied() -> bool:
        with offload.run(
            variant_folder(name), device_map="nvme", dtype="float16", offload_folder=tmp_path
        ) as model:
            return model.lm_head.weight is model.model.embed_tokens.weight

    cls = transformers.LlamaForCausalLM
    monkeypatch.setattr(cls, "_finalize_model_loading", staticmethod(slow))
    thread = threading.Thread(target=tied)
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            if tied() and torch.get_default_dtype() == torch.float32:
                ended = 0
        finally:
            os._exit(ended)
    thread.join(60)
    assert exit_code(child) == 0
    assert tied()  # the lock is free here too
