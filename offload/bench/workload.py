"""The work that every peer is given, and what it took: prefill, decode steps, tokens, logits."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from offload.bench.memory import peak_of

WARM_UP_PROMPT, WARM_UP_TOKENS = 32, 2
FIRST_STEPS = 3  # of a generation, in which calls are made and graphs are captured


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` prompts of `prompt` random tokens, `gen` new tokens each, `repeat` times."""

    batch: int = 32
    prompt: int = 512
    gen: int = 32
    repeat: int = 1
    seed: int = 0

    def prompts(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """Token ids [batch, prompt], the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        low = min(10, vocabulary - 1)  # special tokens come first
        shape = (self.batch, self.prompt)
        return torch.randint(low, vocabulary, shape, generator=generator).to(device)


@dataclass(slots=True)
class Timing:
    """Seconds on the compute device, and what was computed."""

    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # all of every run
    later_steps: list[float] = field(default_factory=list)  # those behind the first FIRST_STEPS
    totals: list[float] = field(default_factory=list)
    tokens: torch.Tensor | None = None  # [batch, gen]
    logits: list[torch.Tensor] = field(default_factory=list)  # [batch, vocabulary]: first and last

    @property
    def prefill(self) -> float:
        """Median seconds from the call of `generate` to the first token."""
        return statistics.median(self.prefills)

    @property
    def step(self) -> float | None:
        """Median seconds of a decode step behind the first ones; of all where there are no more;
        None where a single token was made.
        """
        steps = self.later_steps or self.steps
        return statistics.median(steps) if steps else None

    @property
    def mean_step(self) -> float | None:
        """Mean seconds of all steps, the first ones too; None where a single token was made."""
        return statistics.fmean(self.steps) if self.steps else None

    @property
    def total(self) -> float:
        """Median seconds of the whole."""
        return statistics.median(self.totals)

    def compared_with(self, wanted: Timing, name: str = "resident") -> str:
        """Whether the run called `name` computed the same, in words."""
        assert self.tokens is not None and wanted.tokens is not None
        same = int((self.tokens == wanted.tokens).sum())
        tokens = f"{same} of {wanted.tokens.numel()} tokens equal to {name}"
        pairs = list(zip(self.logits, wanted.logits, strict=True))
        if all(torch.equal(a, b) for a, b in pairs):
            return f"{tokens}, logits equal"
        difference = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
        return f"{tokens}, logits differ by {difference:.3g} at most"


class Clock:
    """Points in time of the compute device: events on a GPU, where the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        """The point after everything issued so far."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """From one stamp to another; call `synchronize` first."""
        if self._device.type == "cpu":
            return stop - start
        return start.elapsed_time(stop) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Stamps:
    """A logits processor that changes nothing and notes when each token's scores were there."""

    def __init__(self, clock: Clock, last: int) -> None:
        self.stamps: list[Any] = []
        self.scores: list[torch.Tensor] = []
        self._clock, self._last = clock, last

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.stamps.append(self._clock.stamp())
        if len(self.stamps) in (1, self._last):
            self.scores.append(scores.clone())
        return scores


def measure(
    model: PreTrainedModel, work: Workload, device: torch.device, micro_batch: int | None = None
) -> Timing:
    """Warm up with two tokens after short prompts, then generate greedily `repeat` times.

    `micro_batch`: sequences of a micro-batch of an offloaded model; None: one batch.
    """
    clock = Clock(device)
    # No end token: every run makes all its tokens.
    model.generation_config = GenerationConfig(pad_token_id=0)
    prompts = work.prompts(model.config.get_text_config(decoder=True).vocab_size, device)
    short = prompts[:, : min(WARM_UP_PROMPT, work.prompt)].contiguous()
    _generate(model, short, WARM_UP_TOKENS, micro_batch, list)
    timing = Timing()
    for _ in range(work.repeat):
        made: list[_Stamps] = []  # of each micro-batch

        def processors(made: list[_Stamps] = made) -> list[_Stamps]:
            made.append(_Stamps(clock, work.gen))
            return made[-1:]

        clock.synchronize()
        start = clock.stamp()
        output = _generate(model, prompts, work.gen, micro_batch, processors)
        stop = clock.stamp()
        clock.synchronize()
        # The last micro-batch has each token last.
        times = [clock.seconds(start, t) for t in made[-1].stamps]
        timing.prefills.append(times[0])
        steps = [b - a for a, b in itertools.pairwise(times)]
        timing.steps += steps
        timing.later_steps += steps[FIRST_STEPS:]
        timing.totals.append(clock.seconds(start, stop))
        timing.tokens = output[:, work.prompt :].cpu()
        scores = [stamps.scores for stamps in made]
        timing.logits = [torch.cat(of_each).cpu() for of_each in zip(*scores, strict=True)]
        scores.clear()  # the next run finds the memory that this one found
        for stamps in made:
            stamps.scores.clear()
    return timing


def _generate(
    model: Any,
    ids: torch.Tensor,
    new: int,
    micro_batch: int | None,
    processors: Callable[[], list[_Stamps]],
) -> torch.Tensor:
    """All tokens [batch, tokens]; `processors` makes the logits processors of a micro-batch."""

    def generate(rows: torch.Tensor) -> torch.Tensor:
        return model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=new,
            do_sample=False,
            logits_processor=processors(),
        )

    if micro_batch is None:
        return generate(ids)
    calls = [partial(generate, rows) for rows in ids.split(micro_batch)]
    return torch.cat(model.offload.together(calls))


def activation_bytes(
    model: Any, work: Workload, device: torch.device, micro_batch: int | None = None
) -> int:
    """Peak memory of a prefill through the layers beyond what stood before, none of it kept: no
    cache, no logits.
    """
    prompts = work.prompts(model.config.get_text_config(decoder=True).vocab_size, device)

    def prefill(rows: torch.Tensor) -> None:
        model.base_model(rows, attention_mask=torch.ones_like(rows), use_cache=False)

    def run() -> None:
        with torch.no_grad():
            if micro_batch is None:
                prefill(prompts)
            else:
                pieces = prompts.split(micro_batch)
                model.offload.together([partial(prefill, rows) for rows in pieces])

    return peak_of(run, device)
