"""Every variant of the own product of a few rows, on every shape, beside cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from offload.bench.kernels import gemm
from offload.bench.kernels.case import Rates, launches, seconds
from offload.kernels import KernelError
from offload.kernels.call import current_stream
from offload.kernels.choices import Choice
from offload.kernels.gemm import SkinnyGemm
from offload.kernels.linear import Linear
from offload.kernels.workspace import Workspace

SPLITS = (1, 2)  # of the depth
FINALISTS = 3  # ways to run that what is fused is tried with


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
        for depth, outputs in gemm.SHAPES:
            name = f"K{depth} N{outputs}"
            if not wanted(name):
                continue
            weights = gemm.Weights(depth, outputs, self._device)
            self._say(
                f"{name}  {weights.nbytes / 1e6:.0f} MB, bound "
                f"{weights.nbytes / self._rates.read * 1e6:.1f} us"
            )
            for rows in gemm.ROWS:
                self._shape(weights, rows)
        self._summary()
        return self.found

    def _shape(self, weights: gemm.Weights, rows: int) -> None:
        a = weights.arguments(rows, "bare")
        plain = gemm.eager(weights.weights, a)
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
            costs = [self._cost(weights, rows, what, working) for what in list(gemm.FUSED)[1:]]
            self._say(f"           fused cost: {'; '.join(costs)}")

    def _cost(self, weights: gemm.Weights, rows: int, what: str, bare: list[Swept]) -> str:
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
        self, weights: gemm.Weights, a: dict[str, Any], rows: int, what: str, bare: Swept
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
        weights: gemm.Weights,
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
        weights: gemm.Weights,
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
        for rows in gemm.ROWS:
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
        for what, (norm, *_) in gemm.FUSED.items():
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
    return [asdict(swept) for swept in Sweep(device, rates, say).run(wanted)]
