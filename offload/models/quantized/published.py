"""config.json's quantization_config as the compressed-tensors package publishes it."""

from __future__ import annotations

import re
from typing import Any

from offload.kernels.weight_format import WeightFormat
from offload.models.quantized.choose import Choice

METHOD = "compressed-tensors"
MIXED = "mixed-precision"
_FORMATS = {
    ("packed", "int4"): "pack-quantized",
    ("packed", "int8"): "pack-quantized",
    ("plain", "int8"): "int-quantized",
    ("plain", "fp8"): "float-quantized",
    ("mxfp4", "mxfp4"): "mxfp4-pack-quantized",
}

# Activations in int8 with a scale a row, found when it is there.
INT8_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": True,
    "strategy": "token",
    "group_size": None,
}


def describe_choice(choice: Choice) -> dict[str, Any]:
    """The entry for a folder that holds `choice`.

    The format that most modules have is a group that targets the class; other formats, and modules
    of other classes, are named one by one, as are Linears that stay as they are.
    """
    named: dict[WeightFormat, list[str]] = {}
    for weight in choice.weights:
        if weight.wanted is not None:
            # Of embeddings that are the head's, too, both.
            called = dict.fromkeys((weight.module, *choice.linear.get(weight.name, ())))
            named.setdefault(weight.wanted.form, []).extend(called)
    linear = {name for names in choice.linear.values() for name in names}
    main = max(named, key=lambda form: len(named[form]))
    groups = {}
    for i, (form, names) in enumerate(named.items()):
        others = [n for n in names if n not in linear and not _is_expert(n)]
        targets = ["Linear", *others] if form == main else names
        groups[f"group_{i}"] = {
            "targets": targets,
            "weights": _arguments(form),
            "input_activations": dict(INT8_INPUTS) if form.inputs else None,
            "output_activations": None,
            "format": _FORMATS[form.layout, form.kind],
        }
    formats = {group["format"] for group in groups.values()}
    quantised = {w.name for w in choice.weights if w.wanted is not None}
    plain = [n for name, names in choice.linear.items() if name not in quantised for n in names]
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _is_expert(name: str) -> bool:
    """Of a merged parameter: in the checkpoint a Linear, which the class covers."""
    return re.search(r"\.experts\.\d+\.", name) is not None


def _arguments(form: WeightFormat) -> dict[str, Any]:
    rows, columns = form.block
    found: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "int" if form.kind in ("int4", "int8") else "float",
        "symmetric": not form.zero_points,
        "dynamic": False,
        "strategy": "group",
        "group_size": None,
    }
    if form.block == (0, 0):
        found["strategy"] = "tensor"
    elif form.block == (1, 0):
        found["strategy"] = "channel"
    elif rows == 1:
        found["group_size"] = columns
    else:
        found |= {"strategy": "block", "block_structure": [rows, columns]}
    if form.kind == "mxfp4":
        found["scale_dtype"] = "torch.uint8"
    return found
