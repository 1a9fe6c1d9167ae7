"""What a trace records of passes, and what one page of it says."""

from __future__ import annotations

import errno
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.scheduler.stream import Stream
from offload.trace import Span, Trace, Track, chrome, picture
from offload.trace.intervals import both, length, union, without

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


def points(found: list[tuple[float, float]]) -> set[int]:
    return {x for start, stop in found for x in range(int(start), int(stop))}


@given(spans, spans)
def test_intervals_are_sets_of_points(a: Any, b: Any) -> None:
    one, other = union(a), union(b)
    assert points(one) == points(a) and length(one) == len(points(a))
    assert one == sorted(one) and all(x[1] < y[0] for x, y in itertools.pairwise(one))
    assert points(both(one, other)) == points(one) & points(other)
    assert points(without(one, other)) == points(one) - points(other)


def span(track: Track, start: float, stop: float, **more: Any) -> Span:
    return Span(track, "x", start, stop, **more)


# Ten seconds: a disk reads 0-3, the link copies 2-4 and, once a slot is free, 7-9; layers are
# computed 4-7 and 9-9.5, and what the CPU attends to is waited for until the end.
PASS = [
    span(Track.PASS, 0, 10),
    span(Track.DISK, 0, 2, nbytes=200),
    span(Track.DISK, 1, 3, nbytes=200),
    span(Track.LINK_UP, 2, 4, nbytes=400),
    span(Track.LINK_UP, 7, 9, nbytes=100, asked=6),
    span(Track.COMPUTE, 0, 4, waits_for="its weights"),
    span(Track.COMPUTE, 4, 7),
    span(Track.COMPUTE, 7, 9, waits_for="its weights"),
    span(Track.COMPUTE, 9, 9.75),
    span(Track.COMPUTE, 9.5, 9.75, waits_for="CPU attention"),
    span(Track.CPU_ATTENTION, 9, 9.75),
    span(Track.HOST, 0, 10),
]


def test_every_second_of_a_pass_has_a_cause() -> None:
    found = picture(PASS)
    assert found is not None and found.seconds == 10
    assert found.busy == {
        Track.DISK: 3, Track.LINK_UP: 4, Track.LINK_DOWN: 0, Track.CPU_ATTENTION: 0.75,
        Track.COMPUTE: 3.5,
    }  # fmt: skip
    assert found.moved[Track.DISK] == 400 and found.moved[Track.LINK_UP] == 500
    assert found.compute == {
        "works": 3.5, "waits for CPU attention": 0.25, "waits for the link": 4.0,
        "waits for the disk": 2.0, "waits for the host": 0.25,
    }  # fmt: skip
    assert found.link == {
        "works": 4, "waits for a free slot": 1, "waits for the disk": 2, "has nothing to do": 3,
    }  # fmt: skip
    assert sum(found.compute.values()) == sum(found.link.values()) == 10


def test_a_layer_that_others_still_use_does_not_work_while_the_next_is_waited_for() -> None:
    found = picture(
        [
            span(Track.PASS, 0, 10),
            span(Track.LINK_UP, 0, 7),
            span(Track.COMPUTE, 1, 9),
            span(Track.COMPUTE, 4, 7, waits_for="its weights"),
            span(Track.COMPUTE, 7, 10),
        ]
    )
    assert found is not None
    assert found.compute["works"] == 6 and found.compute["waits for the link"] == 4


def test_the_page_has_predicted_beside_achieved() -> None:
    found = picture(PASS)
    assert found is not None
    lines = found.lines({"link up": 3.5, "pass": 8.0})
    assert lines[0] == "pass 1 of 1 traced: 10000.00 ms, predicted 8000.00 ms"
    row = next(line for line in lines if line.startswith("  link up") and "moved" not in line)
    assert " ".join(row.split()) == "link up 4000.00 ms 40.0% 3500.00 ms 0 MB 0.00 GB/s"
    drawn = {line.split()[0]: line for line in lines if line.endswith("|")}
    assert drawn.keys() == {"disk", "link", "CPU", "compute"}  # nothing went down
    assert all(len(line) == len(lines[-1]) for line in drawn.values())


def test_the_pass_that_is_drawn_is_the_median() -> None:
    found = picture([span(Track.PASS, a, b) for a, b in ((0, 9), (10, 12), (20, 23))])
    assert found is not None and (found.number, found.passes, found.seconds) == (3, 3, 3)
    assert picture([span(Track.COMPUTE, 0, 1)]) is None


class Gpu:
    """A clock whose device reaches points at times that the test sets, in ticks from the origin."""

    late = True

    def __init__(self) -> None:
        self.now = 0.0
        self.reached: list[float] = []

    def timed_mark(self) -> float:
        self.reached.append(self.now)
        return self.now

    def synchronize(self, point: float) -> None:
        pass

    def elapsed(self, start: float, stop: float) -> float:
        return stop - start


def test_a_stream_tells_when_a_layer_is_waited_for_and_when_it_works() -> None:
    clock = Gpu()
    trace = Trace(clock)

    class Link:
        def start(self, layer: int, slot: int, after: Any) -> int:
            return layer

        def finish(self, load: int) -> None:
            clock.now += 5 if load == 0 else 2

        def drop(self, load: int) -> None: ...
        def mark(self) -> None: ...

    stream = Stream(Link(), 2, [0, 1], 1)
    stream.acquire(0)  # before anybody listens
    stream.trace = trace
    stream.release(0)
    trace.pass_begins()
    for site in (0, 1):
        stream.acquire(site)
        clock.now += 3
        stream.release(site)
    clock.now += 4
    trace.joins()
    clock.now += 1
    trace.joined()
    trace.pass_ends()
    spans = trace.end()
    compute = [(s.name, s.start, s.stop, s.waits_for) for s in spans if s.track is Track.COMPUTE]
    assert compute[:4] == [
        ("waits for layer 0", 5, 10, "its weights"),
        ("layer 0", 10, 13, ""),
        ("waits for layer 1", 13, 15, "its weights"),
        ("layer 1", 15, 18, ""),
    ]
    assert compute[4] == ("resident layers and the rest", 18, 22, "")
    assert compute[5] == ("waits for CPU attention", 22, 23, "CPU attention")
    assert [(s.start, s.stop) for s in spans if s.track is Track.PASS] == [(5, 23)]
    assert Counter(s.name for s in spans if s.track is Track.HOST) == Counter(
        [f"{what} layer {i}" for what in ("waits for", "issues") for i in (0, 1)]
        + ["issues pass", "waits for CPU attention"]
    )


@pytest.mark.parametrize("ahead", [False, True], ids=["behind the host", "waiting for it"])
def test_a_gpu_that_reaches_points_as_they_are_made_waits_for_the_host(ahead: bool) -> None:
    clock = Gpu()
    trace = Trace(clock)
    trace.pass_begins()
    # The host's clock says "now" in any case; the device's says so only where it keeps up.
    clock.now = 0.0 if ahead else 1.0
    clock.now += 1e-6
    trace.pass_ends()
    (one,) = (s for s in trace.end() if s.track is Track.COMPUTE)
    assert one.waits_for == ("the host" if ahead else "")


def test_nothing_is_recorded_after_the_end_or_of_what_began_before() -> None:
    trace = Trace(Gpu())
    trace.computed(3)
    trace.pass_ends()
    trace.waits(4)
    assert trace.end() == []
    trace.computes(4)
    trace.host(Track.DISK, "read", 0.0)
    assert trace.end() == []


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["cpu", "nvme"])
@pytest.mark.parametrize("engine", ["transformers", "fused"])
def test_passes_of_a_model(
    variant_folder: Callable[[str], Path], tmp_path: Path, device: str, where: str, engine: str
) -> None:
    ids = torch.tensor([[5, 6, 7]], device=device)
    file = tmp_path / "trace.json"
    with offload.run(
        variant_folder("llama"),
        device_map=where,
        device=device,
        engine=engine,
        prefetch=1,  # with a slot for each of the three layers none would be loaded twice
    ) as model:
        model.offload.wait_loaded()
        plain = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert model.offload.report().picture is None
        with model.offload.trace(file) as trace:
            traced = model.generate(ids, max_new_tokens=4, do_sample=False)
            with pytest.raises(ValueError, match="traced already"), model.offload.trace():
                pass
        assert torch.equal(traced, plain)
        spans = trace.end()
        model(ids)
        assert trace.end() == spans and model.offload.report().passes == 9
        report = model.offload.report()
        layers, plan = len(model.offload.plan.layers), model.offload.plan

    passes = [s for s in spans if s.track is Track.PASS]
    assert len(passes) == 4
    worked = Counter(s.name for s in spans if s.track is Track.COMPUTE and not s.waits_for)
    assert all(worked[f"layer {i}"] == 4 for i in range(layers))
    moved = {t: sum(s.nbytes for s in spans if s.track is t) for t in Track}
    # Of a few loads the first lay ahead, and the last are for a pass that is not traced.
    whole = 4 * plan.streamed_bytes
    assert whole // 2 <= moved[Track.LINK_UP] <= 2 * whole
    assert (moved[Track.DISK] > 0) == (where == "nvme")
    assert all(s.stop >= s.start for s in spans)
    drawn = report.picture
    assert drawn is not None and drawn.passes == 4
    for parts in (drawn.compute, drawn.link):
        assert sum(parts.values()) == pytest.approx(drawn.seconds)
    assert drawn.compute["works"] > 0
    assert f"pass {drawn.number} of 4 traced" in str(report)
    json.dumps(report.as_dict())

    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == [track.value for track in Track]
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == len(spans) and all(e["dur"] >= 0 for e in shown)
    compute = [e for e in shown if names[e["tid"]] == "compute" and e["cat"] == "work"]
    ends = [(e["ts"], e["ts"] + e["dur"]) for e in compute]
    assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(ends))


def test_resident_layers_are_told_of_by_the_fused_engine(
    variant_folder: Callable[[str], Path],
) -> None:
    names = {"": 0, "model.layers.1": "cpu"}
    with offload.run(
        variant_folder("llama"), device_map=names, device="cpu", engine="fused"
    ) as model:
        with model.offload.trace() as trace:
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
        last = len(model.offload.plan.layers) - 1
    worked = Counter(s.name for s in trace.end() if s.track is Track.COMPUTE and not s.waits_for)
    assert last == 2 and [worked[f"layer {i}"] for i in range(3)] == [3, 3, 3]
    resident = offload.run(variant_folder("llama"), device="cpu", engine="fused")
    with resident, resident.offload.trace() as trace:
        resident.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    worked = Counter(s.name for s in trace.end() if s.track is Track.COMPUTE)
    assert worked["layer 2"] == 1 and worked["layers 0 to 2"] == 2  # the prompt, and steps


def test_a_place_that_cannot_be_written_is_told_before_the_run(
    variant_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with offload.run(variant_folder("llama"), device_map="cpu", device="cpu") as model:
        with pytest.raises(OSError, match="none"), model.offload.trace(tmp_path / "none" / "t"):
            pytest.fail("the block ran")
        with pytest.raises(TypeError, match="got 7"), model.offload.trace(7):  # type: ignore[arg-type]
            pytest.fail("the block ran")
        with model.offload.trace():  # and the one before is over
            pass
        with pytest.raises(TypeError, match="a list of functions, got None"):
            model.offload.together(None)  # type: ignore[arg-type]
    kept = tmp_path / "kept.json"
    with pytest.raises(offload.ClosedError), model.offload.trace(kept):
        pytest.fail("the block ran")
    assert not kept.exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_no_part_of_a_trace_is_left(
    variant_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    events = chrome._events

    def breaks_off(spans: Any) -> Iterator[dict[str, Any]]:
        yield from itertools.islice(events(spans), 20)
        raise error

    monkeypatch.setattr(chrome, "_events", breaks_off)
    monkeypatch.chdir(tmp_path)
    with offload.run(variant_folder("llama"), device_map="cpu", device="cpu") as model:
        with pytest.raises(type(error)) as raised, model.offload.trace("trace.json"):
            model(torch.tensor([[5, 6, 7]]))
            monkeypatch.chdir("/")
        assert not list(tmp_path.iterdir())
        if isinstance(error, OSError):
            assert "the trace cannot be written: No space left" in str(raised.value)
            assert raised.value.filename == str(tmp_path / "trace.json")
        with pytest.raises(OSError, match="'/dev/full'"), model.offload.trace("/dev/full"):
            monkeypatch.setattr(chrome, "_events", events)
        assert Path("/dev/full").exists()
        with pytest.raises(KeyboardInterrupt), model.offload.trace("/dev/full"):
            raise KeyboardInterrupt  # which a full disk does not hide


def test_what_another_thread_copies_is_not_taken_from_computing() -> None:
    clock = Gpu()
    clock.late = False
    trace = Trace(clock)
    trace.pass_begins()
    trace.host(Track.LINK_UP, "copy", 0.0)
    thread = threading.Thread(target=lambda: trace.host(Track.LINK_UP, "copy", 0.0))
    thread.start()
    thread.join()
    spans = trace.end()
    assert sum(s.track is Track.LINK_UP for s in spans) == 2
    assert [s.waits_for for s in spans if s.track is Track.COMPUTE] == ["the link"]
