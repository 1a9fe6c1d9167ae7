"""What quantising costs: the perplexity of a text under the plain and the quantised model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedModel

from offload.api import run
from offload.bench.table import format_table
from offload.checkpoint import resolve_model
from offload.models.limits import check_tokens, positions
from offload.models.quantized.wanted import Wishes

MOST_LOSS = 700.0  # nats; e to a little more is no number
WINDOW = 1024  # tokens that are predicted from no more than those before them in their window


@dataclass(frozen=True)
class Reading:
    """A text under one model: the loss of every token, in nats, and what its weights take."""

    name: str
    losses: tuple[float, ...]
    weight_bytes: int

    @property
    def perplexity(self) -> float:
        """e to the mean loss."""
        return math.exp(self.loss)

    @property
    def loss(self) -> float:
        """The mean."""
        return statistics.fmean(self.losses)


@dataclass(frozen=True)
class Quality:
    """Two readings of one text."""

    plain: Reading
    quantised: Reading

    @property
    def change(self) -> float:
        """Of the perplexity, as a share of the plain one's."""
        return self.quantised.perplexity / self.plain.perplexity - 1

    @property
    def error(self) -> float | None:
        """Standard error of `change`: by how much another text of this kind would move it; None
        where one token is all that was predicted.
        """
        pairs = zip(self.quantised.losses, self.plain.losses, strict=True)
        differences = [q - p for q, p in pairs]
        if len(differences) < 2:
            return None
        spread = statistics.stdev(differences) / math.sqrt(len(differences))
        return (1 + self.change) * spread

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single losses, in plain types."""
        rows = {}
        for key, reading in (("plain", self.plain), ("quantised", self.quantised)):
            found = asdict(reading)
            del found["losses"]
            rows[key] = {**found, "perplexity": reading.perplexity}
        return {
            **rows,
            "tokens": len(self.plain.losses),
            "change": self.change,
            "standard_error": self.error,
        }

    def __str__(self) -> str:
        rows = [("weights", "MB", "perplexity")]
        for r in (self.plain, self.quantised):
            rows.append((r.name, f"{r.weight_bytes / 1e6:.1f}", f"{r.perplexity:.4f}"))
        lines = "\n".join(format_table(rows))
        error = "unknown" if self.error is None else f"{self.error:.2%}"
        return (
            f"{lines}\n\n{len(self.plain.losses)} tokens; perplexity {self.change:+.2%} "
            f"(standard error {error})"
        )


def measure_quality(
    model: str,
    text: str,
    quantization: str | Mapping[str, str] | None,
    *,
    against: str | None = None,
    window: int = WINDOW,
    tokens: int | None = None,
    **options: Any,
) -> Quality:
    """Read `text` with `model`, a plain folder or hub id, and with its weights quantised (or with
    the folder `against`, which holds them); of the text its first `tokens`. `options` are
    those of `offload.run`.

    Raises ValueError for a text or window of fewer than two tokens, a model that cannot read them
    or does not predict the next one, and losses of which nothing could be told.
    """
    if (quantization is None) == (against is None):
        raise ValueError(
            "name either the formats to quantise to (--weights, --weights-of), or a quantised "
            "folder (--against)"
        )
    if window < 2:
        raise ValueError(f"a window of {window} tokens predicts none; two are the least")
    # What cannot be had is told before the plain model is read.
    if quantization is not None:
        Wishes.of(quantization)
    if against is not None:
        resolve_model(against)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model))
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
    if ids.shape[1] < 2:
        raise ValueError(f"the text has {ids.shape[1]} tokens; two are the least")
    plain = _read("plain", model, ids, window, options)
    if against is not None:
        return Quality(plain, _read(Path(against).name, against, ids, window, options))
    name = quantization if isinstance(quantization, str) else str(dict(quantization or {}))
    quantised = _read(name, model, ids, window, {**options, "quantization": quantization})
    return Quality(plain, quantised)


def _read(
    name: str, model: str, ids: torch.Tensor, window: int, options: dict[str, Any]
) -> Reading:
    with run(model, **options) as network:  # type: ignore[attr-defined]
        _check_reader(network, ids, window)
        plan = network.offload.plan
        nbytes = plan.outside_bytes + sum(layer.weight_bytes for layer in plan.layers)
        found = Reading(name, tuple(token_losses(network, ids, window)), nbytes)
    if not found.loss < MOST_LOSS:  # NaN, too
        raise ValueError(
            f"{model} ({name}) has a mean loss of {found.loss:.6g} nats: its numbers overflow "
            "(--dtype bfloat16 or float32 has a wider range), or its weights are damaged"
        )
    return found


def _check_reader(model: PreTrainedModel, ids: torch.Tensor, window: int) -> None:
    """Refuse a model that cannot read the text, or whose answer is no prediction of it."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} does not predict a text's next token from those before it, "
            "and this is the perplexity of models that do"
        )
    check_tokens(model, ids)
    limit, learnt = positions(model.config)
    longest = min(window, ids.shape[1])
    if limit is not None and learnt and longest > limit:
        raise ValueError(
            f"a window of {longest} tokens is more than the model's {limit} positions: pass "
            f"--window {limit}"
        )


def token_losses(model: PreTrainedModel, ids: torch.Tensor, window: int) -> list[float]:
    """The loss, in nats, of every token of ids [1, n] but the first of each window."""
    found: list[float] = []
    for start in range(0, ids.shape[1], window):
        part = ids[:, start : start + window].to(model.device)
        if part.shape[1] < 2:
            break
        with torch.no_grad():
            logits = model(input_ids=part, use_cache=False).logits[0, :-1].float()
        found += functional.cross_entropy(logits, part[0, 1:], reduction="none").tolist()
    return found
