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
    """What an engine can do, and how much work that is for one layer. No field depends on a
    machine's speed: the host's work is counted in launches and calls, whose time is measured.
    Widths count tensors as wide as the residual, and tensors as wide as the MLP.

    A plan uses nothing that its engine cannot do.
    """

    name: str
    kernels: int  # launches of a layer in a decode step
    prompt_kernels: int  # launches of a layer for a part of a prompt, beside `prompt_layers`
    alive: tuple[int, int]  # widths of a prompt's rows that stand at once, where most do
    moved: tuple[int, int]  # widths that are read and written between a prompt's products
    load_kernels: int = 0  # launches that take the host as long as issuing a load does
    mlp_rows: int | None = None  # rows as wide as the MLP that stand at once; None: all
    # Who may attend to keys and values in CPU memory.
    cpu_kv: frozenset[CpuAttention] = field(default=frozenset())
    int8_kv: bool = False  # whether those are int8, with a scale a token and head
    chunks: bool = False  # whether a pass reads prompts in parts, of rows or sequences
    micro_batches: bool = False  # whether prompts take several passes
    lockstep: bool = False  # whether parts of a batch may share a pass, of prompts and of steps
    masks: tuple[int, int] = (0, 0)  # most elements of all masks of padded prompts, of one
    scores: int = 0  # most elements of scores in memory at once; 0: attention is fused
    score_bytes: int = 0  # read and written for each score, until it is a softmax weight
    whole_layers: bool = False  # a layer's quantised weights are made whole together, not singly
    stored_rows: int | None = None  # most rows that quantised weights multiply as stored; None: any
    stored_streamed: bool = True  # also in layers that come through a slot
    own_kernels: bool = False  # whether few rows are multiplied by kernels measured as `few_rows`
    graphs: bool = False  # whether runs of resident layers are launched at once in a decode step
    # Whether a step may have two parts, one of which is computed while cores attend for the other.
    overlaps: bool = False
    # Small kernels between the products of a layer in a decode step: with many rows, with few.
    small_kernels: tuple[int, int] = (0, 0)
    piece_kernels: int = 0  # launches for a piece of keys and values that comes up the link
    # Time that the host spends in Python, with that of a layer's calls (`Hardware.prompt_layer`) as
    # the unit: for a part of a prompt in a layer; ahead of a prompt; between the last layer of a
    # step and the first of the next.
    prompt_layers: float = 0
    start_layers: float = 0
    step_layers: float = 0

    def alive_elements(self, rows: int, hidden: int, intermediate: int) -> int:
        """Elements of activations that stand at once, where a layer needs most."""
        wide_rows = rows if self.mlp_rows is None else min(rows, self.mlp_rows)
        return rows * self.alive[0] * hidden + wide_rows * self.alive[1] * intermediate

    def moved_elements(self, hidden: int, intermediate: int) -> int:
        """Elements that one row reads and writes between the products of a layer."""
        return self.moved[0] * hidden + self.moved[1] * intermediate


# Does all that a plan can ask for, with the work of fused kernels.
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
    prompt_kernels=0,
    alive=(7, 3),
    moved=(8, 3),
    mlp_rows=8192,
    cpu_kv=frozenset({CpuAttention.CPU, CpuAttention.GPU}),
    chunks=True,
    masks=(1 << 28, 1 << 26),
    scores=1 << 26,
    # Written in float32; scaled, shifted, masked and normalised in place; rounded, and read again.
    score_bytes=4 + 4 * 8 + 6 + 2,
    whole_layers=True,
    stored_rows=64,
    stored_streamed=False,
    own_kernels=True,
    graphs=True,
    overlaps=True,
    load_kernels=6,
    small_kernels=(6, 2),
    piece_kernels=14,
    # Fitted to prompts and steps of one sequence on H200 hosts, where `Hardware.prompt_layer` is
    # 0.46 to 0.73 ms, from one moment to the next: 0.48, 4.6 and 0.21 ms with the first.
    prompt_layers=1.05,
    start_layers=10,
    step_layers=0.45,
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
