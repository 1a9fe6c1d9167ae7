"""Models and machines that planning is tested with: sizes from their papers, rates as they say."""

from __future__ import annotations

from dataclasses import replace

from offload.scheduler.hardware import Curve, Hardware, Machine
from offload.scheduler.model_profile import LayerProfile, ModelProfile

GB, GIB = 10**9, 1 << 30


def opt(name: str, layers: int, hidden: int, vocabulary: int = 50272) -> ModelProfile:
    """A decoder as OPT or BLOOM: every head has keys and values of its own."""
    matrices, others = 12 * hidden * hidden, 13 * hidden
    layer = LayerProfile(matrices, others, matrices + others, 4 * hidden * hidden, 16)
    return ModelProfile(
        name=name,
        layers=(layer,) * layers,
        native="fp16",
        outside_bytes=2 * hidden * (vocabulary + 2050),
        hidden=hidden,
        intermediate=4 * hidden,
        query_width=hidden,
        kv_width=2 * hidden,
        kv_heads=hidden // 128,
        group=1,
        vocabulary=vocabulary,
    )


def llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int
) -> ModelProfile:
    """A decoder as LLaMA."""
    kv = kv_heads * hidden // heads
    matrices = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
    layer = LayerProfile(matrices, 2 * hidden, matrices + 2 * hidden, hidden * intermediate, 9)
    return ModelProfile(
        name=name,
        layers=(layer,) * layers,
        native="fp16",
        outside_bytes=4 * hidden * 32000,
        hidden=hidden,
        intermediate=intermediate,
        query_width=hidden,
        kv_width=2 * kv,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        vocabulary=32000,
    )


def sized(model: ModelProfile, nbytes: float) -> ModelProfile:
    """`model` with as many weights as take `nbytes` in 16 bits: what a paper says of its size."""
    count = round(nbytes / 2 / len(model.layers))
    layer = replace(model.layers[0], matrices=count, others=0, active=count)
    return replace(model, layers=(layer,) * len(model.layers))


OPT_13B = opt("opt-13b", 40, 5120)
OPT_30B = opt("opt-30b", 48, 7168)
OPT_66B = opt("opt-66b", 64, 9216)
OPT_175B = opt("opt-175b", 96, 12288)
BLOOM_176B = opt("bloom-176b", 70, 14336, 250880)
LLAMA_2_70B = llama("llama-2-70b", 80, 8192, 64, 8, 28672)
TINY = llama("tiny", 6, 64, 4, 2, 128)


def machine(gpu: str, gpu_memory: int, host_memory: int) -> Machine:
    return Machine(
        gpu=gpu,
        gpu_memory=gpu_memory,
        gpus=1,
        driver=None,
        cpu="of the paper",
        cores=16,
        host_memory=host_memory,
        disk="of the paper",
    )


def flat(rate: float) -> dict[str, Curve]:
    """A matrix rate that is the same for every number of rows."""
    return {"float16": ((1, rate),), "float32": ((1, rate),)}


# The rates that the figures give; what a paper leaves out is the vendor's.
V100 = Hardware(
    machine=machine("V100", 32 * GIB, 1500 * GIB),
    link_up=10.05e9,
    link_down=10.05e9,
    disk=6.9e9,
    hbm=800e9,
    matrix=flat(90e12),
)
A6000 = Hardware(
    machine=machine("A6000", 48 * GIB, 252 * GB),
    link_up=21.5e9,  # one rate that all its rows with 4-bit weights fit
    link_down=21.5e9,
    disk=5.6e9,
    hbm=700e9,
    matrix=flat(84e12),  # the paper's headline
    # What all rows of that program's attention on the CPU fit: it copies keys and values for every
    # query head.
    cpu_attention={"float16": ((1, 16.5e9), (8, 5.3e9 / 8))},
)
H200 = Hardware(
    machine=machine("H200", 141 * GB, 128 * GIB),
    link_up=55e9,
    link_down=55e9,
    link_up_both=48e9,
    link_down_both=48e9,
    disk=1.7e9,
    hbm=4.39e12,
    matrix={"bfloat16": ((1, 3.7e12), (32, 118e12), (256, 500e12), (2048, 640e12), (8192, 670e12))},
    cpu_attention={"float16": ((1, 79e9), (8, 79e9))},
    host_read=79e9,
    host_read_beside=70e9,
    link_beside=53e9,
    launch=3e-6,
)
