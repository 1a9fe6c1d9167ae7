"""Whether modules are still what they were when the engine looked at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import eq, is_
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

Place = tuple[dict[str, Any], str, Any]  # a dict, a key, and what is there; None: nothing


class Watched:
    """Places, and what they held at first. A step looks at a thousand, so loops are C's."""

    def __init__(self, places: Iterable[Place]) -> None:
        found = list(places)
        self._dicts = [place[0] for place in found]
        self._keys = [place[1] for place in found]
        self._values = [place[2] for place in found]

    def changed(self) -> bool:
        """Whether any place holds something else now."""
        return not all(map(is_, map(dict.get, self._dicts, self._keys), self._values))


class Structure:
    """Which modules stand in which, from one on, and what their forwards are."""

    def __init__(self, module: nn.Module) -> None:
        inner = list(module.modules())
        self._children: list[dict[str, Any]] = [m._modules for m in inner if m._modules]
        self._before = [dict(children) for children in self._children]
        self._forwards = Watched((vars(m), "forward", vars(m).get("forward")) for m in inner)

    def changed(self) -> bool:
        """Whether a module or a forward was put in, taken out or replaced."""
        return not all(map(eq, self._children, self._before)) or self._forwards.changed()


class Hooks:
    """The forward hooks of these modules, and those that torch calls for any module."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._dicts: list[Mapping[int, Any]] = [
            *(hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)),
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
        ]

    def foreign(self) -> bool:
        """Whether there is any but transformers' own."""
        return any(self._dicts) and any(map(is_foreign, self._dicts))


def is_foreign(hooks: Mapping[int, Any]) -> bool:
    """Whether a module's hooks are more than transformers' own, which wait to be asked."""
    return any(
        getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
        for hook in hooks.values()
    )


def parameters_of(module: nn.Module) -> Iterator[Place]:
    """Every place of a parameter in a module, inner modules' too."""
    for inner in module.modules():
        holder: dict[str, Any] = inner._parameters
        yield from ((holder, key, value) for key, value in holder.items())
