"""The time of one pass, resource by resource, against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from profiles import H200, LLAMA_2_70B, OPT_30B

from offload.scheduler.engine import (
    EVERYTHING,
    FUSED,
    OWN_SHARE,
    STORED_SHARE,
    TRANSFORMERS,
    CpuAttention,
    Engine,
)
from offload.scheduler.footprint import weights_of
from offload.scheduler.model_profile import LayerProfile, Precision
from offload.scheduler.pass_time import CHAIN, decode_pass, prefill_pass
from offload.scheduler.setting import Job, Setting

JOB = Job(512, 32, 100)
PLAIN = Setting("fp16", 8, 40, 0, 2, 100, 0, CpuAttention.NONE, 2048, 1, 1)
LAYER = 2 * (12 * 7168**2 + 13 * 7168)
KV = 2 * 7168 * 2 * 48  # bytes of one token
LENGTH = 528  # tokens: the mean while decoding


def test_decode_with_everything_on_the_gpu() -> None:
    how = replace(PLAIN, resident=48, cpu=0, depth=0)
    found = decode_pass(OPT_30B, H200, JOB, how)
    head = 50272 * 7168 * 2
    assert "link up" not in found.busy and "CPU attention" not in found.busy
    read = (48 * LAYER + 100 * LENGTH * KV + head) / 4.39e12
    assert found.busy["HBM"] == pytest.approx(read)
    assert read <= found.seconds <= 1.4 * read  # products of 100 rows take longer than their read


def test_many_rows_meet_quantised_weights_that_were_made_wide() -> None:
    wide = 12 * 7168**2 + 13 * 7168  # parameters of a layer
    how = replace(PLAIN, resident=48, cpu=0, depth=0, weights="int4")

    def hbm(engine: Engine, rows: int, parts: int = 1) -> float:
        setting = replace(how, gpu_sequences=rows, decode_micro_batches=parts)
        return decode_pass(replace(OPT_30B, engine=engine), H200, JOB, setting).busy["HBM"]

    made = 48 * 2 * 2 * wide / 4.39e12  # written and read
    # Codes are unpacked three times for 24 rows, and a fourth time takes longer than that.
    assert hbm(FUSED, 24) == pytest.approx(hbm(EVERYTHING, 24))
    for rows in (25, 64, 65):
        assert hbm(FUSED, rows) - hbm(EVERYTHING, rows) == pytest.approx(made)
    assert hbm(FUSED, 48, 2) == pytest.approx(hbm(EVERYTHING, 48, 2))
    assert hbm(TRANSFORMERS, 1) - hbm(EVERYTHING, 1) == pytest.approx(made)
    plain = decode_pass(replace(OPT_30B, engine=TRANSFORMERS), H200, JOB, PLAIN).busy["HBM"]
    assert plain == pytest.approx(decode_pass(OPT_30B, H200, JOB, PLAIN).busy["HBM"])


@pytest.mark.parametrize(("weights", "share"), [("fp16", OWN_SHARE), ("int4", STORED_SHARE)])
def test_own_kernels_read_a_share_of_what_the_memory_gives(weights: str, share: float) -> None:
    model = replace(OPT_30B, engine=FUSED)
    one = replace(
        PLAIN, resident=48, cpu=0, depth=0, weights=weights, gpu_sequences=1, prefill_rows=512
    )
    slow = replace(H200, matrix={"bfloat16": ((1, 1e12), (2048, 640e12))}, launch=None)
    sizes = weights_of(model, one.precision).sizes
    rest = 50272 * 7168 * 2 + LENGTH * KV  # head, keys and values
    found = decode_pass(model, slow, JOB, one)
    assert found.seconds == pytest.approx((sum(sizes) / share + rest) / 4.39e12)
    many = replace(one, gpu_sequences=17)  # the library's, as measured
    if weights == "fp16":
        products = sum(sizes) * 17 / slow.matrix_rate("float16", 17)
        rest = 50272 * 7168 * 2 + 17 * LENGTH * KV
        found = decode_pass(model, slow, JOB, many)
        assert found.seconds == pytest.approx(products + rest / 4.39e12)


def test_a_short_prompt_takes_what_the_host_needs_to_issue_it() -> None:
    how = replace(PLAIN, resident=48, cpu=0, depth=0, gpu_sequences=1, prefill_rows=64)
    model, job = replace(OPT_30B, engine=FUSED), Job(64, 32, 1)
    host = 48 * 180 * 3e-6
    assert prefill_pass(model, H200, job, how).busy["kernel launches"] == pytest.approx(host)
    halves = replace(how, prefill_rows=32)
    assert prefill_pass(model, H200, job, halves).seconds >= 2 * host


def test_decode_bound_by_the_link_and_by_the_disk() -> None:
    found = decode_pass(OPT_30B, H200, JOB, PLAIN)
    assert found.seconds == pytest.approx(40 * LAYER / 55e9, rel=0.02)
    assert found.limit == "link up"
    files = decode_pass(OPT_30B, H200, JOB, replace(PLAIN, cpu=0, nvme=40))
    assert files.seconds == pytest.approx(40 * LAYER / 1.7e9, rel=0.02)
    assert (files.limit, files.busy["link up"]) == ("disk", pytest.approx(40 * LAYER / 55e9))


def test_the_cpu_and_the_stream_slow_each_other_while_both_work() -> None:
    how = replace(PLAIN, gpu_sequences=0, cpu_sequences=100, attention=CpuAttention.CPU)
    found = decode_pass(OPT_30B, H200, JOB, how)
    exchange = 100 * 48 * (7168 + 2 * 7168) * 2 / 55e9 * 2
    link, attended = 40 * LAYER, 100 * LENGTH * KV
    # The stream ends first, and all of it went beside attention.
    assert found.busy["link up"] == pytest.approx(link / 53e9)
    alone = (attended - link / 53e9 * 70e9) / 79e9
    assert found.busy["CPU attention"] == pytest.approx(link / 53e9 + alone + exchange)
    few = replace(how, gpu_sequences=80, cpu_sequences=20)
    found = decode_pass(OPT_30B, H200, JOB, few)
    attention = 20 * LENGTH * KV / 70e9
    assert found.busy["CPU attention"] == pytest.approx(attention + exchange / 5)
    assert found.busy["link up"] == pytest.approx(attention + (link - attention * 53e9) / 55e9)


def test_two_micro_batches_let_the_gpu_work_beside_the_cpu() -> None:
    slow = replace(H200, hbm=400e9)  # such that both matter
    how = replace(
        PLAIN, resident=48, cpu=0, depth=0, gpu_sequences=50, cpu_sequences=50,
        attention=CpuAttention.CPU,
    )  # fmt: skip
    one = decode_pass(OPT_30B, slow, JOB, how)
    two = decode_pass(OPT_30B, slow, JOB, replace(how, decode_micro_batches=2))
    assert one.limit == CHAIN
    assert two.seconds == pytest.approx(max(two.busy["CPU attention"], two.busy["HBM"]), rel=0.05)
    assert two.busy["HBM"] > 1.5 * one.busy["HBM"] - 50 * LENGTH * KV / 400e9


def test_keys_and_values_that_come_up_the_link() -> None:
    how = replace(PLAIN, gpu_sequences=60, cpu_sequences=40, attention=CpuAttention.GPU)
    found = decode_pass(OPT_30B, H200, JOB, how)
    assert found.busy["link up"] == pytest.approx((40 * LAYER + 40 * LENGTH * KV) / 55e9)
    assert found.seconds == pytest.approx(found.busy["link up"], rel=0.02)


def test_a_resident_layer_waits_for_its_keys_and_values_alone() -> None:
    """Where the GPU computes long, only the loads of the layers that are in its way show."""
    how = replace(
        PLAIN, resident=47, cpu=1, gpu_sequences=0, cpu_sequences=100, attention=CpuAttention.GPU,
    )  # fmt: skip
    found = decode_pass(OPT_30B, H200, JOB, how)
    kv = 100 * LENGTH * KV / 48
    assert found.busy["link up"] == pytest.approx((LAYER + 48 * kv) / 55e9)
    assert found.seconds == pytest.approx(found.busy["link up"], rel=0.02)
    alone = decode_pass(OPT_30B, H200, JOB, replace(how, resident=48, cpu=0))
    assert alone.seconds == pytest.approx(48 * kv / 55e9, rel=0.02)
    prefill = prefill_pass(OPT_30B, H200, JOB, how)
    slow = prefill_pass(OPT_30B, replace(H200, link_up=1e9, link_up_both=1e9), JOB, how)
    assert slow.busy["link up"] == pytest.approx(LAYER / 1e9)
    assert slow.seconds == pytest.approx(prefill.seconds, rel=0.05)


def test_prefill_is_bound_by_products_and_writes_keys_and_values_down() -> None:
    how = replace(PLAIN, gpu_sequences=25, cpu_sequences=75, attention=CpuAttention.CPU)
    found = prefill_pass(OPT_30B, H200, JOB, how)
    tokens = 100 * 512
    flop = 48 * tokens * (LAYER + 2 * 7168 * 512)
    assert found.busy["matrix units"] == pytest.approx(flop / 640e12)
    assert found.limit == "matrix units"
    down = 75 * 512 * KV
    # Both ways at once until the longer of the two is alone.
    up = 40 * LAYER / 48e9
    assert found.busy["link up"] == pytest.approx(up if up * 48e9 < down else down / 48e9, rel=0.2)
    assert down / 55e9 <= found.busy["link down"] <= down / 48e9
    parts = prefill_pass(OPT_30B, H200, JOB, replace(how, prefill_passes=4))
    assert 4 * parts.busy["matrix units"] == pytest.approx(found.busy["matrix units"])
    assert parts.seconds > found.seconds / 4


def test_few_tokens_meet_few_experts() -> None:
    sparse = LayerProfile(8 << 27, 0, 2 << 27, 1 << 27, 30)
    model = replace(LLAMA_2_70B, layers=(sparse,) * 4)
    how = replace(PLAIN, resident=4, cpu=0, depth=0)
    nbytes = 2 * (8 << 27)
    head = 32000 * 8192 * 2

    def weights_read(batch: int) -> float:
        found = decode_pass(model, H200, Job(1, 2, batch), replace(how, gpu_sequences=batch))
        kv = batch * 2 * LLAMA_2_70B.kv_width * 2 * 4
        return found.busy["HBM"] * 4.39e12 - head - kv

    assert weights_read(1) == pytest.approx(4 * nbytes / 4)
    assert weights_read(3) == pytest.approx(4 * nbytes * 3 / 4)
    assert weights_read(50) == pytest.approx(4 * nbytes)


def test_launches_bound_small_layers() -> None:
    tiny = LayerProfile(1000, 0, 1000, 100, 9)
    model = replace(OPT_30B, layers=(tiny,) * 48, hidden=8, query_width=8, kv_width=16)
    how = replace(PLAIN, resident=48, cpu=0, depth=0, gpu_sequences=1)
    found = decode_pass(model, H200, Job(1, 2, 1), how)
    assert found.limit == "kernel launches"
    assert found.seconds == pytest.approx(48 * 12 * 3e-6, rel=0.01)


@pytest.mark.parametrize(
    ("precision", "nbytes"),
    [(Precision("a", 16), 2000), (Precision("b", 8, 64), 1032), (Precision("c", 4, 64), 532)],
)
def test_bytes_of_weights(precision: Precision, nbytes: int) -> None:
    """One scale of two bytes for 64 weights: 16 of them for 1000."""
    assert precision.weight_bytes(1000) == nbytes
