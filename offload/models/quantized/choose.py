"""Which tensors of a plain checkpoint are quantised, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel

from offload.checkpoint import Checkpoint
from offload.checkpoint.expressions import extents_of
from offload.checkpoint.extent import Extent
from offload.checkpoint.lazy import LazyTensor
from offload.checkpoint.weight_files import read_config
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
    choosing = _Choosing(model, checkpoint, wishes)
    for shared in shared_parameters(model):
        choosing.take(shared)
    return choosing.finish()


class _Choosing:
    """A choice in the making: takes the model's parameters one after the other."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, wishes: Wishes) -> None:
        self._model, self._tensors, self._wishes = model, checkpoint.tensors, wishes
        self._folder = checkpoint.folder
        # Later tensors first: of several at one place the first has the name.
        self._by_place = {
            (e.file, e.offset, e.nbytes): n for n, e in reversed(self._tensors.items())
        }
        self._inside = {id(m) for layer in find_layers(model).values() for m in layer.modules()}
        has_head = hasattr(model, "get_output_embeddings")
        self._head = model.get_output_embeddings() if has_head else None
        self._choice = Choice([])
        self._matched = {pattern: 0 for pattern, _ in wishes.patterns}
        self._seen: set[str] = set()

    def take(self, shared: Shared) -> None:
        """The tensors of the checkpoint that a parameter is made of."""
        for name in dict.fromkeys(_tensors(shared, self._by_place)):
            if name not in self._seen:
                self._seen.add(name)
                self._take_tensor(name, shared)

    def finish(self) -> Choice:
        """The choice, with the tensors that no parameter is made of."""
        rest = [name for name in self._tensors if name not in self._seen]
        for name in rest:
            self._add(name, name, None)
        _check_found(self._model, self._choice.weights, self._matched)
        return self._choice

    def _take_tensor(self, name: str, shared: Shared) -> None:
        kind = _kind(shared, name, self._tensors[name], self._by_place)
        module = shared.bindings[0].module
        heads = [b for b in shared.bindings[1:] if kind == "embedding" and b.module is self._head]
        others = [_module_of(b) for b in shared.bindings if b not in heads]
        names = tuple(dict.fromkeys((name.removesuffix(WEIGHT), *others)))
        if kind == "linear":
            self._choice.linear[name] = names
        tied = len(shared.bindings) > 1
        by_default = kind in ("linear", "expert") and id(module) in self._inside
        by_default = by_default and module is not self._head and not tied
        _, wanted = self._ask(names, kind is not None, by_default)
        self._add(name, name, wanted)
        for head in heads:
            self._take_head(head, name, wanted)

    def _take_head(self, head: Binding, embeddings: str, wanted: Wanted | None) -> None:
        """A head that is tied to `embeddings`, of which `wanted` is made."""
        linear, module = self._choice.linear, _module_of(head)
        named, of_head = self._ask([module], True, False)
        if not named or of_head == wanted:  # they stay one tensor
            linear[embeddings] = (module,)
            return
        linear[head.name] = (module,)
        _check_untied(self._model, head.name, self._folder, self._wishes)
        self._add(head.name, embeddings, of_head)
        self._choice.untied = True
        self._seen.add(head.name)

    def _ask(
        self, names: Iterable[str], possible: bool, by_default: bool
    ) -> tuple[bool, Wanted | None]:
        """Whether a pattern names a module of these names, and what it gets."""
        wanted, pattern = self._wishes.find(names)
        if not possible or (pattern is None and not by_default):
            return False, None
        if pattern is not None:
            self._matched[pattern] += 1
        return pattern is not None, wanted

    def _add(self, name: str, tensor: str, wanted: Wanted | None) -> None:
        """What is written as `name` is made of a tensor of the checkpoint."""
        extent = self._tensors[tensor]
        if wanted is not None:
            _check_shape(wanted, tensor, extent)
        self._choice.weights.append(CheckpointWeight(name, extent, wanted))


def _module_of(binding: Binding) -> str:
    return binding.name.rpartition(".")[0]


def _check_untied(model: PreTrainedModel, name: str, folder: Path, wishes: Wishes) -> None:
    """Refuse to part a head from the embeddings where config.json has no word for that alone."""
    config = model.config
    one = (
        getattr(config, "tie_word_embeddings", None) is True and config.get_text_config() is config
    )
    if not one or not name.endswith(WEIGHT) or not _parts_them_alone(model, name, folder):
        raise UnsupportedError(
            f"quantization: {name} is the embeddings' tensor, and other patterns decide about "
            f"those; {type(model).__name__} has no setting that parts them: let one pattern of "
            f"{[pattern for pattern, _ in wishes.patterns]} name both, or neither"
        )


def _parts_them_alone(model: PreTrainedModel, name: str, folder: Path) -> bool:
    """Whether tie_word_embeddings = false changes nothing but the head `name`: it may part biases,
    too (BERT), and scale what the head is given (T5).
    """
    said, setting = read_config(folder), {"tie_word_embeddings": False}
    tied = type(model.config).from_dict(said)
    apart = type(model.config).from_dict(said | setting)
    others = set(getattr(model, "all_tied_weights_keys", None) or {}) - {name}
    if others and not apart.tie_word_embeddings:
        return False
    return tied.to_dict() | setting == apart.to_dict() | setting


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
    if not any(w.wanted for w in weights) and any(matched.values()):
        raise ValueError(
            f"quantization: nothing is left to quantise: {list(matched)} leave all weights of "
            f"{type(model).__name__} as they are"
        )
    if not any(w.wanted for w in weights):
        raise UnsupportedError(
            f"{type(model).__name__} has no weight that can be quantised: its layers have no "
            "Linear with a weight of its own"
        )
