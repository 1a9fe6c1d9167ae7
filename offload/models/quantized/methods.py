"""Published methods of quantisation: what config.json says -> the format of every weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from offload.errors import UnsupportedError
from offload.kernels.weight_format import MX_GROUP, Layout, WeightFormat


@dataclass(frozen=True)
class Method:
    """A method with the options of one checkpoint.

    `main` is the end of the name of the tensor that holds a quantised weight's codes, `scales` that
    of its scales. `form` gives the format of the weight of a module by its name, or raises
    UnsupportedError.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]  # (codes, scales): ends of names
    form: Callable[[str], WeightFormat]


def read_method(folder: Path, key: str, entry: Any) -> Method:
    """The method of config.json's entry. Raises UnsupportedError, naming the option and its value,
    for whatever is not computed here exactly as it is published.
    """
    options = _Options(folder, key, entry)
    name = options.get("quant_method")
    if key != "quantization_config" or not isinstance(name, str) or name not in _METHODS:
        known = ", ".join(_METHODS)
        options.refuse("quant_method", f"the methods that are read are {known}")
    return _METHODS[name](options)


class _Options:
    """A JSON object of config.json, and errors that name what stands in it."""

    def __init__(self, folder: Path, path: str, entry: Any, method: Any = None) -> None:
        self._folder, self.path = folder, path
        self._entry = entry if isinstance(entry, Mapping) else {}
        self._method = self._entry.get("quant_method") if method is None else method

    def get(self, key: str, default: Any = None) -> Any:
        value = self._entry.get(key)
        return default if value is None else value

    def __contains__(self, key: str) -> bool:
        return key in self._entry

    def at(self, key: str) -> _Options:
        return _Options(self._folder, f"{self.path}.{key}", self._entry.get(key), self._method)

    def named(self) -> list[str]:
        return [key for key, value in self._entry.items() if value not in (None, {}, [], "")]

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedError(
            f"{self._folder} is quantised ({self._method}) in a way that is not supported: "
            f"config.json: {self.path}.{key} = {self._entry.get(key)!r:.200}; {why}"
        )

    def need(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """The option, which must be one of `allowed`."""
        value = self.get(key, default)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            self.refuse(key, f"supported: {', '.join(map(repr, allowed))}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it is true or false")
        return value

    def texts(self, key: str, what: str) -> list[str]:
        """A list of texts; an empty one where it is absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            self.refuse(key, f"it is a list of {what}")
        return value

    def group(self, key: str = "group_size", default: int | None = None) -> int:
        """Columns of a group; 0 for whole rows."""
        size = self.get(key, default)
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            self.refuse(key, "a group is a number of columns, or -1 for whole rows")
        return max(size, 0)

    def absent(self, *keys: str) -> None:
        for key in keys:
            if key in self.named():
                self.refuse(key, "no weights with this option are computed here")


def _gptq(options: _Options) -> Method:
    bits = options.need("bits", (4, 8))
    order = options.flag("desc_act", False)
    layouts: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
    key = "checkpoint_format" if options.get("checkpoint_format") else "format"
    layout = layouts[options.need(key, tuple(layouts), "gptq")]
    options.need("pack_dtype", ("int32",), "int32")
    if options.flag("is_marlin_format", False):
        options.refuse("is_marlin_format", "this packing is of one library's kernels")
    overrides = options.get("dynamic", {})
    if not isinstance(overrides, Mapping) or any(
        not str(pattern).startswith("-:") for pattern in overrides
    ):
        options.refuse("dynamic", "other options for single modules are not read")
    form = WeightFormat("int4" if bits == 4 else "int8", layout, (1, options.group()), True, order)
    return Method("gptq", (("qweight", "scales"),), lambda module: form)


def _awq(options: _Options) -> Method:
    options.need("bits", (4,), options.get("w_bit"))
    key = "version" if options.get("version") else "format"
    if str(options.get(key, "gemm")).lower() != "gemm":
        options.refuse(key, "supported: 'gemm'")
    options.need("zero_point", (True,), True)
    group = options.group("group_size" if "group_size" in options.named() else "q_group_size", 128)
    form = WeightFormat("int4", "awq", (1, group), True)
    return Method("awq", (("qweight", "scales"),), lambda module: form)


def _fp8(options: _Options) -> Method:
    options.need("activation_scheme", ("dynamic",), "dynamic")
    options.need("fmt", ("e4m3",), "e4m3")
    options.need("expert_dtype", ("fp8",), "fp8")
    size = options.get("weight_block_size", None if "weight_block_size" in options else [128, 128])
    block = _block(size)
    if block is None:
        options.refuse("weight_block_size", "a block is two numbers above zero: [128, 128]")
    form = WeightFormat("fp8", "fp8_block", block)
    return Method("fp8", (("weight", "weight_scale_inv"),), lambda module: form)


def _block(size: Any) -> tuple[int, int] | None:
    """Rows and columns of a block: [128, 128], or "128x128" in older folders."""
    if isinstance(size, str):
        size = [int(x) if x.isdecimal() else 0 for x in size.split("x")]
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return None
    if not all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in size):
        return None
    return size[0], size[1]


def _mxfp4(options: _Options) -> Method:
    form = WeightFormat("mxfp4", "gpt_oss", (1, MX_GROUP))
    return Method("mxfp4", (("blocks", "scales"),), lambda module: form)


# compressed-tensors' formats: the layout, and what its values may be.
_FORMATS: dict[str, tuple[Layout, str]] = {
    "pack-quantized": ("packed", "int"),
    "int-quantized": ("plain", "int"),
    "float-quantized": ("plain", "float"),
    "naive-quantized": ("plain", ""),
    "mxfp4-pack-quantized": ("mxfp4", "float"),
}


def _compressed_tensors(options: _Options) -> Method:
    options.need("quantization_status", ("compressed",), "compressed")
    options.absent("kv_cache_scheme", "transform_config", "moe_sparsity_config")
    sparsity = options.at("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        sparsity.refuse("format", "sparse weights are not read")
    common = options.get("format", "")
    groups = options.at("config_groups")
    if not groups.named():
        options.refuse("config_groups", "it should say how weights are quantised")
    named: list[tuple[str, WeightFormat]] = []
    for group in groups.named():
        scheme = groups.at(group)
        if not scheme.named():
            groups.refuse(group, "a preset's name says less than a scheme of weights")
        form = _scheme(scheme, common)
        for target in scheme.texts("targets", "names of modules or classes"):
            if target.startswith("re:"):
                try:
                    re.compile(target[3:])
                except re.error as error:
                    scheme.refuse("targets", f"{target!r} is no regular expression: {error}")
            elif target == "Embedding":
                scheme.refuse("targets", "modules of this class are read where they are named")
            named.append((target, form))
    ignored = options.texts("ignore", "names of modules")

    def form_of(module: str) -> WeightFormat:
        found = [f for t, f in named if t == module]
        found += [f for t, f in named if t.startswith("re:") and re.match(t[3:], module)]
        if not found and module not in ignored:
            found = [f for t, f in named if t == "Linear"]
        if not found:
            options.refuse(
                "config_groups", f"{module} is stored quantised, and none of its targets is this"
            )
        return found[0]

    pairs = (("weight_packed", "weight_scale"), ("weight", "weight_scale"))
    return Method("compressed-tensors", pairs, form_of)


# Activations in int8 with a scale a row: an option, what it is, and what it is where it is absent.
_INT8_INPUTS: dict[str, tuple[Any, Any]] = {
    "num_bits": (8, 8),
    "type": ("int", "int"),
    "symmetric": (True, True),
    "strategy": ("token", "tensor"),
}


def _scheme(scheme: _Options, common: str) -> WeightFormat:
    """The format of a group's weights."""
    scheme.absent("output_activations")
    inputs = scheme.at("input_activations")
    if inputs.named() and inputs.get("dynamic", False) is not True:
        inputs.refuse("dynamic", "activations with scales of their own are not computed here")
    form = scheme.get("format") or common
    if not isinstance(form, str) or form not in _FORMATS:
        scheme.refuse("format", f"supported: {', '.join(_FORMATS)} (here {form!r})")
    layout, kind = _FORMATS[form]
    weights = scheme.at("weights")
    kind = weights.need("type", (kind,) if kind else ("int", "float"), "int")
    if layout == "mxfp4":
        weights.need("num_bits", (4,))
        weights.need("strategy", ("group",), "group")
        weights.need("group_size", (MX_GROUP,))
        return WeightFormat("mxfp4", "mxfp4", (1, MX_GROUP))
    bits = weights.need("num_bits", (4, 8) if kind == "int" else (8,), 8)
    if layout == "plain":
        bits = 8  # codes of fewer bits in a byte each
    order = weights.get("actorder", False) in ("group", "dynamic", True)
    if weights.get("dynamic", False) is not False:
        weights.refuse("dynamic", "weights have scales that are stored")
    size = None if weights.get("group_size") is None else weights.group()
    strategy = weights.need(
        "strategy",
        ("group", "channel", "tensor", "block")
        if layout == "plain"
        else ("group", "channel", "tensor"),
        "tensor" if size is None else "group" if size > 0 else "channel",
    )
    block = {"channel": (1, 0), "tensor": (0, 0)}.get(strategy)
    if strategy == "group":
        block = (1, weights.group())
    elif strategy == "block":
        block = _block(weights.get("block_structure"))
        if block is None:
            weights.refuse("block_structure", "a block is two numbers above zero: [128, 128]")
    assert block is not None
    zeros = kind == "int" and not weights.flag("symmetric", True)
    number = "fp8" if kind == "float" else "int4" if bits == 4 else "int8"
    # With scales of the moment, activations may as well stay as they are where they are not int8
    # with a scale a row, or the weights' scales and zeros stand in the way: nothing is lost.
    one_a_row = (number, layout, zeros) == ("int8", "plain", False) and block in ((1, 0), (0, 0))
    as_int8 = all(inputs.get(key, absent) == value for key, (value, absent) in _INT8_INPUTS.items())
    rounded = "int8" if inputs.named() and as_int8 and one_a_row else ""
    try:
        return WeightFormat(number, layout, block, zeros, order, rounded)  # type: ignore[arg-type]
    except ValueError as error:
        weights.refuse("strategy", str(error))


_METHODS: dict[str, Callable[[_Options], Method]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
