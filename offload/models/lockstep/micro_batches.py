"""A batch for `generate` split into micro-batches by sequences, and their outputs joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DEFAULT_SIZE = 8  # sequences of a micro-batch

# What belongs to one call of `generate`, and cannot be cut into pieces.
_WHOLE = {
    "past_key_values": "each micro-batch has a cache of its own",
    "cache": "each micro-batch has a cache of its own",
    "encoder_outputs": "each micro-batch runs the encoder itself",
    "streamer": "tokens of several micro-batches come in turns",
}


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Arguments of one call of `generate` each, what each is called, and how outputs are joined."""

    arguments: Iterable[dict[str, Any]]
    name: Callable[[int], str]
    join: Callable[[list[Any]], Any]

    @classmethod
    def of(
        cls,
        inputs: Any,
        size: int | None,
        options: Mapping[str, Any],
        model: Any,
        usual: int = DEFAULT_SIZE,
    ) -> MicroBatches:
        """Of a batch (a tensor, or a mapping of tensors) or an iterable of requests (mappings).

        `usual`: the sequences of a micro-batch where `size` is None.
        """
        if isinstance(inputs, torch.Tensor):
            # The name that the model has for it, as `generate` itself finds it.
            inputs = {
                model.main_input_name if model.config.is_encoder_decoder else "input_ids": inputs
            }
        if isinstance(inputs, Mapping):
            return cls._of_batch(inputs, usual if size is None else size, options, model)
        if isinstance(inputs, str) or not isinstance(inputs, Iterable):
            raise TypeError(
                "inputs must be input ids [batch, tokens], a mapping of such tensors, or a list of "
                f"mappings with one request each, got {type(inputs).__name__}"
            )
        if size is not None:
            raise ValueError(
                f"micro_batch_size={size} splits a batch, but inputs are requests, each of which "
                "is a micro-batch: leave it out"
            )
        return cls(_requests(inputs, options), lambda i: f"request {i}", lambda outputs: outputs)

    @classmethod
    def _of_batch(
        cls, inputs: Mapping[str, Any], size: int, options: Mapping[str, Any], model: Any
    ) -> MicroBatches:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"micro_batch_size must be a positive number, got {size!r}")
        twice = inputs.keys() & options.keys()
        if twice:
            raise TypeError(f"{min(twice)} is given in inputs and beside them")
        batch = _batch_of(inputs)
        split = dict(inputs)
        common = dict(options)
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == batch:
                split[name] = common.pop(name)
        if batch > size:
            for name, why in _WHOLE.items():
                if common.get(name) is not None:
                    raise ValueError(f"{name} cannot be split into micro-batches: {why}")
        pad = _Padding.of(options, model)
        pad.check(batch > size)

        allowed = common.pop("prefix_allowed_tokens_fn", None)

        def rows(first: int) -> dict[str, Any]:
            own = {name: value[first : first + size] for name, value in split.items()} | common
            if allowed is not None:  # it is told which sequence of the batch it is asked about
                own["prefix_allowed_tokens_fn"] = lambda i, ids: allowed(first + i, ids)
            return own

        def called(number: int) -> str:
            first = number * size
            last = min(first + size, batch) - 1
            return f"micro-batch {number} (sequences {first} to {last})"

        return cls((rows(first) for first in range(0, batch, size)), called, pad.join)


def _requests(requests: Iterable[Any], options: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for number, request in enumerate(requests):
        if not isinstance(request, Mapping):
            raise TypeError(
                f"request {number} must be a mapping with arguments of generate, such as "
                f"input_ids, got {type(request).__name__}"
            )
        _check_ids(request, f"input_ids of request {number}")
        yield {**options, **request}


def _check_ids(arguments: Mapping[str, Any], name: str) -> None:
    """Refuse input ids that `generate` would fail on without saying why."""
    ids = arguments.get("input_ids")
    if ids is None:
        return
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor [batch, tokens], got {type(ids).__name__}")
    if ids.dim() < 2:
        raise ValueError(
            f"{name} must be [batch, tokens], got {list(ids.shape)}: one sequence is ids[None]"
        )
    if not ids.shape[1] and arguments.get("inputs_embeds") is None:
        raise ValueError(f"{name} hold no token: their shape is {list(ids.shape)}")


def _batch_of(inputs: Mapping[str, Any]) -> int:
    """Sequences of the batch."""
    if not inputs:
        raise ValueError("inputs are empty: there is nothing to generate from")
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 1:
            is_tensor = isinstance(value, torch.Tensor)
            got = f"shape {list(value.shape)}" if is_tensor else type(value).__name__
            raise TypeError(
                f"inputs[{name!r}] must be a tensor with the batch as its first dimension, got "
                f"{got}; arguments for all sequences go beside inputs"
            )
    _check_ids(inputs, "input ids")
    counts = {name: value.shape[0] for name, value in inputs.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"inputs are not of one batch (sequences of each are {listed})")
    batch = next(iter(counts.values()))
    if not batch:
        raise ValueError("inputs hold no sequence")
    return batch


@dataclass(frozen=True, slots=True)
class _Padding:
    """What `generate` fills rows with that ended early; None where no row does."""

    token: int | None
    stops: bool  # whether rows may also end otherwise than with an end token

    @classmethod
    def of(cls, options: Mapping[str, Any], model: Any) -> _Padding:
        """As `generate` finds it: the padding token, else the first end token."""
        own = model.generation_config
        given = options.get("generation_config") or own

        def asked(name: str) -> Any:
            found = (options.get(name), getattr(given, name, None), getattr(own, name, None))
            return next((value for value in found if value is not None), None)

        def first(name: str) -> int | None:
            value = asked(name)
            return None if value is None else int(torch.as_tensor(value).flatten()[0])

        pad, end = first("pad_token_id"), first("eos_token_id")
        # Beam search takes a padding token of 0 for none.
        missing = not pad if (first("num_beams") or 1) > 1 else pad is None
        ways = ("stopping_criteria", "max_time", "stop_strings")
        return cls(
            end if missing and end is not None else pad,
            any(asked(name) is not None for name in ways),
        )

    def check(self, several: bool) -> None:
        """Refuse what may end micro-batches at different lengths where nothing is known to fill
        the shorter ones with.
        """
        if several and self.token is None and self.stops:
            raise ValueError(
                "micro-batches may end at different lengths, and there is no padding token to fill "
                "the shorter ones with: pass pad_token_id"
            )

    def join(self, outputs: list[Any]) -> Any:
        """The rows of all outputs; the outputs themselves where they are no plain ids."""
        if not all(isinstance(ids, torch.Tensor) for ids in outputs):
            return outputs
        return _joined(outputs, self.token or 0)


def _joined(outputs: Sequence[torch.Tensor], pad: int) -> torch.Tensor:
    """[rows, tokens] each -> all rows [rows, most tokens], filled at the end."""
    longest = max(ids.shape[1] for ids in outputs)
    joined = outputs[0].new_full((sum(len(ids) for ids in outputs), longest), pad)
    row = 0
    for ids in outputs:
        joined[row : row + len(ids), : ids.shape[1]] = ids
        row += len(ids)
    return joined
