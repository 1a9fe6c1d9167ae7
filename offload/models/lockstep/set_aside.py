"""What code has set in torch and in the model, put aside while other code runs in its thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

_KINDS = ("cpu", "cuda")


class ThreadSettings:
    """Puts torch's settings of this thread aside while other code runs: grad mode, inference mode,
    autocast.

    They are neutral within the block, and as they were behind it, whatever was done to them
    meanwhile. What is set for the whole process is not kept: `sdpa_kernel` and other backend flags,
    the default dtype, random number generators, warning filters.
    """

    __slots__ = ("_cached", "_dtypes", "_guard")

    def __enter__(self) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        self._dtypes = [torch.get_autocast_dtype(kind) for kind in _KINDS]
        # This guard's end brings back all that autograd and the dispatcher keep for a thread, with
        # them whether autocast is on. It is what torch.inference_mode(False) enters.
        self._guard = torch._C._InferenceMode(False)
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(None, None, None)
        for kind, dtype in zip(_KINDS, self._dtypes, strict=True):
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        torch.clear_autocast_cache()  # casts of weights to the dtype that others had


class GrownTables:
    """Rotary tables that grow with the longest sequence seen: each job has those of its own."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Of all `modules`, which have them; others are left alone."""
        self._modules = [m for m in modules if _grows(m)]
        self._now = self._read()

    @classmethod
    def of(cls, model: nn.Module) -> GrownTables | None:
        """Those of a model; None where it has none, as most."""
        found = cls(model.modules())
        return found if found._modules else None

    def _read(self) -> Sequence[tuple[dict[str, Any], dict[str, Any]]]:
        return [(dict(vars(m)), dict(m._buffers)) for m in self._modules]

    def swap(self) -> GrownTables:
        """Put these in place; returns those that were there."""
        before = GrownTables(())
        before._modules = self._modules
        before._now = before._read()
        for module, (own, buffers) in zip(self._modules, self._now, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
            vars(module).update({k: v for k, v in own.items() if k not in _CONTAINERS})
        return before


class LayerCounts:
    """How many of its layers a model's forward runs, by its configs: `assistant_early_exit` lowers
    that while candidates are made, and each job has its own.
    """

    def __init__(self, model: nn.Module) -> None:
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None))}
        self._configs = [c for c in configs.values() if hasattr(c, "num_hidden_layers")]

    def put(self, counts: Sequence[int] | None) -> Sequence[int]:
        """Put these in place, unless None; returns those that were there."""
        before = [config.num_hidden_layers for config in self._configs]
        if counts is not None and counts != before:
            for config, count in zip(self._configs, counts, strict=True):
                config.num_hidden_layers = count
        return before


_CONTAINERS = {k for k, v in vars(nn.Module()).items() if isinstance(v, dict)}


def _grows(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", "")
    values = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any("dynamic" in str(kind) for kind in values)
