"""Which tensors of a plain checkpoint are quantised, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel

from offload.checkpoint import Checkpoint
from offload.checkpoint.extent import Extent
from offload.checkpoint.lazy import LazyTensor, extents_of
from offload.errors import UnsupportedError
from offload.models.modules import Binding, Shared, find_layers, shared_parameters
from offload.models.quantized.wanted import Wanted, Wishes

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class CheckpointWeight:
    """A tensor of the checkpoint, and what it becomes (None: it stays as it is).

    `name` is what it is called there, but for a head that is untied from the embeddings: that one
    is made of their tensor, too.
    """

    name: str
    extent: Extent
    wanted: Wanted | None

    @property
    def module(self) -> str:
        """The name of the module it is the weight of, in the checkpoint's words."""
        return self.name.removesuffix(WEIGHT)


@dataclass(slots=True)
class Choice:
    """All tensors, in the order in which the model uses them, those it does not use at the end."""

    weights: list[CheckpointWeight]
    linear: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Every Linear of the model by its weight's tensor: the names it goes by, in checkpoint and
    model. A head that shares the embeddings' is among them."""
    untied: bool = False
    """Whether embeddings and head, one tensor in the checkpoint, become two."""


def choose(model: PreTrainedModel, checkpoint: Checkpoint, wishes: Wishes) -> Choice:
    """What `wishes` make of the weights of `model`, which was built on `checkpoint`.

    The default is for the Linears of the layers, experts included; heads, embeddings, Linears
    elsewhere and tied weights are quantised where a pattern names them. A head that is tied to the
    embeddings goes with them, as one tensor, unless a pattern that names it says another thing:
    then the two are untied. Raises ValueError for a pattern that names nothing and a shape that
    does not divide, UnsupportedError for a head that cannot be untied.
    """
    by_place = {(e.file, e.offset, e.nbytes): n for n, e in reversed(checkpoint.tensors.items())}
    inside = {id(m) for layer in find_layers(model).values() for m in layer.modules()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    choice = Choice([])
    matched: dict[str, int] = {pattern: 0 for pattern, _ in wishes.patterns}
    seen: set[str] = set()

    def asked(names: Iterable[str], possible: bool, by_default: bool) -> tuple[bool, Wanted | None]:
        """Whether a pattern names a module of these names, and what it gets."""
        wanted, pattern = wishes.find(names)
        if not possible or (pattern is None and not by_default):
            return False, None
        if pattern is not None:
            matched[pattern] += 1
        return pattern is not None, wanted

    for shared in shared_parameters(model):
        tied = len(shared.bindings) > 1
        for name in dict.fromkeys(_tensors(shared, by_place)):
            if name in seen:
                continue
            seen.add(name)
            extent, binding = checkpoint.tensors[name], shared.bindings[0]
            kind = _kind(shared, name, extent, by_place)
            heads = [b for b in shared.bindings[1:] if kind == "embedding" and b.module is head]
            others = [_module_of(b) for b in shared.bindings if b not in heads]
            names = list(dict.fromkeys((name.removesuffix(WEIGHT), *others)))
            if kind == "linear":
                choice.linear[name] = tuple(names)
            by_default = kind in ("linear", "expert") and id(binding.module) in inside
            by_default = by_default and binding.module is not head and not tied
            _, wanted = asked(names, kind is not None, by_default)
            if wanted is not None:
                _check_shape(wanted, name, extent)
            choice.weights.append(CheckpointWeight(name, extent, wanted))
            for b in heads:
                choice.linear[name] = (_module_of(b),)
                named, of_head = asked([_module_of(b)], True, False)
                if not named or of_head == wanted:
                    continue  # they stay one tensor
                del choice.linear[name]
                choice.linear[b.name] = (_module_of(b),)
                _check_untied(model, b.name, wishes)
                if of_head is not None:
                    _check_shape(of_head, name, extent)
                choice.weights.append(CheckpointWeight(b.name, extent, of_head))
                choice.untied = True
                seen.add(b.name)
    rest = [n for n in checkpoint.tensors if n not in seen]
    choice.weights += [CheckpointWeight(name, checkpoint.tensors[name], None) for name in rest]
    _check_found(model, choice.weights, matched)
    return choice


def _module_of(binding: Binding) -> str:
    return binding.name.rpartition(".")[0]


def _check_untied(model: PreTrainedModel, name: str, wishes: Wishes) -> None:
    """Refuse to part a head from the embeddings where config.json has no word for that."""
    config = model.config
    one = (
        getattr(config, "tie_word_embeddings", None) is True and config.get_text_config() is config
    )
    if not one or not name.endswith(WEIGHT):
        raise UnsupportedError(
            f"quantization: {name} is the embeddings' tensor, and other patterns decide about "
            f"those; {type(model).__name__} has no setting that parts them: let one pattern of "
            f"{[pattern for pattern, _ in wishes.patterns]} name both, or neither"
        )


def _tensors(shared: Shared, by_place: Mapping[tuple[str, int, int], str]) -> Iterator[str]:
    """The checkpoint's tensors that a parameter is made of, as far as it takes whole ones."""
    if isinstance(shared.tensor, LazyTensor):
        for e in extents_of(shared.tensor.expression):
            name = by_place.get((e.file, e.offset, e.nbytes))
            if name is not None:
                yield name


def _kind(
    shared: Shared, name: str, extent: Extent, by_place: Mapping[tuple[str, int, int], str]
) -> str | None:
    """What kind of module multiplies with the tensor, where that can be told."""
    module, key = shared.bindings[0].module, shared.bindings[0].key
    if len(extent.shape) != 2 or not name.endswith(WEIGHT) or not extent.dtype.is_floating_point:
        return None
    alone = len(set(_tensors(shared, by_place))) == 1 and shared.tensor.shape == extent.shape
    if isinstance(module, nn.Linear):
        called = not isinstance(module, NonDynamicallyQuantizableLinear)
        return "linear" if alone and called and key == "weight" else None
    if isinstance(module, nn.Embedding):
        return "embedding" if alone and key == "weight" else None
    # Experts that loading merges: one parameter of three dimensions, made of Linears' weights.
    return "expert" if shared.tensor.ndim == 3 and not alone else None


def _check_shape(wanted: Wanted, name: str, extent: Extent) -> None:
    try:
        wanted.form.check_shape(extent.shape)
    except ValueError as error:
        raise ValueError(f"{name} ({extent.file}): {error}") from None


def _check_found(
    model: PreTrainedModel, weights: Iterable[CheckpointWeight], matched: Mapping[str, int]
) -> None:
    for pattern, count in matched.items():
        if not count:
            raise ValueError(
                f"quantization: {pattern!r} is found in the name of no weight of "
                f"{type(model).__name__} that can be quantised"
            )
    if not any(w.wanted for w in weights):
        raise UnsupportedError(
            f"{type(model).__name__} has no weight that can be quantised: its layers have no "
            "Linear with a weight of its own"
        )
