"""Chooses how a job runs: the fastest setting that the budgets hold, and the simpler of equals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import BudgetError
from offload.scheduler.engine import CpuAttention
from offload.scheduler.estimate import Estimate, estimate
from offload.scheduler.hardware import Hardware
from offload.scheduler.least import cpu_attentions, least_cpu, least_device
from offload.scheduler.model_profile import PRECISIONS, ModelProfile
from offload.scheduler.plan import Budget
from offload.scheduler.search_space import Point, Space
from offload.scheduler.setting import Goal, Job, Setting
from offload.sizes import format_size

TIE = 0.03  # the model of time is no more precise: within it the simpler plan is taken
STARTS = 8  # kinds of plans that are searched closely
# The share of the predicted score that is given up for what absorbs delays that no prediction sees:
# a second load ahead, and more rows of prompts at once, as the host has less to issue then.
SPARE_LOAD, MORE_ROWS = 0.005, 0.01


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner chose, and the best plan of another kind beside it."""

    choice: Estimate
    runner_up: Estimate | None
    goal: Goal
    budget: Budget
    tried: int  # settings whose time was predicted

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "goal": self.goal.value,
            "budget": {"device": self.budget.device, "cpu": self.budget.cpu},
            "choice": self.choice.as_dict(),
            "runner_up": None if self.runner_up is None else self.runner_up.as_dict(),
            "full": list(self.choice.full(self.budget)),
            "tried": self.tried,
        }


def plan_job(
    model: ModelProfile,
    hardware: Hardware,
    budget: Budget,
    job: Job,
    goal: Goal = Goal.THROUGHPUT,
    weights: Sequence[str] = (),
) -> Planned:
    """The best setting of `job`, with weights in one of the precisions named (the model's own
    where none is).

    A job without a batch has one sequence where the goal is not throughput. Raises BudgetError,
    which says the least budget that would do, HardwareError for a rate that is needed and not
    known, and ValueError for precisions that are not, or sequences longer than the model can read.
    """
    names = tuple(dict.fromkeys(weights)) or (model.native,)
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise ValueError(f"weights {unknown[0]!r} are not known; choose of {', '.join(PRECISIONS)}")
    if model.positions is not None and job.length > model.positions:
        raise ValueError(
            f"{model.name} has {model.positions} positions, fewer than the {job.prompt} + "
            f"{job.gen} tokens of a sequence: plan for fewer"
        )
    if job.batch is None and goal is not Goal.THROUGHPUT:
        job = Job(job.prompt, job.gen, 1)
    least = least_device(model, hardware, job, names, budget.cpu)
    if least[0] > budget.device:
        if hardware.link_up is None:
            raise hardware.lacks("the rate 'link_up', without which nothing moves", "link_up")
        raise BudgetError(_refusal(model, hardware, budget, job, names, least[0]))
    search = _Search(model, hardware, budget, job, goal)
    if goal is Goal.FITS:
        fastest = plan_job(model, hardware, budget, job, Goal.LATENCY, names)
        smallest = estimate(model, hardware, job, least[1])
        return Planned(smallest, fastest.choice, goal, budget, fastest.tried + 1)
    search.start([least[1]], names)
    return search.result()


class _Search:
    """One search: the best setting of every kind, found coarsely and then step by step."""

    def __init__(
        self, model: ModelProfile, hardware: Hardware, budget: Budget, job: Job, goal: Goal
    ) -> None:
        self._model, self._hardware, self._budget = model, hardware, budget
        self._job, self._goal = job, goal
        self._space = Space(model, job, budget, disk=hardware.disk is not None)
        self._best: dict[tuple, Estimate] = {}  # by kind
        self._known: dict[Setting, float] = {}  # bounds of scores
        self._exact: dict[Setting, Estimate] = {}

    def start(self, seeds: Sequence[Setting], weights: Sequence[str]) -> None:
        """Search all kinds of plans with these precisions; `seeds` are known to fit."""
        for seed in seeds:
            self._offer(seed)
        starts: dict[tuple, tuple[float, Point]] = {}
        ways = (CpuAttention.NONE, *cpu_attentions(self._model, self._hardware))
        for point in self._space.coarse(weights, ways, self._balance):
            setting = self._space.complete(point)
            if setting is not None and self._reachable(setting):
                bound = self._bound(setting)
                if bound > starts.get(setting.kind, (0.0, None))[0]:
                    starts[setting.kind] = (bound, point)
        for _, point in sorted(starts.values(), key=lambda pair: -pair[0])[:STARTS]:
            self._climb(point)
        if self._job.batch is None:
            for found in list(self._best.values()):
                self._offer_few_rows(found.setting)

    def _offer_few_rows(self, setting: Setting) -> None:
        """Offer `setting` with no more sequences than products of few rows take. Points have as
        many as the GPU holds, and a few more than those may take several times as long.
        """
        kept = setting.precision.name
        if not setting.precision.quantised:
            kept = self._model.dtype(setting.precision)
        rows = self._hardware.most_few_rows(kept)
        batch = rows * setting.decode_micro_batches
        if not setting.cpu_sequences and 0 < batch < setting.batch:
            passes = min(setting.prefill_passes, batch)
            self._offer(replace(setting, gpu_sequences=batch, prefill_passes=passes))

    def result(self) -> Planned:
        """The plan chosen from what was found, and the best of another kind."""
        found = sorted(self._best.values(), key=lambda e: -e.score(self._goal))
        best = found[0].score(self._goal)
        equal = [e for e in found if e.score(self._goal) >= best * (1 - TIE)]
        choice = min(equal, key=lambda e: (e.setting.complexity, -e.score(self._goal)))
        if self._job.batch is None:
            choice = self._fewer(choice, best * (1 - TIE))
        other = next((e for e in found if e.setting.family != choice.setting.family), None)
        return Planned(choice, other, self._goal, self._budget, len(self._known))

    def _fewer(self, found: Estimate, least: float) -> Estimate:
        """`found` with its sequences halved for as long as the score is no less than `least`, and
        decode steps give about as many tokens: more than keep the machine busy only take longer.
        """
        steps = found.decode_rate * (1 - TIE)
        while found.setting.batch > 1:
            half = self._offer(found.setting.halved())
            if half.score(self._goal) < least or half.decode_rate < steps:
                break
            found = half
            least = max(least, half.score(self._goal) * (1 - TIE))
            steps = max(steps, half.decode_rate * (1 - TIE))
        return found

    def _climb(self, point: Point) -> None:
        """Move from `point` to better neighbours until there is none."""
        setting = self._space.complete(point)
        assert setting is not None
        here = self._offer(setting)
        moved = True
        while moved:
            moved = False
            for trial in self._space.neighbours(point):
                setting = self._space.complete(trial)
                if setting is None or not self._reachable(setting):
                    continue
                wanted = here.score(self._goal)
                if trial.rows == point.rows:
                    wanted *= _threshold(here.setting, setting)
                else:
                    wanted *= _favoured(trial.rows > point.rows, MORE_ROWS)
                if self._bound(setting) <= wanted:
                    continue
                there = self._offer(setting)
                if there.score(self._goal) > wanted:
                    point, here, moved = trial, there, True
        # The climb may end below the best that it met, by what was given up for what is favoured.
        best = self._best[here.setting.kind]
        if here.score(self._goal) >= best.score(self._goal) * (1 - SPARE_LOAD - MORE_ROWS):
            self._best[here.setting.kind] = here

    def _reachable(self, setting: Setting) -> bool:
        """Whether the rates that the setting needs are known."""
        return not setting.streamed or self._hardware.link_up is not None

    def _bound(self, setting: Setting) -> float:
        if setting not in self._known:
            guess = estimate(self._model, self._hardware, self._job, setting, exact=False)
            self._known[setting] = guess.score(self._goal)
        return self._known[setting]

    def _offer(self, setting: Setting) -> Estimate:
        if setting not in self._exact:
            self._known.setdefault(setting, 0.0)
            self._exact[setting] = estimate(self._model, self._hardware, self._job, setting)
        found = self._exact[setting]
        best = self._best.get(setting.kind)
        if best is None or found.score(self._goal) > best.score(self._goal):
            self._best[setting.kind] = found
        return found

    def _balance(self, setting: Setting) -> Iterator[int]:
        """Sequences in CPU memory whose attention takes as long as the stream of weights."""
        if setting.attention is CpuAttention.CPU and setting.cpu_sequences:
            found = estimate(self._model, self._hardware, self._job, setting, exact=False).decode
            stream = max(found.busy.get("link up", 0.0), found.busy.get("disk", 0.0))
            yield int(setting.cpu_sequences * stream / found.busy["CPU attention"])


def _threshold(old: Setting, new: Setting) -> float:
    """The multiple of the score of `old` that a neighbour which reads prompts the same way must
    exceed.
    """
    if new.depth != old.depth and max(new.depth, old.depth) == 2:
        return _favoured(new.depth > old.depth, SPARE_LOAD)
    return 1 + (TIE if new.complexity > old.complexity else 1e-6)


def _favoured(more: bool, given: float) -> float:
    """Such a multiple for a change that is favoured: to more of it, a share `given` of the score
    may be given up; back to less, twice that must be gained, so that a climb does not go to and
    fro.
    """
    return 1 - given if more else 1 + 2 * given


def _refusal(
    model: ModelProfile,
    hardware: Hardware,
    budget: Budget,
    job: Job,
    weights: Sequence[str],
    device: int,
) -> str:
    """Why the budgets do not do. `device`: the least of GPU memory beside this CPU memory."""
    needs = [f"{device} bytes ({format_size(device)}) of GPU memory with this CPU memory"]
    cpu = least_cpu(model, hardware, job, weights, budget.device)
    if cpu is not None:
        needs.append(f"{cpu[0]} bytes ({format_size(cpu[0])}) of CPU memory with this GPU memory")
    room = f"{format_size(budget.device)} of GPU memory and {format_size(budget.cpu)} of CPU memory"
    return refusal(model, f"{room} hold", job, weights, ", or ".join(needs))


def refusal(model: ModelProfile, room: str, job: Job, weights: Sequence[str], needed: str) -> str:
    """Why there is no plan: the `room` that there is holds none, and what is `needed` at least."""
    sequences = job.batch or 1
    return (
        f"{model.name}: {room} no plan for {sequences} sequence{'s' if sequences > 1 else ''} of "
        f"{job.prompt} + {job.gen} tokens in {', '.join(weights)}; the least that would do is "
        f"{needed}. Raise max_memory, lower the batch or the lengths, or take smaller weights "
        "(int4)"
    )
