"""What a planned run takes on the compute device, counted, against what its plan says."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import offload
from offload.kernels.linear import Linear
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import RotaryAppend
from offload.models.fused import prefill_attention
from offload.models.profile import model_profile
from offload.scheduler.engine import FUSED, CpuAttention
from offload.scheduler.footprint import footprint, held_by_torch
from offload.scheduler.setting import Job, Setting

HIDDEN, LAYERS, VOCABULARY = 128, 2, 96
COMMON = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCABULARY}


def opt() -> Any:
    config = OPTConfig(hidden_size=HIDDEN, ffn_dim=4 * HIDDEN, word_embed_proj_dim=HIDDEN, **COMMON)
    return OPTForCausalLM(config)


def llama() -> Any:
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=384, num_key_value_heads=2, **COMMON)
    return LlamaForCausalLM(config)


class Counter:
    """Bytes of tensors made since, by what Python holds: looked at ahead of every launch of a
    kernel, with what the launch has in its workspace on a GPU.
    """

    def __init__(self, host: set[int]) -> None:
        gc.collect()
        gc.freeze()  # what is there already is looked at no more
        self.peak, self._host = 0, host

    def look(self) -> None:
        held = {}
        for found in gc.get_objects():
            if isinstance(found, torch.Tensor) and found.device.type == "cpu":
                storage = found.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        self.peak = max(self.peak, sum(n for at, n in held.items() if at not in self._host))

    def close(self) -> None:
        gc.unfreeze()


def counted(model: Any, ids: torch.Tensor, new: int) -> int:
    """The peak of a generation."""
    monkeypatch = pytest.MonkeyPatch()
    engine = model.offload._engine
    host: set[int] = set()
    if engine.host_kv is not None:
        borrow = engine.host_kv.borrow

        def borrowed(*args: Any, **kwargs: Any) -> Any:
            found = borrow(*args, **kwargs)
            host.add(found._buffer.tensor().untyped_storage().data_ptr())
            return found

        monkeypatch.setattr(engine.host_kv, "borrow", borrowed)
    counter = Counter(host)
    for kind in (Linear, ResidualNorm, RotaryAppend):
        launch = kind.launch

        def looked(self: Any, stream: int = 0, launch: Any = launch) -> None:
            counter.look()
            launch(self, stream)

        monkeypatch.setattr(kind, "launch", looked)
    made = Linear.__init__

    def in_workspace(self: Any, input: Any, weight: Any, out: Any, **around: Any) -> None:
        made(self, input, weight, out, **around)
        rows = input.numel() // input.shape[-1]
        if rows > 16 and (around.get("gated") or around.get("activation")):
            around["workspace"].partials(rows * weight.shape[0] * out.itemsize)

    monkeypatch.setattr(Linear, "__init__", in_workspace)
    try:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
    finally:
        monkeypatch.undo()
        counter.close()
    return counter.peak


@pytest.mark.parametrize(
    ("make", "batch", "prompt", "below", "rows", "least"),
    [
        (opt, 6, 48, 0, 96, 0.7),
        (opt, 5, 40, 2, None, 0.4),  # no part has all rows, which the plan does not know
        (llama, 6, 48, 0, 96, 0.7),
        (llama, 12, 20, 12, 40, 0.7),
        (llama, 1, 40, 0, None, 0.7),
    ],
)
def test_a_generation_takes_what_its_plan_says(
    make: Any, batch: int, prompt: int, below: int, rows: int | None, least: float
) -> None:
    job = Job(prompt, 3, batch)
    network = make().eval()
    profile = replace(model_profile(network, "counted"), engine=FUSED)
    how = Setting(
        weights="fp32",
        resident=0,
        cpu=LAYERS,
        nvme=0,
        depth=1,
        gpu_sequences=batch - below,
        cpu_sequences=below,
        attention=CpuAttention.CPU if below else CpuAttention.NONE,
        prefill_rows=rows or batch * prompt,
        prefill_passes=1,
        decode_micro_batches=1,
    )
    with offload.run(
        network,
        device_map="cpu",
        device="cpu",
        engine="fused",
        batch_size=batch,
        max_length=job.length,
        kv_on_cpu=below,
    ) as model:
        model.offload.wait_loaded()
        model.offload._engine.prefill_rows = rows
        ids = torch.randint(5, VOCABULARY, (batch, prompt))
        for _ in range(2):  # what the first leaves is counted with the second
            peak = counted(model, ids, job.gen)
    need = footprint(profile, job, how)
    planned = need.kv_device + need.hidden + need.workspace
    # Token ids, positions and masks, which are little beside tensors as wide as real models.
    small = 64 * batch * job.length + 4096
    assert least * planned <= peak <= planned + small, (peak, planned, need)


def test_masks_of_padded_prompts_are_planned_for() -> None:
    assert FUSED.masks == (prefill_attention.KEPT_ELEMENTS, prefill_attention.MASK_ELEMENTS)
    how = Setting("fp32", 0, LAYERS, 0, 1, 6, 0, CpuAttention.NONE, 96, 1, 1)
    profile = replace(model_profile(opt(), "padded"), engine=FUSED)
    plain = footprint(profile, Job(48, 3, 6), how).workspace
    padded = footprint(replace(profile, allocator=True), Job(48, 3, 6), how).workspace
    assert padded - plain == 6 * 48 * 48 + 4 * 96 * 48


@pytest.mark.parametrize("make", [opt, llama])
def test_sequences_that_are_embedded_apart_are_what_they_were(make: Any) -> None:
    """With padding, so that each has positions of its own."""
    with offload.run(make().eval(), device_map="cpu", device="cpu", engine="fused") as model:
        ids = torch.randint(5, VOCABULARY, (5, 9))
        mask = torch.ones_like(ids)
        for row in range(5):
            mask[row, :row] = 0
        whole = model(ids, attention_mask=mask).logits
        engine, embedded = model.offload._engine, []
        hidden = engine._ahead.hidden
        engine._ahead.hidden = lambda *args: embedded.append(args) or hidden(*args)
        engine.prefill_rows = 20  # two sequences
        apart = model(ids, attention_mask=mask).logits
    assert [len(ids) for ids, _, _ in embedded] == [2, 2, 1]
    torch.testing.assert_close(apart[mask.bool()], whole[mask.bool()])


@pytest.mark.parametrize(
    ("nbytes", "count", "held"),
    [
        (0, 4, 0),
        (1, 3, 2 << 20),
        (1 << 20, 3, 4 << 20),
        ((1 << 20) + 1, 19, 20 << 20),
        (5 << 20, 40, 200 << 20),
        (6 << 20, 40, 280 << 20),  # three of 20 MiB, and 2 MiB of no use
        ((10 << 20) + 1, 2, 24 << 20),
    ],
)
def test_blocks_of_the_allocator(nbytes: int, count: int, held: int) -> None:
    assert held_by_torch(nbytes, count) == held


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nbytes", [3 << 19, 5 << 20, 6 << 20, 12 << 20, (30 << 20) + 1])
def test_blocks_of_the_allocator_are_these(nbytes: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    kept = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(12)]
    found = torch.cuda.memory_reserved() - before
    assert found <= held_by_torch(nbytes, len(kept)) <= found + (20 << 20)  # gaps of what was there
