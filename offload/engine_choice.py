"""Which engine runs a model: the fused one, or transformers' own modules; and why."""

from __future__ import annotations

from transformers import PreTrainedModel

from offload import kernels
from offload.config import OffloadConfig
from offload.errors import UnsupportedError
from offload.models.specs.describe import describe
from offload.models.specs.spec import CannotExpress, ModelSpec


def choose_engine(network: PreTrainedModel, config: OffloadConfig) -> tuple[ModelSpec | None, str]:
    """What the fused engine is to run, or None for the model's own modules; and why.

    Raises UnsupportedError where what was asked for takes the fused engine.
    """
    spec, why = _engine_for(network, config)
    asked = {"kv_on_cpu": config.kv_on_cpu, "kv_dtype": config.kv_dtype if config.int8_kv else ""}
    for name, value in asked.items():
        if value and spec is None:
            raise UnsupportedError(
                f"{name}={value!r} takes the fused engine, and this model runs on {why}: leave it "
                "out, or pass engine='fused', which runs or says what stands against it"
            )
    return spec, why


def _engine_for(network: PreTrainedModel, config: OffloadConfig) -> tuple[ModelSpec | None, str]:
    if config.engine == "transformers":
        return None, "the model's own modules"
    asked, compute = config.engine == "fused", config.compute
    if compute.type == "cpu" and not asked:
        return None, "the model's own modules, as always where the CPU computes"
    if compute.type != "cpu":
        problem = kernels.why_not(compute.index)
        if problem is not None and asked:
            raise UnsupportedError(f"engine='fused' on {compute}: {problem}")
        if problem is not None:
            return None, f"the model's own modules: {problem}"
    try:
        spec = describe(network)
    except CannotExpress as error:
        if asked:
            raise UnsupportedError(
                f"engine='fused' cannot run {type(network).__name__}: no block expresses {error}; "
                "engine='auto' runs the model's own modules then"
            ) from error
        return None, f"the model's own modules: no fused block expresses {error}"
    if compute.type == "cpu":
        return spec, "asked for; on a CPU every kernel is its reference"
    return spec, f"the family {spec.family} on fused kernels"
