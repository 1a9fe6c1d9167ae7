"""The memory of a setting, part by part, and the largest number that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import GIB, H200, LLAMA_2_70B, OPT_30B

from offload.models.kv.streamed_kv import places_bytes
from offload.scheduler.engine import FUSED, CpuAttention
from offload.scheduler.footprint import footprint
from offload.scheduler.kv_pieces import largest_piece, piece_limit
from offload.scheduler.largest import largest
from offload.scheduler.least import least_cpu, least_device
from offload.scheduler.model_profile import ALIGNMENT
from offload.scheduler.plan import Budget
from offload.scheduler.setting import Job, Setting

HIDDEN, VOCABULARY = 7168, 50272
LAYER = 2 * (12 * HIDDEN**2 + 13 * HIDDEN)
SLOT = LAYER + 16 * 256
KV = 2 * HIDDEN * 2  # of one token in one layer
JOB = Job(500, 44)
PLAIN = Setting("fp16", 8, 30, 10, 2, 6, 0, CpuAttention.NONE, 2048, 1, 1)


def test_every_part_of_a_plain_setting() -> None:
    found = footprint(OPT_30B, JOB, PLAIN)
    assert found.outside == OPT_30B.outside_bytes
    assert (found.resident, found.slots, found.cpu_layers) == (8 * SLOT, 3 * SLOT, 30 * SLOT)
    assert found.kv_device == 6 * 544 * 48 * KV
    assert found.hidden == 6 * 500 * HIDDEN * 2
    assert found.workspace == 2048 * (8 + 3 * 4) * HIDDEN * 2 + 6 * VOCABULARY * (2 + 4)
    assert (found.kv_cpu, found.kv_slots, found.ring) == (0, 0, 16 * (8 << 20))
    assert found.device == sum(
        (found.outside, found.resident, found.slots, found.kv_device, found.hidden, found.workspace)
    )
    assert found.cpu == 30 * SLOT + found.ring


def test_sequences_in_cpu_memory() -> None:
    how = replace(PLAIN, gpu_sequences=2, cpu_sequences=4, attention=CpuAttention.CPU)
    plain, found = footprint(OPT_30B, JOB, PLAIN), footprint(OPT_30B, JOB, how)
    assert found.kv_device == 2 * 544 * 48 * KV and found.kv_cpu == 4 * 544 * 48 * KV
    assert found.workspace - plain.workspace == 2 * 2048 * KV and found.kv_slots == 0
    rises = footprint(OPT_30B, JOB, replace(how, attention=CpuAttention.GPU))
    assert rises.kv_slots == 2 * 4 * 544 * KV and rises.kv_cpu == found.kv_cpu


def test_keys_and_values_in_int8() -> None:
    """56 heads of 128: two bytes become one and a scale's share of 4 / 128."""
    how = replace(PLAIN, gpu_sequences=2, cpu_sequences=4, attention=CpuAttention.CPU)
    model = replace(OPT_30B, engine=replace(OPT_30B.engine, int8_kv=True))
    codes = 2 * 56 * (128 + 4)
    plain, found = footprint(model, JOB, PLAIN), footprint(model, JOB, how)
    assert found.kv_device == 2 * 544 * 48 * KV and found.kv_cpu == 4 * 544 * 48 * codes
    assert found.workspace - plain.workspace == 2048 * (KV + 2 * codes)
    rises = footprint(model, JOB, replace(how, attention=CpuAttention.GPU))
    assert rises.kv_slots == 4 * 544 * (2 * codes + KV)  # two places, and a piece made whole


@given(
    st.integers(1, 40), st.integers(1, 16), st.integers(32, 128), st.integers(1, 9), st.booleans()
)
def test_keys_and_values_come_up_through_the_places_that_are_made(
    sequences: int, heads: int, width: int, length: int, int8: bool
) -> None:
    job = Job(40_000 * length, 1)  # a sequence, or one head of it, may be more than a piece
    how = replace(PLAIN, cpu_sequences=sequences, attention=CpuAttention.GPU)
    engine = replace(OPT_30B.engine, int8_kv=int8)
    model = replace(OPT_30B, engine=engine, kv_heads=heads, kv_width=2 * heads * width)
    made = places_bytes(sequences, [(heads, width)], job.length, torch.float16, int8)
    tensors = 2 * 4 + 2 if int8 else 2 * 2
    found = footprint(model, job, how).kv_slots
    head = model.kv_cpu_head_bytes(how.precision, job.length)
    rows, some = largest_piece(sequences, heads, head)
    even = found * rows * some // piece_limit(sequences, heads, head)
    assert even <= made < even + tensors * ALIGNMENT
    fewer = replace(how, cpu_sequences=sequences - 1)  # searches rely on that it rises
    assert footprint(model, job, fewer).kv_slots <= found


def test_passes_micro_batches_and_quantised_weights() -> None:
    found = footprint(OPT_30B, JOB, replace(PLAIN, prefill_passes=4, nvme=0, cpu=40))
    assert found.hidden == 2 * 500 * HIDDEN * 2 and found.ring == 0
    rows = footprint(OPT_30B, JOB, replace(PLAIN, prefill_rows=256)).workspace
    assert rows == 256 * 20 * HIDDEN * 2 + 6 * VOCABULARY * 6
    short = Job(1, 1)  # where decoding has the most rows
    two = footprint(OPT_30B, short, replace(PLAIN, decode_micro_batches=2)).workspace
    assert two == 6 * 20 * HIDDEN * 2 + 6 * VOCABULARY * 6
    four = footprint(OPT_30B, JOB, replace(PLAIN, weights="int4"))
    wide = 4 * HIDDEN**2 * 2  # the largest weight in 16 bits
    assert four.workspace == footprint(OPT_30B, JOB, PLAIN).workspace + wide
    fused = replace(OPT_30B, engine=FUSED)  # a whole layer
    four_fused = footprint(fused, JOB, replace(PLAIN, weights="int4"))
    assert four_fused.workspace == footprint(fused, JOB, PLAIN).workspace + 3 * wide
    assert four.cpu_layers / 30 == pytest.approx(12 * HIDDEN**2 * 4.25 / 8, rel=1e-3)


def test_fits_looks_at_both() -> None:
    found = footprint(OPT_30B, JOB, PLAIN)
    assert found.fits(Budget(found.device, found.cpu))
    assert not found.fits(Budget(found.device - 1, found.cpu))
    assert not found.fits(Budget(found.device, found.cpu - 1))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(0, 3000), st.integers(0, 9)
)
def test_the_largest_number(steps: list[int], limit: int, low: int) -> None:
    sums = [sum(steps[:i]) for i in range(len(steps) + 1)]
    low = min(low, len(steps))
    if sums[low] <= limit:
        found = largest(sums.__getitem__, limit, low, len(steps))
        assert found == max(i for i in range(low, len(sums)) if sums[i] <= limit)


@pytest.mark.parametrize("disk", [1.7e9, None])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_the_least_is_that_of_every_split(disk: float | None, batch: int) -> None:
    """Against all numbers of sequences in CPU memory, one by one."""
    hardware, job = replace(H200, disk=disk), Job(512, 32, batch)
    model = replace(LLAMA_2_70B, layers=LLAMA_2_70B.layers[:9])
    budget = Budget(8 * GIB, 16 * GIB)
    device = least_device(model, hardware, job, ("fp16",), budget.cpu)
    cpu = least_cpu(model, hardware, job, ("fp16",), budget.device)
    assert device is not None and cpu is not None
    for resident in range(10):
        streamed = 9 - resident
        for way in CpuAttention:
            for there in range(1, batch + 1) if way is not CpuAttention.NONE else [0]:
                how = Setting(
                    "fp16", resident, streamed if disk is None else 0, streamed if disk else 0,
                    min(1, max(0, streamed - 1)), batch - there, there, way, 256, batch, 1,
                )  # fmt: skip
                need = footprint(model, job, how)
                assert need.cpu > budget.cpu or need.device >= device[0]
                assert need.device > budget.device or need.cpu >= cpu[0]
