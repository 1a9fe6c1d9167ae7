"""The variables of a planned run: what is decided before it begins."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload.scheduler.engine import CpuAttention
from offload.scheduler.model_profile import PRECISIONS, Precision
from offload.scheduler.plan import Tier, spread

MOST = 1 << 30  # tokens, and sequences


class Goal(str, enum.Enum):
    """What a plan is to be best at."""

    THROUGHPUT = "throughput"  # generated tokens a second of the whole job
    LATENCY = "latency"  # seconds of the whole job
    FITS = "fits"  # the least memory of the compute device


@dataclass(frozen=True, slots=True)
class Job:
    """Sequences of one length: `prompt` tokens in, `gen` out; `batch` None lets the planner
    choose how many run at once.
    """

    prompt: int
    gen: int
    batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "gen", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; a job needs at least 1")
            if value is not None and value > MOST:
                raise ValueError(f"{name} is {value}; plans are made for at most {MOST}")

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.gen


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a job."""

    weights: str  # a name of PRECISIONS
    resident: int  # layers on the compute device
    cpu: int  # layers in CPU memory
    nvme: int  # layers in files
    depth: int  # loads ahead of the layer in use
    gpu_sequences: int  # that keep keys and values on the GPU
    cpu_sequences: int  # that keep them in CPU memory
    attention: CpuAttention  # for the latter
    prefill_rows: int  # tokens of a micro-batch
    prefill_passes: int  # in which the prompts are read, each over all weights
    decode_micro_batches: int  # of a pass

    @property
    def precision(self) -> Precision:
        """Of the weights."""
        return PRECISIONS[self.weights]

    @property
    def batch(self) -> int:
        """Sequences that run at once."""
        return self.gpu_sequences + self.cpu_sequences

    @property
    def in_turns(self) -> bool:
        """Whether micro-batches of a step take turns: one is computed while CPU cores attend for
        the other. Else each is a call of `generate` of its own, in lock step with the others.
        """
        return self.attention is CpuAttention.CPU and self.decode_micro_batches > 1

    @property
    def micro_batch(self) -> int:
        """Sequences of one call of `generate`, prompts and all."""
        return self.batch if self.in_turns else -(-self.batch // self.decode_micro_batches)

    @property
    def prefill_batch(self) -> int:
        """Sequences whose prompts one pass reads."""
        return -(-self.batch // self.prefill_passes)

    @property
    def streamed(self) -> int:
        """Layers that move in every pass."""
        return self.cpu + self.nvme

    @property
    def slots(self) -> int:
        """Slots that the depth takes."""
        return min(self.depth + 1, self.streamed)

    @property
    def kind(self) -> tuple[str, str, bool, bool, bool]:
        """What tells plans apart that are no mere shifts of numbers."""
        moves = self.streamed > 0, self.nvme > 0
        return (self.weights, self.attention.value, *moves, self.in_turns)

    @property
    def family(self) -> tuple[str, str, bool, bool]:
        """The kind, but for what concerns less than an eighth of the layers or sequences."""
        some = 8 * self.cpu_sequences >= self.batch
        files = 8 * self.nvme >= self.resident + self.streamed
        return (self.weights, self.attention.value if some else "", self.streamed > 0, files)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Less is simpler: weights that keep their numbers, nothing that moves, keys and values
        where they are made, no files, few micro-batches and passes.
        """
        return (
            -self.precision.bits,
            int(self.streamed > 0),
            int(self.cpu_sequences > 0),
            int(self.nvme > 0),
            self.decode_micro_batches,
            self.prefill_passes,
        )

    def halved(self) -> Setting:
        """The same with half the sequences, in half as many parts: none has more of them."""
        on_cpu, parts = self.cpu_sequences // 2, self.decode_micro_batches
        return replace(
            self,
            gpu_sequences=-(-self.gpu_sequences // 2),
            cpu_sequences=on_cpu,
            attention=self.attention if on_cpu else CpuAttention.NONE,
            decode_micro_batches=min(parts, on_cpu) if self.in_turns else -(-parts // 2),
            prefill_passes=-(-self.prefill_passes // 2),
        )

    def tiers(self) -> tuple[Tier, ...]:
        """The tier of every layer, each kind spread evenly over the model."""
        count = self.resident + self.streamed
        order = spread(count)
        found = [Tier.NVME] * count
        for index in order[: self.resident]:
            found[index] = Tier.DEVICE
        for index in order[self.resident : self.resident + self.cpu]:
            found[index] = Tier.CPU
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            **asdict(self),
            "attention": self.attention.value,
            "batch": self.batch,
            "prefill_batch": self.prefill_batch,
            "tiers": [tier.value for tier in self.tiers()],
        }
