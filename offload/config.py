"""What a user asks of `offload.run`, checked before anything is read or allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.memory_limits import parse_size
from offload.scheduler.plan import Tier
from offload.scheduler.setting import Goal, Job

_TIER_NAMES = {"cpu": Tier.CPU, "nvme": Tier.NVME, "disk": Tier.NVME}
ENGINES = ("auto", "transformers", "fused")
KV_DTYPES = ("auto", "int8")
KV_ATTENTION = ("auto", "cpu", "gpu")
MAX_PREFETCH = 64
_GOALS = " or ".join(repr(goal.value) for goal in Goal)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class OffloadConfig:
    """The arguments of `offload.run`, in their final form. Raises ValueError or TypeError, naming
    argument and value.
    """

    device_map: str | Mapping[str, Any] = "auto"
    max_memory: Mapping[Any, int | str] | None = None
    offload_folder: str | os.PathLike[str] | None = None
    dtype: torch.dtype | str = "auto"
    engine: str = "auto"
    device: torch.device | str | int | None = None
    prefetch: int | None = None
    batch_size: int = 1
    max_length: int | None = None
    kv_on_cpu: int = 0
    kv_dtype: str = "auto"  # of keys and values in CPU memory: the model's, or int8 with scales
    kv_attention: str = "auto"  # who attends to them; "auto": the CPU, or as a plan for a goal says
    goal: str | None = None  # what a plan is to be best at; None: layers are placed by their sizes
    prompt_len: int | None = None  # tokens of each prompt, where there is a goal
    gen_len: int | None = None  # new tokens of each sequence, likewise
    choose_batch: bool = False  # the plan says how many sequences run at once, not `batch_size`
    tiers: Mapping[str, Tier] = field(init=False)  # by module name; "" is every layer
    memory: Mapping[int | str, int] = field(init=False)  # max_memory in bytes
    compute: torch.device = field(init=False)
    job: Job | None = field(init=False)  # of the goal

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", _compute_device(self.device))
        object.__setattr__(self, "tiers", _tiers(self.device_map, self.compute))
        object.__setattr__(self, "memory", _memory(self.max_memory))
        object.__setattr__(self, "dtype", _dtype(self.dtype))
        _check_path("offload_folder", self.offload_folder)
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {ENGINES}, got {self.engine!r}")
        if self.prefetch is not None:
            _check_int("prefetch", self.prefetch, 1, MAX_PREFETCH)
        _check_int("batch_size", self.batch_size, 1, 1 << 20)
        if self.max_length is not None:
            _check_int("max_length", self.max_length, 1, 1 << 30)
        _check_int("kv_on_cpu", self.kv_on_cpu, 0, 1 << 20)
        if self.kv_on_cpu > self.batch_size:
            raise ValueError(
                f"kv_on_cpu={self.kv_on_cpu} of batch_size={self.batch_size} sequences: name the "
                "batch_size that you run, and of its sequences those that keep keys and values in "
                "CPU memory"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {KV_DTYPES}, got {self.kv_dtype!r}")
        if self.int8_kv and not self.kv_on_cpu and self.goal is None:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} is for keys and values in CPU memory: say with "
                "kv_on_cpu how many sequences keep theirs there, or plan for a goal"
            )
        if self.kv_attention not in KV_ATTENTION:
            raise ValueError(
                f"kv_attention must be one of {KV_ATTENTION}, got {self.kv_attention!r}"
            )
        if self.kv_attention != "auto" and not self.kv_on_cpu and self.goal is None:
            raise ValueError(
                f"kv_attention={self.kv_attention!r} is about keys and values in CPU memory: say "
                "with kv_on_cpu how many sequences keep theirs there"
            )
        object.__setattr__(self, "job", self._job())

    def _job(self) -> Job | None:
        """What the goal is about."""
        lengths = {"prompt_len": self.prompt_len, "gen_len": self.gen_len}
        given = [name for name, value in lengths.items() if value is not None]
        if self.goal is None:
            if given:
                raise ValueError(f"{given[0]}={lengths[given[0]]} needs a goal: {_GOALS}")
            return None
        if self.goal not in [goal.value for goal in Goal]:
            raise ValueError(f"goal={self.goal!r} is not known; it is {_GOALS}")
        for name, value in lengths.items():
            if value is None:
                raise ValueError(
                    f"goal={self.goal!r} needs {name}: give prompt_len, the tokens of a prompt, "
                    "and gen_len, the new tokens of each sequence"
                )
            _check_int(name, value, 1, 1 << 30)
        if self.tiers:
            raise ValueError(
                f"goal={self.goal!r} plans where layers rest, and device_map={self.device_map!r} "
                "says it: leave one of them out"
            )
        decided: dict[str, Any] = {"prefetch": self.prefetch, "max_length": self.max_length}
        decided["kv_on_cpu"] = self.kv_on_cpu or None
        decided["kv_attention"] = None if self.kv_attention == "auto" else self.kv_attention
        for name, value in decided.items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is decided by the plan for goal={self.goal!r}: leave it out"
                )
        batch = None if self.choose_batch else self.batch_size
        return Job(int(self.prompt_len or 0), int(self.gen_len or 0), batch)

    @property
    def gpu_sequences(self) -> int:
        """Of `batch_size`, those that keep keys and values on the compute device."""
        return self.batch_size - self.kv_on_cpu

    @property
    def int8_kv(self) -> bool:
        """Whether keys and values in CPU memory are int8, with a scale a token and head."""
        return self.kv_dtype == "int8"

    @property
    def streamed_kv(self) -> bool:
        """Whether keys and values in CPU memory come up the link, for the GPU to attend to."""
        return self.kv_attention == "gpu"

    @property
    def asked_to_offload(self) -> bool:
        """Whether the user named a tier other than the compute device."""
        return any(tier is not Tier.DEVICE for tier in self.tiers.values())


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


def _check_path(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {value!r}")
    if value == "":
        raise ValueError(f"{name} is empty: leave it out for the default, or name a folder")


def _compute_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} is not a device: {why}") from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise ValueError(
            f"device={device!r}: layers are streamed to 'cuda' devices or run on 'cpu'"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = chosen.index if chosen.index is not None else 0
    if index >= count:
        raise ValueError(
            f"device={device!r}: this machine has {count} usable CUDA device(s); device='cpu' "
            f"computes on the CPU"
        )
    return torch.device("cuda", index)


def _tiers(device_map: str | Mapping[str, Any], compute: torch.device) -> dict[str, Tier]:
    if isinstance(device_map, str):
        if device_map == "auto":
            return {}
        if device_map in _TIER_NAMES:
            return {"": _TIER_NAMES[device_map]}
        raise ValueError(
            f"device_map={device_map!r} is not known; use 'auto', 'cpu', 'nvme' (or 'disk'), or a "
            "dict of module names to 0, 'cpu' or 'nvme'"
        )
    if not isinstance(device_map, Mapping):
        raise TypeError(f"device_map must be a string or a dict, got {device_map!r}")
    if not device_map:
        raise ValueError("device_map={} places nothing; use 'auto', or {'': 'nvme'} for all layers")
    return {str(name): _tier(name, value, compute) for name, value in device_map.items()}


def _tier(name: str, value: Any, compute: torch.device) -> Tier:
    if isinstance(value, str) and value in _TIER_NAMES:
        return _TIER_NAMES[value]
    if isinstance(value, (int, torch.device)) or (
        isinstance(value, str) and value.startswith("cuda")
    ):
        try:
            index = value if isinstance(value, int) else torch.device(value).index or 0
        except RuntimeError as error:
            raise ValueError(f"device_map[{name!r}]={value!r} is no device: {error}") from error
        if compute.type == "cpu" and value == 0:
            return Tier.DEVICE
        if compute.type == "cuda" and index == compute.index:
            return Tier.DEVICE
        raise ValueError(
            f"device_map[{name!r}]={value!r} is not the compute device ({compute}); one device "
            f"computes, and others hold no layers"
        )
    raise ValueError(f"device_map[{name!r}]={value!r}: use 0, 'cpu' or 'nvme' (or 'disk')")


def _memory(max_memory: Mapping[Any, int | str] | None) -> dict[int | str, int]:
    if max_memory is None:
        return {}
    if not isinstance(max_memory, Mapping):
        raise TypeError(
            f"max_memory must be a dict such as {{0: '20GiB', 'cpu': '64GiB'}}, got {max_memory!r}"
        )
    sizes: dict[int | str, int] = {}
    for key, value in max_memory.items():
        if key != "cpu" and (isinstance(key, bool) or not isinstance(key, int) or key < 0):
            raise ValueError(f"max_memory has the key {key!r}; keys are GPU numbers and 'cpu'")
        try:
            sizes[key] = parse_size(value)
        except (ValueError, TypeError) as error:
            raise type(error)(f"max_memory[{key!r}]: {error}") from error
    return sizes


def _dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype):
        chosen: Any = dtype
    elif dtype == "auto":
        return "auto"
    else:
        chosen = getattr(torch, str(dtype).removeprefix("torch."), None)
    if chosen not in _DTYPES:
        raise ValueError(
            f"dtype={dtype!r} is not 'auto', 'bfloat16', 'float16', 'float32' or 'float64'"
        )
    return chosen
