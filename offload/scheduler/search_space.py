"""The settings that a search looks at: points with few free variables, completed to what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.scheduler.engine import CpuAttention
from offload.scheduler.footprint import Footprint, footprint
from offload.scheduler.largest import largest
from offload.scheduler.least import EVERY_ROW, LEAST_ROWS
from offload.scheduler.model_profile import ModelProfile
from offload.scheduler.plan import Budget
from offload.scheduler.setting import Job, Setting

ROWS = (LEAST_ROWS, 512, 1024, 2048, 4096, 8192, 16384)  # of a micro-batch while prompts are read
MANY_ROWS = 2048  # those that a search begins with: enough to fill the matrix units
MOST_SEQUENCES = 4096
UNITS = 1024  # of the sequences in CPU memory, the share that a search moves at least
GRID = 10  # steps over the layers, to begin with
MANY_PARTS = 8  # of a batch in lock step, to begin with


@dataclass(frozen=True, slots=True)
class Point:
    """What a search varies. The rest follows: the GPU is filled with sequences, or with layers
    where the batch is given; CPU memory with layers.
    """

    weights: str
    attention: CpuAttention
    resident: int  # at least that many where the batch is given
    cpu_sequences: int
    spared: int = 0  # layers left in files although CPU memory could hold them without sequences
    rows: int = MANY_ROWS
    passes: int = 1
    depth: int = 1
    parts: int = 1


class Space:
    """All points of one job under one budget."""

    def __init__(self, model: ModelProfile, job: Job, budget: Budget, *, disk: bool) -> None:
        self._model, self._job, self._budget, self._disk = model, job, budget, disk
        self._count = len(model.layers)
        self._engine = model.engine
        self._completed: dict[Point, Setting | None] = {}

    def coarse(
        self,
        weights: Sequence[str],
        ways: Sequence[CpuAttention],
        balance: Callable[[Setting], Iterator[int]],
    ) -> Iterator[Point]:
        """Points spread over the space; `balance` suggests numbers of sequences in CPU memory."""
        steps = {round(self._count * i / GRID) for i in range(GRID + 1)}
        residents = sorted(steps) if self._job.batch is None else [0, self._count]
        for name in weights:
            for way in ways:
                for resident in residents:
                    for rows, passes, parts in self._ways_to_read():
                        point = Point(name, way, resident, 0, rows=rows, passes=passes, parts=parts)
                        yield from self._sequences(point, balance)

    def _ways_to_read(self) -> tuple[tuple[int, int, int], ...]:
        """To begin with: rows and passes in which prompts are read, and parts of a batch."""
        if self._engine.lockstep:
            return ((EVERY_ROW, 1, 1), (EVERY_ROW, 1, MANY_PARTS))
        if not self._engine.chunks:
            return ((EVERY_ROW, 1, 1),)
        return ((MANY_ROWS, 1, 1), (LEAST_ROWS, 4 if self._engine.micro_batches else 1, 1))

    def _sequences(
        self, point: Point, balance: Callable[[Setting], Iterator[int]]
    ) -> Iterator[Point]:
        if point.attention is CpuAttention.NONE:
            yield point
            return
        streamed = self._count - point.resident
        for spared in sorted({0, streamed // 4, streamed // 2, streamed} if self._disk else {0}):
            base = replace(point, spared=spared)
            limit = self._most_sequences(base)
            counts = {limit, limit // 2, limit // 8, 1}
            full = self.complete(replace(base, cpu_sequences=limit)) if limit else None
            if full is not None:
                counts |= {min(limit, n) for n in balance(full)}
            for count in counts - {0}:
                found = replace(base, cpu_sequences=count)
                yield found
                yield from self._in_turns(found)

    def _most_sequences(self, point: Point) -> int:
        """The most sequences that CPU memory holds beside the layers there."""
        limit = self._job.batch or MOST_SEQUENCES
        base = self._setting(replace(point, cpu_sequences=1), point.resident, 0)
        if base is None:
            return 0
        # Beside no layer in CPU memory: how many rest there is settled afterwards.
        base = replace(base, cpu=0, nvme=base.streamed) if self._disk else base
        return largest(
            lambda n: self._need(replace(base, cpu_sequences=n)).cpu, self._budget.cpu, 1, limit
        )

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Points that differ in one variable."""
        for step in (1, 2, 4, 8, 16):
            for change in (-step, step):
                if self._job.batch is None and 0 <= point.resident + change <= self._count:
                    yield replace(point, resident=point.resident + change)
                if self._disk and point.cpu_sequences and point.spared + change >= 0:
                    yield replace(point, spared=point.spared + change)
        if point.cpu_sequences:
            unit = max(1, point.cpu_sequences // UNITS)
            for step in sorted({unit, 4 * unit, 16 * unit, max(1, point.cpu_sequences // 4)}):
                for sequences in (point.cpu_sequences - step, point.cpu_sequences + step):
                    if 0 < sequences <= (self._job.batch or MOST_SEQUENCES):
                        yield replace(point, cpu_sequences=sequences)
        if self._engine.chunks:
            at = ROWS.index(point.rows)
            yield from (replace(point, rows=rows) for rows in ROWS[max(0, at - 1) : at + 2])
        if self._engine.micro_batches:
            yield replace(point, passes=point.passes * 2)
            if point.passes > 1:
                yield replace(point, passes=point.passes // 2)
        if self._engine.lockstep:
            yield replace(point, parts=2 * point.parts)
            yield replace(point, parts=max(1, point.parts // 2))
        yield from (replace(point, depth=depth) for depth in (1, 2) if depth != point.depth)

    def _in_turns(self, point: Point) -> Iterator[Point]:
        """The same in two parts, where those may take turns. They use two layers at once, so it
        takes two loads ahead for the link to have as much time as before.
        """
        if (
            self._engine.overlaps
            and point.attention is CpuAttention.CPU
            and point.cpu_sequences > 1
        ):
            yield replace(point, parts=2, depth=2)

    def complete(self, point: Point) -> Setting | None:
        """The setting of `point` that fills the budgets; None where they cannot hold it."""
        if point not in self._completed:
            given = self._job.batch is not None
            found = self._with_layers(point) if given else self._with_kv(point)
            if found is not None and not self._engine.chunks:
                rows = found.micro_batch if self._engine.lockstep else found.batch
                found = replace(found, prefill_rows=rows * self._job.prompt)
            self._completed[point] = found
        return self._completed[point]

    def _with_layers(self, point: Point) -> Setting | None:
        """For a batch that is given: as many resident layers as the GPU holds."""
        on_gpu = (self._job.batch or 0) - point.cpu_sequences
        if on_gpu < 0:
            return None
        every = self._setting(point, self._count, on_gpu)
        if every is not None and self._holds(every):
            return every
        low, high = point.resident, self._count - 1
        best = None
        while low <= high:
            middle = (low + high) // 2
            setting = self._setting(point, middle, on_gpu)
            # A layer less on the GPU is one more in CPU memory or in files: those have their own.
            if setting is None:
                if self._disk:
                    return None
                low = middle + 1
            elif self._holds(setting):
                best, low = setting, middle + 1
            else:
                high = middle - 1
        return best

    def _with_kv(self, point: Point) -> Setting | None:
        """For a batch to be chosen: as many sequences as the GPU holds beside the layers given."""
        least = 0 if point.cpu_sequences else 1
        setting = self._setting(point, point.resident, least)
        if setting is None or not self._holds(setting):
            return None

        def with_batch(on_gpu: int) -> Setting:
            batch = on_gpu + point.cpu_sequences
            return replace(
                setting,
                gpu_sequences=on_gpu,
                prefill_passes=min(point.passes, batch),
                decode_micro_batches=_parts(point, batch),
            )

        most = MOST_SEQUENCES - point.cpu_sequences
        return with_batch(
            largest(lambda n: self._need(with_batch(n)).device, self._budget.device, least, most)
        )

    def _holds(self, setting: Setting) -> bool:
        return self._need(setting).device <= self._budget.device

    def _need(self, setting: Setting) -> Footprint:
        return footprint(self._model, self._job, setting)

    def _setting(self, point: Point, resident: int, on_gpu: int) -> Setting | None:
        """With as few layers in files as CPU memory allows and the point asks for; None where CPU
        memory cannot hold the rest.
        """
        streamed = self._count - resident
        batch = on_gpu + point.cpu_sequences

        def with_files(nvme: int) -> Setting:
            return Setting(
                weights=point.weights,
                resident=resident,
                cpu=streamed - nvme,
                nvme=nvme,
                depth=min(point.depth, max(0, streamed - 1)),
                gpu_sequences=on_gpu,
                cpu_sequences=point.cpu_sequences,
                attention=point.attention if point.cpu_sequences else CpuAttention.NONE,
                prefill_rows=point.rows,
                prefill_passes=min(point.passes, max(1, batch)),
                decode_micro_batches=_parts(point, batch),
            )

        def need(cpu_layers: int) -> int:
            return self._need(with_files(streamed - cpu_layers)).cpu

        if need(streamed) <= self._budget.cpu:
            least = 0
        elif not self._disk or need(0) > self._budget.cpu:
            return None
        else:
            least = streamed - largest(need, self._budget.cpu, 0, streamed - 1)
        found = with_files(min(streamed, least + point.spared) if self._disk else 0)
        # The first layer that is spared may take less than what disk reads then pass through.
        return found if self._need(found).cpu <= self._budget.cpu else None


def _parts(point: Point, batch: int) -> int:
    """Parts of a batch. Those that take turns each have some of the sequences to which CPU cores
    attend.
    """
    some = point.cpu_sequences if point.attention is CpuAttention.CPU else batch
    return max(1, min(point.parts, some))
