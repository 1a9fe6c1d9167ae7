"""What runs a model, as far as plans depend on it: what it can do, and what that takes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class CpuAttention(str, enum.Enum):
    """Who attends to the keys and values that rest in CPU memory."""

    NONE = "none"  # no sequence keeps any there
    CPU = "cpu"  # beside the stream of weights
    GPU = "gpu"  # after a way up the link in every pass


@dataclass(frozen=True, slots=True)
class Engine:
    """What it does, and counts of one layer: a machine's speed is in none of them, as what the host
    does is in launches and calls, whose time is measured. Widths are in tensors as wide as the
    residual, and as the MLP.

    A plan has nothing that its engine does not do.
    """

    name: str
    kernels: int  # launches of a layer in a decode step
    prompt_kernels: int  # of a part of a prompt in a layer
    alive: tuple[int, int]  # widths that a prompt's rows keep at once in the widest place
    moved: tuple[int, int]  # widths that are read and written between a prompt's products
    load_kernels: int = 0  # launches that take the host as long as issuing a load does
    mlp_rows: int | None = None  # of those as wide as the MLP that are alive at once; None: all
    cpu_kv: frozenset[CpuAttention] = field(default=frozenset())  # how it may serve them
    int8_kv: bool = False  # whether those are int8 there, with a scale a token and head
    chunks: bool = False  # whether a pass reads prompts some rows, or a sequence, at a time
    micro_batches: bool = False  # whether it takes several passes over prompts, and parts of a step
    lockstep: bool = False  # whether parts of a batch may share a pass, of prompts and of steps
    masks: tuple[int, int] = (0, 0)  # elements at most of all that padded prompts keep, and of one
    scores: int = 0  # elements at most of scores that stand at once, where they do
    score_bytes: int = 0  # that are read and written for one of them, until it is a weight
    whole_layers: bool = False  # whether a layer's quantised weights stand whole at once, or one
    stored_rows: int | None = None  # so many are multiplied with them as they are stored; None: any
    stored_streamed: bool = True  # also where the layer comes through a slot
    own_kernels: bool = False  # whether few rows are multiplied by kernels measured as `few_rows`
    graphs: bool = False  # whether runs of resident layers are launched at once in a decode step
    overlaps: bool = False  # whether one part of a step is computed while CPU cores attend another
    # Small ones of a layer in a decode step that the compute device runs between products, of many
    # rows and of few.
    small_kernels: tuple[int, int] = (0, 0)
    piece_kernels: int = 0  # launches for a piece of keys and values that comes up the link
    # Time that the host spends in Python, in that of one call which is made, checked and launched
    # (`Hardware.call`). A time and no count, as it holds what torch's own operations take and all
    # else that is done: of a part of a prompt in a layer, ahead of a prompt, and from a step's last
    # layer to the next one's first.
    prompt_calls: float = 0
    start_calls: float = 0
    step_calls: float = 0

    def alive_elements(self, rows: int, hidden: int, intermediate: int) -> int:
        """Elements of activations in the widest place of a layer."""
        wide_rows = rows if self.mlp_rows is None else min(rows, self.mlp_rows)
        return rows * self.alive[0] * hidden + wide_rows * self.alive[1] * intermediate

    def moved_elements(self, hidden: int, intermediate: int) -> int:
        """Elements that one row reads and writes between the products of a layer."""
        return self.moved[0] * hidden + self.moved[1] * intermediate


# All that a plan can be about; what an engine that does it all on fused kernels takes.
EVERYTHING = Engine(
    name="any",
    kernels=12,
    prompt_kernels=12,
    alive=(8, 3),
    moved=(8, 3),
    cpu_kv=frozenset({CpuAttention.CPU, CpuAttention.GPU}),
    chunks=True,
    micro_batches=True,
    overlaps=True,
)
FUSED = Engine(
    name="fused",
    kernels=12,
    prompt_kernels=12,
    alive=(7, 3),
    moved=(8, 3),
    mlp_rows=8192,
    cpu_kv=frozenset({CpuAttention.CPU, CpuAttention.GPU}),
    chunks=True,
    masks=(1 << 28, 1 << 26),
    scores=1 << 26,
    # Made in float32; scaled, shifted, masked and made weights in place; rounded, and read again.
    score_bytes=4 + 4 * 8 + 6 + 2,
    whole_layers=True,
    stored_rows=64,
    stored_streamed=False,
    own_kernels=True,
    graphs=True,
    load_kernels=6,
    small_kernels=(6, 2),
    piece_kernels=14,
    # On a host whose calls take 19 us these are 0.53, 2.3 and 0.38 ms. A layer makes a dozen
    # calls for a part of a prompt; torch's products, attention and views are the rest.
    prompt_calls=28,
    start_calls=120,
    step_calls=20,
)
# PyTorch's modules from Python: many small kernels, each of them through its dispatcher.
TRANSFORMERS = Engine(
    name="transformers",
    kernels=240,
    prompt_kernels=240,
    lockstep=True,
    alive=(3, 2),
    moved=(40, 10),
    stored_rows=0,
)
ENGINES = {engine.name: engine for engine in (FUSED, TRANSFORMERS, EVERYTHING)}
