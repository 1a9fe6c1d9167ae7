"""Memory is exact, flat and bounded; disk errors surface in the call and pass with the fault."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import checkpoints
import comparison
import process
import pytest
import torch
import transformers
import variants
from comparison import output

import offload

Folder = Callable[[str], Path]
HERE = Path(__file__).parent
MB = 1 << 20


def llama(layers: int, hidden: int, intermediate: int) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        dtype="float32",
    )
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config).eval()


# -- memory ------------------------------------------------------------------------------------


def test_cpu_tier_is_not_rounded_up(tmp_path: Path) -> None:
    """Layers of 9 MiB: a power of two for each would be 16."""
    llama(layers=12, hidden=512, intermediate=896).save_pretrained(tmp_path)
    with offload.run(tmp_path, device_map="cpu") as probe:
        output(probe)  # what a first pass allocates once is no part of the arena
    gc.collect()
    before = process.resident_bytes()
    with offload.run(tmp_path, device_map="cpu") as model:
        output(model)  # layers may still be arriving before
        taken = process.resident_bytes() - before
        plan = model.offload.plan
        weights = plan.streamed_bytes
        assert all(8 * MB < layer.weight_bytes < 10 * MB for layer in plan.layers)
        # The ring of the reads was given back; of a huge page at most a part is left in each layer.
        assert weights - 8 * MB < taken < weights + plan.slot_total + (12 * 2 + 4) * MB
    del model
    gc.collect()
    # The arena of 108 MiB is gone; what is left is the allocator's own, more of it in a long run.
    assert process.resident_bytes() - before < 40 * MB


def test_nvme_tier_holds_slots_only(tmp_path: Path) -> None:
    llama(layers=24, hidden=512, intermediate=896).save_pretrained(tmp_path)
    with offload.run(tmp_path, device_map="nvme") as probe:
        output(probe)
    gc.collect()
    with process.PeakMemory() as memory:
        model = offload.run(tmp_path, device_map="nvme")
        for _ in range(3):
            output(model)
    plan = model.offload.plan
    model.offload.close()
    assert plan.streamed_bytes > 200 * MB
    assert memory.growth < plan.slot_total + plan.ring_bytes + plan.outside_bytes + 32 * MB


@pytest.mark.compat
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_200_generate_calls(variant_folder: Folder, tier: str) -> None:
    arguments = variants.inputs("llama", rows=1, length=4)
    with offload.run(variant_folder("llama"), device_map=tier, prefetch=2) as model:

        def generate(calls: int) -> None:
            for _ in range(calls):
                model.generate(**arguments, max_new_tokens=2, do_sample=False)
            gc.collect()

        generate(20)
        memory, files = process.resident_bytes(), sorted(process.open_files())
        threads = process.kernel_threads()
        generate(200)
        assert process.resident_bytes() - memory < 3 * MB
        assert sorted(process.open_files()) == files
        assert process.settles(lambda: process.kernel_threads() <= threads)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_close_gives_everything_back(variant_folder: Folder, tier: str) -> None:
    folder = variant_folder("llama")
    with offload.run(folder, device_map=tier) as model:
        output(model)  # torch starts threads of its own
    threads, files = process.kernel_threads(), len(process.open_files())
    for _ in range(20):
        with offload.run(folder, device_map=tier) as model:
            output(model)
        model.offload.close()  # a second close does nothing
    assert process.settles(lambda: process.kernel_threads() <= threads)
    assert len(process.open_files()) == files
    assert not process.own_threads()


def test_failed_run_gives_everything_back(variant_folder: Folder, tmp_path: Path) -> None:
    folder = checkpoints.edited(variant_folder("llama"), tmp_path / "m")
    threads, files = process.kernel_threads(), len(process.open_files())
    for _ in range(5):
        with pytest.raises(offload.BudgetError):
            offload.run(folder, device_map="nvme", max_memory={"cpu": 1000})
        with pytest.raises(ValueError, match="does not have"):
            offload.run(folder, device_map={"": "nvme", "model.layers.9": "cpu"})
    assert process.settles(lambda: process.kernel_threads() <= threads)
    assert len(process.open_files()) == files


LIMITED = r"""
import os, sys, threading, time
folder, cgroup, budget = sys.argv[1:]
import torch
torch.set_num_threads(2)
import transformers
import offload
from offload.models.build import build_model
from offload.checkpoint import open_checkpoint

def rss(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

model = build_model(open_checkpoint(folder))   # imports and the meta build
del model
open(cgroup + "/cgroup.procs", "w").write(str(os.getpid()))
open("/proc/self/clear_refs", "w").write("5")
before = rss("VmRSS")
with offload.run(folder, device_map="nvme", max_memory={"cpu": budget}) as model, torch.no_grad():
    plan = model.offload.plan
    ids = torch.arange(3, 19)[None]
    tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    weights = plan.outside_bytes + plan.slot_total + plan.ring_bytes
print(before, rss("VmHWM"), weights, plan.streamed_bytes, tokens.shape[1])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a cgroup")
@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists(),
    reason="needs the memory controller of cgroup v1",
)
def test_one_gigabyte_in_500_megabytes(tmp_path: Path) -> None:
    """The kernel kills whoever takes more: the budget is kept, and 80 MB are enough beside it."""
    with torch.device("meta"):
        shape = llama(layers=30, hidden=1024, intermediate=1536)
    shape.config.save_pretrained(tmp_path)
    _write_random(shape, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 1e9
    group = Path(f"/sys/fs/cgroup/memory/offload-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("500000000")
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(tmp_path), str(group), "200MB"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OFFLOAD_POISON": "0"},
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)
    before, peak, weights, streamed, length = map(int, done.stdout.split()[-5:])
    assert streamed > 0.9e9 and length == 19
    assert weights < 200e6
    assert peak <= before + weights + 80 * MB, f"{peak / MB:.0f} MB, {before / MB:.0f} at start"


def _write_random(shape: torch.nn.Module, file: Path) -> None:
    """A checkpoint of that shape, written tensor by tensor."""
    import json

    header: dict[str, Any] = {}
    at = 0
    for name, tensor in shape.state_dict().items():
        end = at + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in shape.state_dict().values():
            stream.write((torch.randn(tensor.shape) * 0.02).numpy().tobytes())


# -- budgets -----------------------------------------------------------------------------------


def test_nothing_offloaded_is_an_error(variant_folder: Folder) -> None:
    with pytest.raises(offload.BudgetError, match="none of the 3 layers"):
        offload.run(variant_folder("llama"), device_map={"": 0, "model.rotary_emb": "cpu"})


def test_everything_resident_is_said(variant_folder: Folder) -> None:
    with offload.run(variant_folder("llama")) as model:
        report = model.offload.report()
        assert report.streamed_bytes == report.disk_bytes == 0
        assert report.resident_bytes > 100_000
        assert torch.equal(output(model), output(comparison.plain_model(variant_folder("llama"))))


def test_report_says_what_is_where(variant_folder: Folder) -> None:
    with offload.run(variant_folder("llama"), device_map="nvme") as model:
        layers = sum(p.nbytes for n, p in model.named_parameters() if "layers" in n)
        output(model)
        report = model.offload.report()
        assert report.disk_bytes == report.streamed_bytes == layers
        assert report.loads >= 3 and report.passes == 1
        text = str(report)
        assert "NVMe" in text and "bound" in text and "achieved" in text


@pytest.mark.parametrize("tier", ["cpu", "nvme", "auto"])
def test_budget_that_cannot_hold_two_slots(variant_folder: Folder, tier: str) -> None:
    def run(budget: str | int) -> None:
        offload.run(
            variant_folder("llama"), device_map=tier, max_memory={"cpu": budget}
        ).offload.close()

    # All layers of so small a model take less than slots and disk reads.
    slots = "0 slots of 0 B" if tier == "auto" else r"2 slots of [\d.]+ "
    with pytest.raises(offload.BudgetError, match=slots) as caught:
        run("60KB")
    assert len(str(caught.value).splitlines()) == 1
    named = re.search(r"needs at least, (\d+) bytes", str(caught.value))
    assert named is not None
    run(int(named[1]))
    with pytest.raises(offload.BudgetError):
        run(int(named[1]) - 1)


def test_prefetch_is_lowered_and_said(variant_folder: Folder) -> None:
    folder = variant_folder("qwen3_moe")
    with offload.run(folder, device_map="nvme", prefetch=1) as model:
        plan = model.offload.plan
        least = plan.device_bytes + plan.ring_bytes
    with offload.run(
        folder, device_map="nvme", prefetch=2, max_memory={"cpu": least + 100}
    ) as model:
        assert model.offload.plan.depth == 1
        assert "prefetch lowered from 2 to 1" in str(model.offload.report())
        plain = comparison.plain_model(folder)
        assert torch.equal(output(model, "qwen3_moe"), output(plain, "qwen3_moe"))


# -- disk errors -------------------------------------------------------------------------------


@pytest.fixture
def single(variant_folder: Folder, tmp_path: Path) -> Path:
    return checkpoints.edited(variant_folder("llama"), tmp_path / "single")


@pytest.mark.compat
def test_file_cut_while_in_use(single: Path) -> None:
    """The error names the file and comes in the call; with the file as it was, answers are too."""
    file = single / "model.safetensors"
    content, then = file.read_bytes(), file.stat()
    want = output(comparison.plain_model(single))
    with offload.run(single, device_map="nvme", prefetch=1) as model:
        assert torch.equal(output(model), want)
        for keep in (0, 100, len(content) // 2):
            os.truncate(file, keep)
            for _ in range(3):
                with pytest.raises(
                    offload.CheckpointError, match=r"model\.safetensors was changed"
                ):
                    output(model)
            with open(file, "r+b") as stream:
                stream.write(content)
            os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
            for _ in range(3):
                assert torch.equal(output(model), want)


class FaultyReads:
    """Stands before os.preadv: short counts, one error, or nothing but errors."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = 0
        self._real = os.preadv
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            return self._real(fd, buffers, offset, *flags)  # a trial of the backend
        with self._lock:
            self.count += 1
            kind = self.kind
            if kind == "EIO":
                self.kind = "none"
        if kind in ("EIO", "broken"):
            raise OSError(errno.EIO, "injected")
        if kind == "short":
            view = memoryview(buffers[0]).cast("B")
            return self._real(fd, [view[: max(1, len(view) // 3)]], offset, *flags)
        return self._real(fd, buffers, offset, *flags)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_short_reads(variant_folder: Folder, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "python-threads")
    want = output(comparison.plain_model(variant_folder("llama")))
    faulty = FaultyReads("short")
    monkeypatch.setattr(os, "preadv", faulty)
    with offload.run(variant_folder("llama"), device_map=tier) as model:
        for _ in range(2):
            assert torch.equal(output(model), want)
    assert faulty.count > 20


def test_disk_error_in_mid_pass(variant_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call fails, with the file's name and errno; the next one is right."""
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "python-threads")
    want = output(comparison.plain_model(variant_folder("llama")))
    faulty = FaultyReads("none")
    monkeypatch.setattr(os, "preadv", faulty)
    with offload.run(variant_folder("llama"), device_map="nvme") as model:
        for _ in range(5):
            faulty.kind = "EIO"
            with pytest.raises(OSError, match="safetensors") as caught:
                for _ in range(3):  # a prefetched layer may serve the first pass
                    output(model)
            assert caught.value.errno == errno.EIO
            for _ in range(2):
                assert torch.equal(output(model), want)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_disk_error_while_loading(
    variant_folder: Folder, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_AIO_BACKEND", "python-threads")
    threads, files = process.kernel_threads(), len(process.open_files())
    faulty = FaultyReads("broken")
    monkeypatch.setattr(os, "preadv", faulty)
    with pytest.raises(OSError, match="safetensors") as caught:
        output(offload.run(variant_folder("llama"), device_map=tier))
    assert caught.value.errno == errno.EIO
    del caught
    gc.collect()
    assert process.settles(lambda: process.kernel_threads() <= threads)
    assert len(process.open_files()) <= files
