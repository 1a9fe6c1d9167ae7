"""The time of one pass, resource by resource, against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from profiles import H200, LLAMA_2_70B, OPT_30B

from offload.kernels import gemm, quant_gemm
from offload.models.fused import block, prefill_attention
from offload.models.kv import host_columns
from offload.scheduler import model_profile
from offload.scheduler.decode_work import OWN_ROWS, decode_work
from offload.scheduler.engine import (
    EVERYTHING,
    FUSED,
    TRANSFORMERS,
    CpuAttention,
    Engine,
)
from offload.scheduler.footprint import footprint, weights_of
from offload.scheduler.model_profile import LayerProfile, Precision
from offload.scheduler.pass_time import CHAIN, decode_pass, prefill_pass
from offload.scheduler.setting import Job, Setting
from offload.store import layout

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

    def hbm(engine: Engine, rows: int, parts: int = 1, streamed: int = 0) -> float:
        setting = replace(how, gpu_sequences=rows, decode_micro_batches=parts)
        setting = replace(setting, resident=48 - streamed, cpu=streamed)
        return decode_pass(replace(OPT_30B, engine=engine), MEASURED, JOB, setting).busy["HBM"]

    made = 48 * 2 * 2 * wide / 4.39e12  # written and read
    for rows in (1, 64):
        assert hbm(FUSED, rows) == pytest.approx(hbm(EVERYTHING, rows))
        # In a slot they are made wide, however few the rows.
        assert hbm(FUSED, rows, streamed=12) - hbm(FUSED, rows) == pytest.approx(made / 4)
    assert hbm(FUSED, 65) - hbm(EVERYTHING, 65) == pytest.approx(made)
    assert hbm(FUSED, 128, 2) == pytest.approx(hbm(EVERYTHING, 128, 2))
    assert hbm(TRANSFORMERS, 1) - hbm(EVERYTHING, 1) == pytest.approx(made)
    plain = decode_pass(replace(OPT_30B, engine=TRANSFORMERS), H200, JOB, PLAIN).busy["HBM"]
    assert plain == pytest.approx(decode_pass(OPT_30B, H200, JOB, PLAIN).busy["HBM"])


# Of few rows, by how the weights are kept, and of decode attention.
MEASURED = replace(
    H200,
    few_rows={"float16": ((1, 4e12), (16, 3e12)), "int4": ((1, 3.2e12), (64, 1.6e12))},
    gpu_attention=((1, 4e12), (8, 2e12)),
    hbm_copy=4e12,
    launch=None,
)


@pytest.mark.parametrize(("weights", "rate"), [("fp16", 4e12), ("int4", 3.2e12)])
def test_own_kernels_read_weights_at_the_rate_that_was_measured(weights: str, rate: float) -> None:
    model = replace(OPT_30B, engine=FUSED)
    one = replace(
        PLAIN, resident=48, cpu=0, depth=0, weights=weights, gpu_sequences=1, prefill_rows=512
    )
    sizes = weights_of(model, one.precision).sizes
    head = 50272 * 7168 * 2 / 4.39e12
    found = decode_pass(model, MEASURED, JOB, one)
    assert found.seconds == pytest.approx(sum(sizes) / rate + LENGTH * KV / 4e12 + head)
    four = decode_pass(model, MEASURED, JOB, replace(one, gpu_sequences=4))
    between = {"fp16": 4e12 * (3 / 4) ** 0.5, "int4": 3.2e12 * (1 / 2) ** (1 / 3)}[weights]
    assert four.seconds == pytest.approx(sum(sizes) / between + 4 * LENGTH * KV / 4e12 + head)
    # More rows than were measured: as the library's products, of weights that were made wide.
    many = decode_pass(model, MEASURED, JOB, replace(one, gpu_sequences=65))
    wide = 48 * 2 * (12 * 7168**2 + 13 * 7168)
    products = wide * 65 / MEASURED.matrix_rate("float16", 65)
    made = (sum(sizes) + wide) / 4e12 if weights == "int4" else 0.0
    rest = 65 * LENGTH * KV / 4e12 + head
    assert many.seconds == pytest.approx(products + made + rest)


def test_queries_that_share_keys_are_attended_at_their_own_rate() -> None:
    model = replace(LLAMA_2_70B, engine=FUSED)
    how = replace(PLAIN, resident=80, cpu=0, depth=0, gpu_sequences=4)
    one, wide = (
        decode_pass(replace(model, group=group), MEASURED, JOB, how).seconds for group in (1, 8)
    )
    kv = 4 * LENGTH * 2 * 2048 * 80
    assert wide - one == pytest.approx(kv / 2e12 - kv / 4e12)


def test_attention_within_prompts_has_a_rate_of_its_own() -> None:
    how = replace(PLAIN, resident=48, cpu=0, depth=0)
    measured = replace(H200, prompt_attention=((256, 100e12), (1024, 400e12)))
    without = prefill_pass(OPT_30B, H200, JOB, how).seconds
    found = prefill_pass(OPT_30B, measured, JOB, how).seconds
    attended = 48 * 2 * 7168 * 512 * 100 * 512
    as_products = attended / H200.matrix_rate("float16", 2048)
    assert found - without == pytest.approx(attended / 200e12 - as_products)
    assert measured.prompt_attention_rate(8) == 100e12
    assert measured.prompt_attention_rate(9999) == 400e12


def test_a_short_prompt_takes_what_the_host_needs_to_issue_it() -> None:
    how = replace(PLAIN, resident=48, cpu=0, depth=0, gpu_sequences=1, prefill_rows=64)
    model, job = replace(OPT_30B, engine=FUSED), Job(64, 32, 1)
    machine = replace(H200, launch=5e-6, prompt_layer=4e-4)
    host = 48 * FUSED.prompt_layers * 4e-4
    found = prefill_pass(model, machine, job, how)
    assert found.busy["kernel launches"] == pytest.approx(host)
    start = FUSED.start_layers * 4e-4
    assert found.seconds == pytest.approx(host + start, rel=0.05)
    halves = replace(how, prefill_rows=32)
    assert prefill_pass(model, machine, job, halves).seconds >= 2 * host


def test_a_job_begins_with_the_loads_ahead_done() -> None:
    few = replace(PLAIN, gpu_sequences=1, prefill_rows=1)
    model, job = replace(OPT_30B, engine=EVERYTHING), Job(1, 2, 1)
    found = prefill_pass(model, H200, job, few)
    assert found.busy["link up"] == pytest.approx((40 - 3) * LAYER / 55e9)
    assert found.seconds == pytest.approx(found.busy["link up"], rel=0.03)
    assert decode_pass(model, H200, job, few).seconds == pytest.approx(40 * LAYER / 55e9, rel=0.03)
    again = replace(few, gpu_sequences=2, prefill_passes=2)  # they follow one another
    assert prefill_pass(model, H200, job, again).seconds == pytest.approx(
        40 * LAYER / 55e9, rel=0.03
    )


def test_quantised_weights_are_made_wide_once_for_all_parts_of_a_prompt() -> None:
    how = replace(PLAIN, resident=48, cpu=0, depth=0, weights="int4", prefill_rows=8192)
    whole = prefill_pass(OPT_30B, H200, JOB, how)
    parts = prefill_pass(OPT_30B, H200, JOB, replace(how, prefill_rows=4096))
    slower = H200.matrix_rate("float16", 8192) / H200.matrix_rate("float16", 4096)
    assert parts.seconds == pytest.approx(whole.seconds * slower, rel=0.01)


def test_what_stands_behind_attention_is_made_whole_while_cores_attend() -> None:
    model = replace(OPT_30B, engine=FUSED)
    machine = replace(H200, hbm_copy=4e12, launch=None, kernel=None, exchange=None)
    how = replace(
        PLAIN, weights="int4", gpu_sequences=0, cpu_sequences=400, attention=CpuAttention.CPU
    )
    work = decode_work(model, machine, JOB, how)
    without = decode_work(model, machine, JOB, replace(how, cpu_sequences=0, gpu_sequences=400))
    seen = 400 * LENGTH * KV / machine.gpu_attention_rate(1)  # by the compute device, there
    layer, size = OPT_30B.layers[0], weights_of(model, how.precision).sizes[0]
    wide = 2 * layer.active
    behind = 1 - 3 * 7168 * 7168 / layer.active
    made = behind * (size + wide) / 4e12
    assert work.compute == pytest.approx(without.compute - seen + work.cpu - 48 * made)


def test_a_layers_way_to_cpu_cores_and_back() -> None:
    how = replace(PLAIN, gpu_sequences=0, cpu_sequences=100, attention=CpuAttention.CPU)
    found, slow = (
        decode_pass(OPT_30B, replace(H200, exchange=seconds), JOB, how) for seconds in (1e-9, 1e-3)
    )
    assert slow.busy["CPU attention"] - found.busy["CPU attention"] == pytest.approx(
        48e-3, rel=1e-4
    )
    assert slow.seconds - found.seconds == pytest.approx(48e-3, rel=0.05)


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


def test_calls_that_wait_for_cpu_cores_are_issued_one_by_one() -> None:
    """Else a run of resident layers is one launch, and the host is ahead."""
    model = replace(OPT_30B, engine=FUSED)
    machine = replace(H200, launch=5e-6, launch_after_cores=1e-3)
    how = replace(PLAIN, resident=24, cpu=24, depth=1, gpu_sequences=8)
    alone = decode_pass(model, machine, JOB, how)
    streamed = 24 * (FUSED.kernels + FUSED.load_kernels)
    assert alone.busy["kernel launches"] == pytest.approx(streamed * 5e-6)
    there = replace(how, gpu_sequences=0, cpu_sequences=8, attention=CpuAttention.CPU)
    found = decode_pass(model, machine, JOB, there)
    issued = (streamed + 24 * FUSED.kernels) * 1e-3
    assert found.busy["kernel launches"] == pytest.approx(issued)
    # One after the other: the host issues nothing while it waits for attention.
    assert found.seconds == pytest.approx(issued + found.busy["CPU attention"], rel=0.02)


def test_attention_that_was_measured_beside_a_stream_goes_at_that_rate() -> None:
    how = replace(PLAIN, gpu_sequences=80, cpu_sequences=20, attention=CpuAttention.CPU)
    measured = replace(
        H200,
        cpu_attention_beside={"float16": ((1, 60e9), (8, 75e9))},
        link_beside_attention={"float16": ((1, 50e9), (8, 54e9))},
    )
    exchange = 20 * 48 * (7168 + 2 * 7168) * 2 / 55e9 * 2
    found = decode_pass(OPT_30B, measured, JOB, how)
    attention = 20 * LENGTH * KV / 60e9
    assert found.busy["CPU attention"] == pytest.approx(attention + exchange)
    rest = 40 * LAYER - attention * 50e9
    assert found.busy["link up"] == pytest.approx(attention + rest / 55e9)
    assert measured.beside(4, "float16") == pytest.approx((75 / 79, 54 / 55))
    # Beside nothing it has its own rate.
    resident = replace(how, resident=48, cpu=0, depth=0)
    alone = decode_pass(OPT_30B, measured, JOB, resident).busy["CPU attention"]
    assert alone == pytest.approx(20 * LENGTH * KV / 79e9 + exchange)


def test_cores_attend_at_the_rate_of_the_dtype_in_which_keys_and_values_lie() -> None:
    """Alone and beside a stream."""
    rates = {"float16": 40e9, "bfloat16": 80e9, "int8": 60e9}
    machine = replace(
        H200,
        cpu_attention={dtype: ((1, rate),) for dtype, rate in rates.items()},
        cpu_attention_beside={"float16": ((1, 30e9),), "bfloat16": ((1, 40e9),)},
        link_beside_attention={"float16": ((1, 50e9),), "bfloat16": ((1, 40e9),)},
    )
    resident = replace(
        PLAIN, resident=48, cpu=0, depth=0, cpu_sequences=20, attention=CpuAttention.CPU
    )
    streamed = replace(resident, resident=0, cpu=48, depth=1, cpu_sequences=4)
    exchange = 48 * (7168 + 2 * 7168) * 2 / 55e9 * 2
    model = OPT_30B
    for native, int8, alone, beside in (
        ("fp16", False, 40e9, 30e9), ("bf16", False, 80e9, 40e9),
        ("fp16", True, 60e9, 30e9), ("bf16", True, 60e9, 30e9),
    ):  # fmt: skip
        engine = replace(EVERYTHING, int8_kv=int8)
        model = replace(OPT_30B, native=native, engine=engine)
        token = model.kv_cpu_bytes(resident.precision) * 48 * LENGTH
        setting = replace(resident, weights=native)
        found = decode_pass(model, machine, JOB, setting).busy["CPU attention"]
        assert found == pytest.approx(20 * (token / alone + exchange))
        setting = replace(streamed, weights=native)
        found = decode_pass(model, machine, JOB, setting).busy["CPU attention"]
        assert found == pytest.approx(4 * (token / beside + exchange))


def test_small_kernels_stand_between_the_products_of_many_rows() -> None:
    model, slow = replace(OPT_30B, engine=FUSED), replace(H200, kernel=2e-6, launch=None)
    for rows, kernels in ((64, FUSED.small_kernels[0]), (16, FUSED.small_kernels[1])):
        how = replace(PLAIN, resident=48, cpu=0, depth=0, gpu_sequences=rows)
        without = decode_pass(model, replace(slow, kernel=None), JOB, how).seconds
        found = decode_pass(model, slow, JOB, how).seconds
        assert found - without == pytest.approx(48 * kernels * 2e-6)


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


def test_micro_batches_that_take_turns_are_as_quick_as_the_slower_side() -> None:
    """With a layer more in use, and unless the way to cores and back is too long."""
    model = replace(LLAMA_2_70B, engine=FUSED)
    count, slow = len(model.layers), replace(H200, hbm=2e12, exchange=1e-4)
    one = replace(
        PLAIN, weights="int4", resident=0, cpu=count, depth=1, gpu_sequences=80,
        cpu_sequences=300, attention=CpuAttention.CPU,
    )  # fmt: skip
    two = replace(one, depth=2, decode_micro_batches=2)
    job = Job(512, 32)
    serial, turns = (decode_pass(model, slow, job, how) for how in (one, two))
    assert serial.limit == CHAIN and serial.seconds > 1.1 * max(serial.busy.values())
    around = decode_work(model, slow, job, two).after
    assert turns.seconds == pytest.approx(max(turns.busy.values()), abs=around)
    # The rows of one half pass a layer, and go to cores and back, while no core has anything to do.
    half = turns.busy["HBM"] / count / 2
    assert around > 1e-4 + 0.9 * half
    # Each makes the weights whole, and cores are busy with attention alone.
    assert turns.busy["HBM"] > 1.8 * serial.busy["HBM"]
    assert turns.busy["CPU attention"] < serial.busy["CPU attention"]
    # With two slots each load waits until the second has used the layer before.
    narrow = decode_pass(model, slow, job, replace(two, depth=1))
    assert narrow.seconds > turns.seconds + 0.9 * turns.busy["link up"]
    # Half of a layer's work on both sides, and the way between them.
    far = replace(slow, exchange=0.05)
    least = count * (0.05 + turns.busy["CPU attention"] / count / 2)
    assert least < decode_pass(model, far, job, two).seconds < 1.2 * least


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
    assert "link up" not in slow.busy  # the only layer that moves is there when a job begins
    assert slow.seconds == pytest.approx(prefill.seconds)


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


def test_scores_that_are_written_take_time_and_room() -> None:
    """Of ALiBi, for one: each token has scores for half of its prompt."""
    model = replace(OPT_30B, engine=FUSED, score_heads=56.0)
    without = replace(model, score_heads=0.0)
    how = replace(PLAIN, resident=48, cpu=0, depth=0, gpu_sequences=32)
    job = Job(512, 32, 32)
    written = 48 * 56 * 32 * 512 * 256 * FUSED.score_bytes / 4.39e12
    slower = prefill_pass(model, H200, job, how).seconds
    assert slower - prefill_pass(without, H200, job, how).seconds == pytest.approx(written)
    more = footprint(model, job, how).workspace - footprint(without, job, how).workspace
    assert more == 2048 * 512 * 56 * 10  # of the rows at once
    assert decode_pass(model, H200, job, how) == decode_pass(without, H200, job, how)


def test_constants_of_plans_are_those_of_what_they_plan() -> None:
    """The planner imports none of it."""
    assert OWN_ROWS == gemm.MOST_ROWS
    assert FUSED.stored_rows == quant_gemm.MOST_ROWS
    assert model_profile.ALIGNMENT == layout.ALIGNMENT
    assert host_columns.SCALE.itemsize == model_profile.KV_SCALE
    masks = prefill_attention.KEPT_ELEMENTS, prefill_attention.MASK_ELEMENTS
    assert (FUSED.masks, FUSED.scores) == (masks, masks[1])
    assert FUSED.mlp_rows == block.MLP_ROWS
