"""What a pass over prompts asks of a machine."""

from __future__ import annotations

from offload.scheduler.footprint import weights_of
from offload.scheduler.hardware import Hardware
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.setting import Job, Setting
from offload.scheduler.work import Work, both_ways


def prefill_work(model: ModelProfile, hardware: Hardware, job: Job, setting: Setting) -> Work:
    """The prompts of `setting.prefill_batch` sequences. Raises HardwareError for a rate that is
    needed and not known.
    """
    weights, precision = weights_of(model, setting.precision), setting.precision
    engine, count = model.engine, len(model.layers)
    itemsize = model.itemsize(precision)
    tokens = setting.prefill_batch * job.prompt
    parts = -(-tokens // setting.prefill_rows)
    hbm_rate = hardware.needed("hbm")
    matrix_rate = hardware.matrix_rate(model.dtype(precision), min(tokens, setting.prefill_rows))
    # Of a causal prompt every token meets half on average, in two products.
    attended = 2 * model.query_width * job.prompt * tokens
    attention = attended / (hardware.prompt_attention_rate(job.prompt) or matrix_rate)
    # Where scores are written each token has some for half of its prompt, too.
    scores = model.score_heads * tokens * job.prompt / 2 * engine.score_bytes
    # What stands between the products is read and written once.
    elements = engine.moved_elements(model.hidden, model.intermediate)
    between = (tokens * elements * itemsize + scores) / hbm_rate
    launch, issued = hardware.launch or 0.0, hardware.prompt_layer or 0.0
    issue = (launch * engine.prompt_kernels + issued * engine.prompt_layers) * parts

    moved, read = weights.moved(setting)
    share = setting.cpu_sequences / setting.batch
    down = share * tokens * model.kv_cpu_bytes(precision) * count
    link, link_down = both_ways(hardware, moved, down)
    layers, compute, hbm, matrix = [], 0.0, 0.0, 0.0
    for layer, size, number in weights.kinds:
        products = 2 * layer.active * tokens / matrix_rate + attention
        wide = layer.active * itemsize
        if precision.quantised:  # made wide once a layer, which each part then reads
            made = (size + wide) / (hardware.hbm_copy or hbm_rate)
            touched = (size + (1 + parts) * wide) / hbm_rate
            busy = products + made
        else:
            touched = parts * size / hbm_rate
            busy = max(products, touched)
        layers.append(max(busy + between, issue))
        compute += number * layers[-1]
        hbm += number * (touched + between)
        matrix += number * products
    head = model.vocabulary * model.hidden * itemsize / hbm_rate
    before = issued * engine.start_layers
    return Work(
        layers=tuple((x, x) for x in layers),
        compute=before + compute + head,
        before=before,
        after=head,
        link=link,
        rising=0.0,
        disk=read / hardware.needed("disk") if read else 0.0,
        down=link_down,
        hbm=hbm + head,
        matrix=matrix,
        launch=issue * count,
        cpu=0.0,
    )
