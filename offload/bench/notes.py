"""What is said below the table of a throughput measurement: bounds, shares, predictions."""

from __future__ import annotations

import torch

from offload.bench.result import Result, Row
from offload.bench.setup import Setup
from offload.bench.workload import FIRST_STEPS, Timing
from offload.measure.compute import hbm_rates, product_rate
from offload.models.fused.host_rows import CpuWork
from offload.models.kv.streamed_kv import StreamedWork
from offload.scheduler.cost import Rates
from offload.scheduler.plan import Plan, Tier
from offload.scheduler.planner import Planned
from offload.sizes import format_size


def device_bounds(result: Result, device: torch.device) -> list[str]:
    """What each prefill is of the layers' own products, and each resident step of HBM's rate."""
    work, sizes = result.work, result.sizes
    notes = []
    if sizes.products and sizes.active_parameters == sizes.layer_parameters:
        dtype = getattr(torch, result.dtype)
        rate = product_rate(sizes.products, work.batch * work.prompt, dtype, device)
        notes.append(
            f"the products of a layer alone, {work.batch * work.prompt} rows, over 5 s: "
            f"{rate / 1e12:.0f} TFLOP/s; prefills reach "
            + ", ".join(f"{row.prefill_flops / rate:.3f} ({row.peer})" for row in result.rows)
        )
    still = [row for row in result.rows if not row.streamed_bytes and row.step_seconds]
    if still:
        hbm, _ = hbm_rates(device, 2 << 30)
        notes.append(
            f"HBM reads {hbm / 1e12:.2f} TB/s; the weights that a step reads (layers, norms, head; "
            f"of embeddings a row: {sizes.step_bytes / 1e9:.3f} GB) over a step's time: "
            + ", ".join(
                f"{sizes.step_bytes / (row.step_seconds or 1) / hbm:.3f} ({row.peer})"
                for row in still
            )
        )
        notes.append(
            f"steps are medians without the first {FIRST_STEPS} of a generation, in which calls "
            "are made and graphs captured; means with them: "
            + ", ".join(
                f"{(row.mean_step_seconds or 0) * 1e3:.3f} ms ({row.peer})" for row in still
            )
        )
    return notes


def beside_one_batch(result: Result, timings: dict[str, Timing], name: str) -> list[str]:
    """What micro-batches cost and save."""
    whole, parts = (next(r for r in result.rows if r.peer == n) for n in ("offload", name))
    one = f"one batch of {result.work.batch}"
    shares = [f"prefill in {parts.prefill_seconds / whole.prefill_seconds:.3f} of the time"]
    if parts.decode_tokens and whole.decode_tokens:
        shares.append(f"decode at {parts.decode_tokens / whole.decode_tokens:.3f} of the rate")
    shares.append(f"all tokens at {parts.total_tokens / whole.total_tokens:.3f} of the rate")
    a, b = parts.activation_bytes or 0, whole.activation_bytes or 1
    return [
        f"{name} beside {one}: {', '.join(shares)}",
        f"{name} beside {one}: {timings[name].compared_with(timings['offload'], 'it')}",
        f"activations of a prefill at most: {format_size(a)}, {a / b:.3f} of the "
        f"{format_size(b)} of {one}",
    ]


def plan_notes(row: Row, planned: Planned | None) -> list[str]:
    """What was predicted, beside what was achieved."""
    if planned is None:
        return []
    found = planned.choice
    pairs = [("prefill", found.prefill_seconds, row.prefill_seconds)]
    if row.step_seconds:
        pairs.append(("a decode step", found.decode.seconds, row.step_seconds))
    return [
        "predicted: "
        + ", ".join(
            f"{name} {predicted:.4g} s ({predicted / achieved - 1:+.1%} of what it took)"
            for name, predicted, achieved in pairs
        )
        + f"; limit: {found.limit}"
    ]


def cpu_notes(row: Row, work: CpuWork | None) -> list[str]:
    """What of a step CPU cores did, where they did anything."""
    step = None if work is None else work.typical
    if step is None or not row.step_seconds:
        return []
    around = row.step_seconds - step.attention - step.waiting
    return [
        str(work),
        f"of a decode step of {row.step_seconds * 1e3:.1f} ms, cores attended for "
        f"{step.attention / row.step_seconds:.1%}, were idle between layers for "
        f"{step.waiting / row.step_seconds:.1%}, and ahead of the first and behind the last for "
        f"{around / row.step_seconds:.1%}",
    ]


def streamed_notes(row: Row, work: StreamedWork | None, rates: Rates) -> list[str]:
    """What of keys and values came up in a step, and what the link takes for all that does."""
    nbytes = None if work is None else work.typical_bytes
    if nbytes is None or not row.step_seconds or not rates.link:
        return []
    link = (nbytes + row.streamed_bytes) / rates.link
    return [
        str(work),
        f"with the weights that move {format_size(nbytes + row.streamed_bytes)} come up in a step, "
        f"{link * 1e3:.1f} ms at the link's {rates.link / 1e9:.1f} GB/s: "
        f"{link / row.step_seconds:.1%} of a decode step of {row.step_seconds * 1e3:.1f} ms",
    ]


def kept_notes(plan: Plan, setup: Setup) -> list[str]:
    """What is in CPU memory, and how."""
    notes = []
    if plan.kv_cpu_bytes:  # where the CPU computes, only weights are planned for
        notes.append(
            f"CPU memory: {format_size(plan.weight_bytes(Tier.CPU))} of weights, "
            f"{format_size(plan.kv_cpu_bytes)} kept for keys and values"
        )
    if setup.kv_dtype != "auto":
        kept = setup.kv_dtype
        notes.append(f"keys and values in CPU memory: {kept}, with a scale a token and head")
    return notes
