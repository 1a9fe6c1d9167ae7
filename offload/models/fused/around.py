"""What surrounds a decoder's layers: embeddings and rotary angles before them, a norm after."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.kernels import Norm
from offload.models.fused.layer_weights import make_norm
from offload.models.placeholder import Placeholder
from offload.models.specs.spec import Angles, ModelSpec
from offload.models.watched import Hooks, Place, Watched, parameters_of

_PLAIN = (bool, int, float, str, type(None))  # attributes that a forward may read


class Ahead:
    """The modules that make the layers' input of ids and positions, as they are now.

    `repeatable`: what they compute may be captured and replayed, until `changed` says that they
    are no longer what they were. That takes modules of transformers' own whose weights stay, and
    angles that do not depend on how long the sequence is.
    """

    def __init__(self, holder: nn.Module, spec: ModelSpec) -> None:
        self._holder: Any = holder
        self._spec = spec
        modules = _ahead_of_layers(holder, spec)
        self._hooks = Hooks(m for m in modules if m is not holder)
        self._hooked = self._hooks.foreign()
        self._functions = [(m, type(m), type(m).forward) for m in modules]
        tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
        self._tensors = [t for t in tensors if t is not None]
        self._watched = Watched(place for m in modules for place in _places(m, m is holder))
        self._by_length = any(_by_length(m) for m in modules)
        streamed = any(isinstance(t.data, Placeholder) for t in self._tensors)
        own = not any("forward" in vars(m) for m in modules if m is not holder)
        self.repeatable = own and not (self._hooked or self._by_length or streamed)
        # Streamed weights have no fixed addresses to watch.
        self._tensors = self._tensors if self.repeatable else []
        self._addresses = [t.data_ptr() for t in self._tensors]
        # What was captured may be replayed once more before anybody finds that it has changed: its
        # memory stays, also where a parameter's data are swapped.
        self._memory = [t.detach() for t in self._tensors]

    def changed(self) -> bool:
        """Whether the user put in something else since; asked only where that matters."""
        if self._by_length:
            return False  # their buffers change by themselves, and nothing is repeated
        return (
            self._watched.changed()
            or self._hooks.foreign() != self._hooked
            or [t.data_ptr() for t in self._tensors] != self._addresses
            or any(
                type(m) is not kind or kind.forward is not function
                for m, kind, function in self._functions
            )
        )

    def hidden(
        self, ids: torch.Tensor | None, embeddings: torch.Tensor | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """The first layer's input [batch, tokens, width] for one of ids and embeddings."""
        if embeddings is None:
            embeddings = getattr(self._holder, self._spec.tokens)(ids)
        return self._spec.embed(self._holder, embeddings, positions)

    def angles(self, positions: torch.Tensor) -> dict[str, Angles]:
        """Every rotary table at int64 positions [1 or batch, tokens], with any strides."""
        spec = self._spec
        return {table: spec.angles(self._holder, positions, table) for table in spec.tables}


class LastNorm:
    """The normalisation behind the last layer: `norm` by the kernels, or its module."""

    def __init__(self, holder: nn.Module, spec: ModelSpec) -> None:
        self._holder: Any = holder
        self._name = spec.final_norm
        module = getattr(holder, spec.final_norm, None)
        self._norm: Norm | None = None
        if module is None or spec.last_norm is None:
            return
        tensors = dict(module.named_parameters())
        if not any(isinstance(t.data, Placeholder) for t in tensors.values()):
            self._norm = make_norm(spec.last_norm, {n: t.detach() for n, t in tensors.items()})
        self._hooks = Hooks(module.modules())
        itself: Place = (holder._modules, spec.final_norm, module)
        forward: Place = (vars(module), "forward", vars(module).get("forward"))
        self._watched = Watched([itself, forward, *parameters_of(module)])

    def norm(self) -> Norm | None:
        """What the module computes, for the kernels; None where it has to be asked."""
        if self._norm is None or self._watched.changed() or self._hooks.foreign():
            return None
        return self._norm

    def module(self) -> Any:
        """The module; None where the model has none."""
        return getattr(self._holder, self._name, None)


def _ahead_of_layers(holder: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """The holder, and what is in it except layers and what comes behind them."""
    others = (spec.layer_list, spec.final_norm, spec.project_out)
    found = [
        module
        for name, module in holder.named_modules()
        if not any(other and (name == other or name.startswith(f"{other}.")) for other in others)
    ]
    first = holder.get_submodule(f"{spec.layer_list}.0")
    # GPT-J's angles are in a buffer of its layers in older releases.
    return found + [m for m in first.modules() if m._buffers]


def _places(module: nn.Module, holder: bool) -> list[Place]:
    """Where a forward of the module looks for what it computes with."""
    own: dict[str, Any] = vars(module)
    inner: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    found: list[Place] = [(d, key, value) for d in inner for key, value in d.items()]
    if not holder:
        found.append((own, "forward", own.get("forward")))
        found += [(own, key, value) for key, value in own.items() if isinstance(value, _PLAIN)]
    return found


def _by_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding whose angles depend on the longest sequence."""
    kinds = getattr(module, "rope_type", "")
    values = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any("dynamic" in str(kind) or str(kind) == "longrope" for kind in values)
