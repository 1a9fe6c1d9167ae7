"""Products of a few rows with the weights of real models, bare and with what is fused to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels.case import Case, Rates, copies, launches, seconds
from offload.kernels import KernelError, Norm
from offload.kernels.call import current_stream
from offload.kernels.gemm import SkinnyGemm
from offload.kernels.linear import Linear
from offload.kernels.tuning import Choice
from offload.kernels.workspace import Workspace

OP = "gemm"
DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16)
# depth, outputs: OPT-13B, Llama-7B, Llama-2-70B, Qwen2.5-14B.
SHAPES = (
    (5120, 15360),
    (5120, 20480),
    (20480, 5120),
    (5120, 5120),
    (4096, 12288),
    (4096, 22016),
    (11008, 4096),
    (8192, 10240),
    (8192, 57344),
    (28672, 8192),
    (5120, 7168),
    (5120, 27648),
    (13824, 5120),
)
QUICK = ((5120, 5120), (5120, 20480), (4096, 22016))
TINY = (256, 384)  # for a CPU
# What stands around the product in models: name -> norm, bias, activation, gated, residual.
FUSED: dict[str, tuple[str | None, bool, str | None, bool, bool]] = {
    "bare": (None, False, None, False, False),
    "layer norm, bias": ("layer", True, None, False, False),
    "layer norm, bias, relu": ("layer", True, "relu", False, False),
    "rms norm": ("rms", False, None, False, False),
    "rms norm, gated silu": ("rms", False, "silu", True, False),
    "bias, residual": (None, True, None, False, True),
    "residual": (None, False, None, False, True),
}
SPLITS = (1, 2)  # of the depth
FINALISTS = 3  # ways to run that what is fused is tried with


@dataclass
class Weights:
    """Copies of one weight and what goes with it, more than L2 holds; `depth` and `outputs` are the
    weight's, a gated product has half as many outputs."""

    depth: int
    outputs: int
    device: torch.device
    weights: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = copies(self.nbytes, self.device)
        self.weights = [
            torch.empty(self.outputs, self.depth, dtype=DTYPE, device=self.device).normal_(std=0.02)
            for _ in range(count)
        ]
        self.norm_weight = self._random(self.depth)
        self.norm_bias = self._random(self.depth)
        self.bias = self._random(self.outputs)

    @property
    def nbytes(self) -> int:
        return self.depth * self.outputs * DTYPE.itemsize

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(DTYPE)

    def arguments(self, rows: int, what: str) -> dict[str, Any]:
        """Of SkinnyGemm and Linear, less the weight."""
        norm, bias, activation, gated, residual = FUSED[what]
        outputs = self.outputs // 2 if gated else self.outputs
        return {
            "input": self._random(rows, self.depth),
            "out": torch.empty(rows, outputs, dtype=DTYPE, device=self.device),
            "bias": self.bias if bias else None,
            "residual": self._random(rows, outputs) if residual else None,
            "norm": None
            if norm is None
            else Norm(
                "layer" if norm == "layer" else "rms",
                self.norm_weight,
                self.norm_bias if norm == "layer" else None,
            ),
            "activation": activation,
            "gated": gated,
        }


def eager(weights: list[torch.Tensor], a: dict[str, Any]) -> Callable[[int], torch.Tensor]:
    """The same by torch's own functions."""
    activations: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
        None: lambda x: x,
        "relu": functional.relu,
        "silu": functional.silu,
    }
    act = activations[a["activation"]]

    def run(i: int) -> torch.Tensor:
        x, norm = a["input"], a["norm"]
        if norm is not None:
            width = (x.shape[-1],)
            if norm.kind == "layer":
                x = functional.layer_norm(x, width, norm.weight, norm.bias, norm.eps)
            else:
                x = functional.rms_norm(x, width, norm.weight, norm.eps)
        x = functional.linear(x, weights[i], a["bias"])
        if a["gated"]:
            gate, up = x.chunk(2, -1)
            x = act(gate) * up
        else:
            x = act(x)
        return x if a["residual"] is None else a["residual"] + x

    return run


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Every shape and number of rows bare, and some with what models fuse to them."""
    on_gpu = device.type == "cuda"
    shapes = (QUICK if quick else SHAPES) if on_gpu else (TINY,)
    fused = {(5120, 15360): FUSED, (5120, 20480): FUSED, (4096, 22016): FUSED, TINY: FUSED}
    for depth, outputs in shapes:
        weights = Weights(depth, outputs, device)
        workspace = Workspace(device)
        for rows in (1, 16) if quick else ROWS:
            for what in fused.get((depth, outputs), ("bare",)):
                if what != "bare" and rows not in (1, 4):
                    continue
                a = weights.arguments(rows, what)
                calls = [
                    Linear(weight=weight, **a, workspace=workspace, early=on_gpu)
                    for weight in weights.weights
                ]
                plain = eager(weights.weights, a)
                name = f"K{depth} N{outputs} rows {rows}"
                yield Case(
                    op=OP,
                    shape=name if what == "bare" else f"{name} {what}",
                    bytes=weights.nbytes,
                    flop=2.0 * rows * depth * outputs,
                    ours=launches(calls),
                    peers={
                        "cuBLAS" if what == "bare" else "eager": plain,
                        "compile": torch.compile(plain),
                    },
                    copies=len(calls),
                    hbm="read",
                )


@dataclass
class Swept:
    """One way to run one product: microseconds, and the share of the read rate."""

    depth: int
    outputs: int
    rows: int
    what: str
    way: str  # "own", "apart" (the norm in a kernel before it) or "cuBLAS"
    variant: int
    splits: int
    early: bool
    us: float | None
    share: float | None
    error: str = ""

    def __str__(self) -> str:
        share = "-" if self.share is None else f"{self.share:.3f}"
        return f"v{self.variant} s{self.splits} {share}"


class Sweep:
    """Measures every variant of the own kernel on every shape, beside cuBLAS."""

    def __init__(self, device: torch.device, rates: Rates, say: Callable[[str], None]) -> None:
        self._device, self._rates, self._say = device, rates, say
        self._workspace = Workspace(device)
        self.found: list[Swept] = []

    def run(self, wanted: Callable[[str], bool]) -> list[Swept]:
        """Measure the shapes whose names are wanted; prints a line or two for each."""
        for depth, outputs in SHAPES:
            name = f"K{depth} N{outputs}"
            if not wanted(name):
                continue
            weights = Weights(depth, outputs, self._device)
            self._say(
                f"{name}  {weights.nbytes / 1e6:.0f} MB, bound "
                f"{weights.nbytes / self._rates.read * 1e6:.1f} us"
            )
            for rows in ROWS:
                self._shape(weights, rows)
        self._summary()
        return self.found

    def _shape(self, weights: Weights, rows: int) -> None:
        a = weights.arguments(rows, "bare")
        plain = eager(weights.weights, a)
        cublas = self._time(weights, rows, "bare", "cuBLAS", 0, 0, False, plain)
        exact = functional.linear(a["input"].float(), weights.weights[0].float())
        allowed = 2 * (plain(0).float() - exact).abs().max().item()
        try:
            variants = SkinnyGemm(weight=weights.weights[0], **a).variants
        except KernelError as error:
            self._say(f"  rows {rows}: {error}")
            return

        def tried(variant: int, splits: int) -> Swept:
            return self._own(weights, a, rows, "bare", variant, splits, True, exact, allowed)

        own = [tried(v, splits) for v in range(1, variants + 1) for splits in SPLITS]
        own.append(tried(0, 0))  # not right behind the exact product, which leaves clocks low
        working = sorted((s for s in own if s.share), key=lambda s: -(s.share or 0))
        for failed in (s for s in own if s.error):
            self._say(f"  rows {rows} {failed}: FAILED {failed.error}")
        if not working:
            return
        best = working[0]
        late = self._own(weights, a, rows, "bare", best.variant, best.splits, False)
        each: dict[int, list[Swept]] = {}
        for swept in working:
            each.setdefault(swept.variant, []).append(swept)
        self._say(
            f"  rows {rows:2}: best {best}, not early {late.share or 0:.3f}, cuBLAS "
            f"{cublas.share or 0:.3f}, default {each[0][0].share if 0 in each else 0:.3f} | "
            + ", ".join(" ".join(map(str, each[v])) for v in sorted(each) if v)
        )
        if rows in (1, 4, 16):
            costs = [self._cost(weights, rows, what, working) for what in list(FUSED)[1:]]
            self._say(f"           fused cost: {'; '.join(costs)}")

    def _cost(self, weights: Weights, rows: int, what: str, bare: list[Swept]) -> str:
        """What is fused, beside the bare product; a norm also in a kernel before the product."""
        a = weights.arguments(rows, what)
        tries = [
            self._own(weights, a, rows, what, s.variant, s.splits, True) for s in bare[:FINALISTS]
        ]
        fused = min(tries, key=lambda s: s.us or math.inf)
        if not fused.us or not bare[0].us:
            return f"{what} FAILED {fused.error}"
        text = f"{what} {fused.us / bare[0].us - 1:+.1%} v{fused.variant}"
        if a["norm"] is None:
            return text
        apart = self._apart(weights, a, rows, what, bare[0])
        if not apart.us:
            return f"{text}, apart FAILED {apart.error}"
        sign = "<" if fused.us < apart.us else ">"
        return f"{text} {sign} apart {apart.us / bare[0].us - 1:+.1%}"

    def _apart(
        self, weights: Weights, a: dict[str, Any], rows: int, what: str, bare: Swept
    ) -> Swept:
        """The norm's kernel and, as the bare product runs best, the rest behind it."""
        choice = Choice("apart", bare.variant, bare.splits)
        calls = [
            Linear(weight=weight, **a, workspace=self._workspace, early=True, choice=choice)
            for weight in weights.weights
        ]
        return self._time(
            weights, rows, what, "apart", bare.variant, bare.splits, True, launches(calls)
        )

    def _own(
        self,
        weights: Weights,
        a: dict[str, Any],
        rows: int,
        what: str,
        variant: int,
        splits: int,
        early: bool,
        exact: torch.Tensor | None = None,
        allowed: float = math.inf,
    ) -> Swept:
        forced: dict[str, Any] = {"variant": variant, "splits": splits, "early": early}
        try:
            a["out"].fill_(math.nan)
            calls = [
                SkinnyGemm(weight=weight, **a, workspace=self._workspace, **forced)
                for weight in weights.weights
            ]
            if exact is not None:
                calls[0].launch(current_stream(self._device))
                error = (a["out"].float() - exact).abs().max().item()
                if not error <= allowed:  # NaN too
                    raise ValueError(f"wrong by {error:.3g}, allowed {allowed:.3g}")
        except (RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            swept = Swept(
                weights.depth, weights.outputs, rows, what, "own", variant, splits, early,
                None, None, text,
            )  # fmt: skip
            self.found.append(swept)
            return swept
        return self._time(weights, rows, what, "own", variant, splits, early, launches(calls))

    def _time(
        self,
        weights: Weights,
        rows: int,
        what: str,
        way: str,
        variant: int,
        splits: int,
        early: bool,
        run: Callable[[int], Any],
    ) -> Swept:
        us: float | None = None
        text = ""
        count = len(weights.weights)
        try:
            # A best guess is enough to rank; the figures come from the cases.
            [taken] = seconds([run], self._device, count, rounds=3, passes=2, settle=0)
            us = taken * 1e6
        except RuntimeError as error:
            text = " ".join(str(error).split())
        share = us and weights.nbytes / self._rates.read / (us * 1e-6)
        swept = Swept(
            weights.depth, weights.outputs, rows, what, way, variant, splits, early, us, share, text
        )
        self.found.append(swept)
        return swept

    def _summary(self) -> None:
        """How far each variant is behind the best one, over all shapes."""
        bare = [s for s in self.found if s.what == "bare" and s.way == "own" and s.early and s.us]
        for rows in ROWS:
            best: dict[tuple[int, int], float] = {}
            own: dict[int, dict[tuple[int, int], float]] = {}
            for s in bare:
                if s.rows == rows and s.us:
                    shape = (s.depth, s.outputs)
                    best[shape] = min(best.get(shape, math.inf), s.us)
                    times = own.setdefault(s.variant, {})
                    times[shape] = min(times.get(shape, math.inf), s.us)
            line = []
            for variant, times in sorted(own.items()):
                behind = [math.log(times[shape] / best[shape]) for shape in times]
                line.append(f"v{variant} {math.exp(sum(behind) / len(behind)):.3f}")
            if line:
                self._say(f"rows {rows:2}: time over the best, mean of shapes: {', '.join(line)}")
        for what, (norm, *_) in FUSED.items():
            if norm:
                self._say(self._norms(what))
        wins = self._wins()
        if wins:
            self._say(
                f"own kernel at least as quick as cuBLAS: {sum(wins)} of {len(wins)} products"
            )

    def _norms(self, what: str) -> str:
        """How often a norm fused to the product is quicker than one apart."""
        times: dict[tuple[int, int, int], dict[str, float]] = {}
        for s in self.found:
            if s.what == what and s.us:
                ways = times.setdefault((s.depth, s.outputs, s.rows), {})
                ways[s.way] = min(ways.get(s.way, math.inf), s.us)
        both = [ways for ways in times.values() if ways.keys() >= {"own", "apart"}]
        fused = sum(ways["own"] < ways["apart"] for ways in both)
        return f"{what}: fused quicker than apart in {fused} of {len(both)} products"

    def _wins(self) -> list[bool]:
        times: dict[tuple[int, int, int], dict[str, float]] = {}
        for s in self.found:
            if s.what == "bare" and s.us:
                ways = times.setdefault((s.depth, s.outputs, s.rows), {})
                ways[s.way] = min(ways.get(s.way, math.inf), s.us)
        return [
            ways["own"] <= ways["cuBLAS"]
            for ways in times.values()
            if ways.keys() >= {"own", "cuBLAS"}
        ]


def sweep(
    device: torch.device, rates: Rates, wanted: Callable[[str], bool], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure every variant and number of splits; prints as it goes, returns all of it as data."""
    if device.type != "cuda":
        raise ValueError("the sweep needs a CUDA device")
    return [asdict(swept) for swept in Sweep(device, rates, say).run(wanted)]
