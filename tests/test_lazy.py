"""Lazy tensors against real ones: random programs of a loader's operations give equal results, and
nothing is read before its time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from offload.checkpoint.expressions import Deferred, Held, Pieces
from offload.checkpoint.lazy import LazyTensor
from offload.checkpoint.rearranged import MAX_PIECES
from offload.checkpoint.safetensors_header import read_header
from offload.errors import UnsupportedError

SHAPES = [(), (1,), (5,), (12,), (3, 4), (4, 3), (1, 6), (6, 1), (2, 3, 4), (4, 1, 2), (1, 1, 5)]
SHAPES += [(0,), (2, 0, 3), (2, 2, 2, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 200, shape, generator=generator)
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, LazyTensor]]:
    """Real tensors and their lazy counterparts, over one real file."""
    real = {
        f"{i}": random_tensor(shape, DTYPES[i % len(DTYPES)], i)
        for i, shape in enumerate(SHAPES * len(DTYPES))
    }
    file = tmp_path_factory.mktemp("lazy") / "tensors.safetensors"
    save_file(real, file)
    extents = read_header(str(file))[0]
    return {name: (tensor, LazyTensor.of(extents[name])) for name, tensor in real.items()}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of all reads from now on."""
    found: list[int] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        found.append(offset)
        return preadv(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", spy)
    return found


def same(lazy: LazyTensor, real: torch.Tensor) -> None:
    assert isinstance(lazy, LazyTensor)
    assert (lazy.shape, lazy.dtype) == (real.shape, real.dtype)
    value = lazy.read()
    assert type(value) is torch.Tensor and value.is_contiguous()
    assert torch.equal(value, real)


# ---- programs -----------------------------------------------------------------------------------

Step = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def on(index: int, work: Callable[[torch.Tensor], Any]) -> Step:
    """Append what `work` makes of one of the tensors so far."""

    def step(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        result = work(tensors[index])
        return list(result) if isinstance(result, (list, tuple)) else [result]

    return step


@st.composite
def dims(draw: st.DrawFn, count: int) -> int:
    """A dimension, from either end."""
    return draw(st.integers(-count, count - 1))


@st.composite
def steps(draw: st.DrawFn, tensors: list[torch.Tensor]) -> Step:
    """One operation that is right for the real tensors at hand."""
    index = draw(st.integers(0, len(tensors) - 1))
    x = tensors[index]
    kinds = ["clone", "to", "unsqueeze", "view", "stack", "flatten", "contiguous", "detach"]
    kinds += ["change", "copy over"]
    if x.dim():
        kinds += ["slice", "narrow", "split", "split sizes", "chunk", "transpose", "permute", "cat"]
        kinds += ["index", "step"]
        if 0 not in x.shape:
            kinds += ["select", "unbind"]
    kind = draw(st.sampled_from(kinds))
    if kind == "clone":
        return on(index, lambda t: t.clone(memory_format=torch.contiguous_format))
    if kind == "contiguous":
        return on(index, torch.Tensor.contiguous)
    if kind == "detach":
        return on(index, torch.Tensor.detach)
    if kind == "to":
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        return on(index, lambda t: t.to(dtype, memory_format=torch.contiguous_format))
    if kind == "change":
        number = draw(st.integers(0, 1))
        return on(index, lambda t: t.fill_(number))
    if kind == "copy over":
        like = [i for i, t in enumerate(tensors) if t.shape == x.shape]
        source = draw(st.sampled_from(like))
        return lambda ts: [ts[index].copy_(ts[source].clone())]
    if kind == "unsqueeze":
        dim = draw(st.integers(-x.dim() - 1, x.dim()))
        return on(index, lambda t: t.unsqueeze(dim))
    if kind == "flatten":
        return on(index, lambda t: t.reshape(-1))
    if kind == "view":
        shape = draw(st.permutations([n for n in x.shape if n != 1]))
        if draw(st.booleans()):
            shape = [*shape, 1]
        return on(index, lambda t: t.reshape(shape))
    if kind == "stack":
        like = [i for i, t in enumerate(tensors) if (t.shape, t.dtype) == (x.shape, x.dtype)]
        chosen = draw(st.lists(st.sampled_from(like), min_size=1, max_size=4))
        dim = draw(st.integers(-x.dim() - 1, x.dim()))
        return lambda ts: [torch.stack([ts[i] for i in chosen], dim)]
    dim = draw(dims(x.dim()))
    size = x.shape[dim]
    if kind == "cat":

        def others(t: torch.Tensor) -> bool:
            mine, its = list(x.shape), list(t.shape)
            if len(mine) != len(its) or t.dtype != x.dtype:
                return False
            mine[dim] = its[dim] = 0
            return mine == its

        like = [i for i, t in enumerate(tensors) if others(t)]
        chosen = draw(st.lists(st.sampled_from(like), min_size=1, max_size=4))
        return lambda ts: [torch.cat([ts[i] for i in chosen], dim)]
    if kind in ("slice", "narrow"):
        low = draw(st.integers(0, size))
        length = draw(st.integers(0, size - low))
        if kind == "narrow":
            return on(index, lambda t: t.narrow(dim, low, length))
        where = [slice(None)] * (dim % x.dim())
        high = draw(st.sampled_from([low + length, low + length - size - 1, size + 5]))
        return on(index, lambda t: t[(*where, slice(low, high))])
    if kind == "step":
        return on(index, lambda t: t[::2])
    if kind == "split":
        count = draw(st.integers(1, max(1, size)))
        return on(index, lambda t: t.split(count, dim))
    if kind == "split sizes":
        cut = draw(st.integers(0, size))
        return on(index, lambda t: t.split([cut, size - cut], dim))
    if kind == "chunk":
        count = draw(st.integers(1, 4))
        return on(index, lambda t: t.chunk(count, dim))
    if kind == "unbind":
        return on(index, lambda t: t.unbind(dim))
    if kind == "select":
        at = draw(st.integers(-size, size - 1))
        return on(index, lambda t: t.select(dim, at))
    if kind == "transpose":
        other = draw(dims(x.dim()))
        return on(index, lambda t: t.transpose(dim, other))
    if kind == "permute":
        order = draw(st.permutations(range(x.dim())))
        return on(index, lambda t: t.permute(order))
    rows = torch.tensor(draw(st.lists(st.integers(0, max(0, x.shape[0] - 1)), max_size=4)) or [0])
    if x.shape[0] == 0:
        rows = rows[:0]
    return on(index, lambda t: t[rows])


@settings(max_examples=500)
@given(st.data())
def test_programs_give_what_real_tensors_give(
    stored: dict[str, tuple[torch.Tensor, LazyTensor]], data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(stored)), min_size=1, max_size=4))
    real = [stored[name][0].clone() for name in names]
    lazy: list[torch.Tensor] = [LazyTensor(stored[name][1].expression) for name in names]
    for _ in range(data.draw(st.integers(1, 6))):
        step = data.draw(steps(real))
        real += step(real)
        lazy += step(lazy)
        real, lazy = real[-12:], lazy[-12:]
    for mine, its in zip(lazy, real, strict=True):
        same(mine, its)


# ---- what stays in the file ---------------------------------------------------------------------


@pytest.fixture
def experts(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, LazyTensor]]:
    """Four experts of [6, 8] each and a few others, as a mixture of experts stores them."""
    real = {f"expert{i}": torch.randn(6, 8) for i in range(4)}
    real |= {"bias": torch.randn(8), "fused": torch.randn(12, 8), "half": torch.randn(4, 4).half()}
    save_file(real, tmp_path / "experts.safetensors")
    extents = read_header(str(tmp_path / "experts.safetensors"))[0]
    return real, {name: LazyTensor.of(extent) for name, extent in extents.items()}


REARRANGEMENTS: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "stacked experts": (4, lambda t: torch.stack([t[f"expert{i}"] for i in range(4)])),
    "concatenated rows": (2, lambda t: torch.cat([t["expert0"], t["expert1"]])),
    "concatenated columns": (12, lambda t: torch.cat([t["expert0"], t["expert1"]], dim=1)),
    "columns from behind": (12, lambda t: torch.cat([t["expert0"], t["expert1"]], dim=-1)),
    "gate and up of every expert": (
        4,
        lambda t: torch.stack(
            [
                torch.cat([t["expert0"], t["expert1"]]),
                torch.cat([t["expert2"], t["expert3"]]),
            ]
        ),
    ),
    "a slice of rows": (1, lambda t: t["fused"][3:9]),
    "rows from behind": (1, lambda t: t["fused"][-4:]),
    "a row": (1, lambda t: t["fused"][5]),
    "an expert of a stack": (1, lambda t: torch.stack([t["expert0"], t["expert1"]])[1]),
    "the first chunk": (1, lambda t: t["fused"].chunk(3)[0]),
    "the last part": (1, lambda t: t["fused"].split(5)[2]),
    "parts of given sizes": (1, lambda t: t["fused"].split([4, 8])[1]),
    "parts of a vector": (1, lambda t: t["bias"].split(3, dim=-1)[1]),
    "an element": (1, lambda t: t["bias"][-2]),
    "a view": (1, lambda t: t["fused"].view(3, 4, 8)),
    "a reshape": (1, lambda t: t["fused"].reshape(-1)),
    "unsqueezed": (1, lambda t: t["bias"].unsqueeze(0).unsqueeze(-1)),
    "squeezed": (1, lambda t: t["bias"].unsqueeze(0).squeeze(0)),
    "row by row": (1, lambda t: t["fused"].unbind(0)[7]),
    "cloned": (1, lambda t: t["bias"].clone().detach().contiguous()),
    "cast to what it is": (1, lambda t: t["half"].to(torch.float16)),
    "moved to where it is": (1, lambda t: t["half"].to("cpu")),
    "nothing of it": (0, lambda t: t["fused"][4:4]),
}


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_rearranged_bytes_stay_in_the_file(
    name: str,
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]],
    reads: list[int],
) -> None:
    real, lazy = experts
    count, work = REARRANGEMENTS[name]
    result = work(lazy)
    assert isinstance(result.expression, Pieces)
    assert len(result.expression.extents) == count
    nbytes = sum(e.nbytes for e in result.expression.extents)
    assert nbytes == result.numel() * result.element_size()
    assert not reads
    same(result, work(real))
    assert len(reads) == count


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cast": lambda t: t["half"].to(torch.float32),
    "cast and stacked": lambda t: torch.stack([t["expert0"].half(), t["expert1"].half()]),
    "transposed": lambda t: t["fused"].t(),
    "transposed and stacked": lambda t: torch.stack([t["expert0"].mT, t["expert1"].mT]),
    "permuted": lambda t: t["fused"].view(3, 4, 8).permute(2, 0, 1),
    "columns": lambda t: t["fused"][:, 2:5],
    "every second row": lambda t: t["fused"][::2],
    "a column": lambda t: t["fused"][:, -1],
    "interleaved": lambda t: torch.stack([t["expert0"], t["expert1"]], 1).flatten(0, 1)[::3],
    "scaled": lambda t: t["bias"] * 2 + 1,
    "looked up": lambda t: t["fused"][torch.tensor([3, 1, 1])],
    "other bits": lambda t: t["half"].view(torch.int16),
    "with a real tensor": lambda t: torch.cat([t["bias"], torch.arange(3.0)]),
    "of two dtypes": lambda t: torch.cat([t["half"].flatten(), t["bias"]]),
    "like it": lambda t: torch.zeros_like(t["fused"]),
    "chosen by value": lambda t: t["bias"][t["bias"] > 0],
    "where it is not zero": lambda t: t["bias"].nonzero(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_bytes_come_out_right(
    name: str, experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]], reads: list[int]
) -> None:
    real, lazy = experts
    result = CHANGES[name](lazy)
    if isinstance(result, LazyTensor):
        assert isinstance(result.expression, Deferred) and not reads
        result = result.read()
    assert torch.equal(result, CHANGES[name](real))


def test_a_stack_of_casts_reads_each_expert_once(
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]], reads: list[int]
) -> None:
    _, lazy = experts
    torch.stack([lazy[f"expert{i}"].half() for i in range(4)]).read()
    assert len(reads) == 4


def test_too_many_pieces_are_rewritten_instead(tmp_path: Path, reads: list[int]) -> None:
    """Columns side by side take two requests a row."""
    rows = MAX_PIECES // 2
    real = {"a": torch.randn(rows + 1, 2), "b": torch.randn(rows + 1, 2)}
    save_file(real, tmp_path / "x.safetensors")
    extents = read_header(str(tmp_path / "x.safetensors"))[0]
    lazy = {name: LazyTensor.of(extent) for name, extent in extents.items()}
    most = torch.cat([lazy["a"][:rows], lazy["b"][:rows]], 1)
    assert isinstance(most.expression, Pieces) and len(most.expression.extents) == MAX_PIECES
    beyond = torch.cat([lazy["a"], lazy["b"]], 1)
    assert isinstance(beyond.expression, Deferred)
    assert not reads
    same(most, torch.cat([real["a"][:rows], real["b"][:rows]], 1))
    same(beyond, torch.cat([real["a"], real["b"]], 1))


# ---- values asked for at once, and refused ------------------------------------------------------


def test_a_value_that_is_needed_now_is_read(
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]], reads: list[int]
) -> None:
    real, lazy = experts
    assert lazy["bias"][2].item() == real["bias"][2].item()
    assert len(reads) == 1
    assert torch.equal(lazy["bias"], real["bias"]) and not torch.equal(
        lazy["bias"], real["bias"] + 1
    )
    assert bool((lazy["bias"] == real["bias"]).all())
    assert float(lazy["fused"].sum()) == float(real["fused"].sum())
    assert lazy["expert0"].shape == (6, 8) and lazy["half"].dtype == torch.float16
    assert "LazyTensor((4, 4), torch.float16, Pieces)" in repr(lazy["half"])


IN_PLACE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "all": lambda t: t["fused"].add_(1),
    "a row": lambda t: t["fused"][3].zero_(),
    "a row of its data": lambda t: t["fused"].data[3].zero_(),
    "columns": lambda t: t["fused"][:, 2:5].clamp_(0),
    "a part of a part": lambda t: t["fused"].view(3, 4, 8)[1].t()[2:].fill_(7),
    "twice": lambda t: (t["fused"].mul_(2), t["fused"][1:3].fill_(7)),
    "from another": lambda t: t["fused"][:6].copy_(t["expert1"]),
    "from a real one": lambda t: t["fused"][2:].copy_(torch.arange(8.0)),
    "by an index": lambda t: t["fused"].__setitem__(torch.tensor([1, 4]), 7.0),
    "by chance": lambda t: (torch.manual_seed(3), t["fused"][1:].normal_()),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_weights_are_changed_in_place(
    name: str,
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]],
    reads: list[int],
    tmp_path: Path,
) -> None:
    """Loading code zeroes rows of padding, in weights that a file holds too."""

    def program(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        before = t["fused"] * 2
        alias = t["fused"].detach()
        views = [t["fused"][1:4], t["fused"][2], t["fused"].t(), t["fused"][:, :3]]
        copies = [t["fused"].clone(), t["fused"].t().contiguous()]
        IN_PLACE[name](t)
        return [t["fused"], before, alias, *views, *copies, t["fused"][2:] + 1]

    real, lazy = experts
    content = (tmp_path / "experts.safetensors").read_bytes()
    with torch.no_grad():
        results = program(dict(lazy))
        assert not reads or name == "by chance"
        for a, b in zip(results, program(real), strict=True):
            same(a, b)  # type: ignore[arg-type]
    assert isinstance(lazy["expert0"].expression, Pieces)
    assert (tmp_path / "experts.safetensors").read_bytes() == content


def test_a_real_tensor_takes_a_weights_values(
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]],
) -> None:
    real, lazy = experts
    target = torch.zeros(8)
    assert target.copy_(lazy["bias"]) is target and torch.equal(target, real["bias"])


@pytest.mark.parametrize(
    "change",
    [lambda t: t.resize_(4), lambda t: torch.add(torch.zeros(8), 1, out=t), lambda t: t.t_()],
)
def test_only_values_of_weights_are_changed(
    change: Callable[[torch.Tensor], Any],
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]],
) -> None:
    real, lazy = experts
    with torch.no_grad(), pytest.raises(UnsupportedError, match="only values can be changed"):
        change(lazy["bias"])
    same(lazy["bias"], real["bias"])


def test_a_held_weight_is_not_written_to() -> None:
    real = torch.ones(4)
    lazy = LazyTensor(Held(real))
    lazy[1:].zero_()
    same(lazy, torch.tensor([1.0, 0, 0, 0]))
    assert torch.equal(real, torch.ones(4))


@pytest.mark.parametrize(
    "make", [torch.empty_like, torch.zeros_like, torch.rand_like, lambda t: t.new_ones(3)]
)
def test_what_is_made_like_a_weight_is_real(
    make: Callable[[torch.Tensor], torch.Tensor],
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]],
    reads: list[int],
) -> None:
    made, want = make(experts[1]["bias"]), make(experts[0]["bias"])
    assert type(made) is torch.Tensor and made.shape == want.shape and made.dtype == want.dtype
    made.fill_(7)
    assert made.device == want.device and made.is_contiguous() and not reads


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda t: t["bias"][8], IndexError),
        (lambda t: t["bias"].select(0, -9), IndexError),
        (lambda t: t["fused"].select(2, 0), IndexError),
        (lambda t: t["fused"].unsqueeze(4), IndexError),
        (lambda t: t["fused"].view(5, 5), RuntimeError),
        (lambda t: torch.cat([t["fused"], t["half"].float()]), RuntimeError),
        (lambda t: torch.stack([t["fused"], t["expert0"]]), RuntimeError),
        (lambda t: t["fused"].split(0), RuntimeError),
        (lambda t: t["fused"].split([5, 5]), RuntimeError),
    ],
)
def test_what_is_wrong_for_a_tensor_is_wrong_here(
    wrong: Callable[[dict[str, Any]], Any],
    error: type[Exception],
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]],
) -> None:
    real, lazy = experts
    with pytest.raises(error):
        wrong(real)
    with pytest.raises(error):
        wrong(lazy)


# ---- held tensors -------------------------------------------------------------------------------


def test_a_held_tensor_is_read_contiguous_until_it_is_released() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 5).t())
    held = Held(weight.data)
    value = held.read()
    assert value.is_contiguous() and torch.equal(value, weight) and not value.requires_grad
    held.release()
    assert (held.shape, held.dtype) == (weight.shape, weight.dtype)
    with pytest.raises(UnsupportedError, match="moved to the store"):
        held.read()


def test_a_file_that_shrinks_is_an_error_with_its_name(
    experts: tuple[dict[str, torch.Tensor], dict[str, LazyTensor]], tmp_path: Path
) -> None:
    _, lazy = experts
    os.truncate(tmp_path / "experts.safetensors", 900)
    stack = torch.stack([lazy[f"expert{i}"] for i in range(4)])
    with pytest.raises(ValueError, match=r"experts\.safetensors ends at byte 900"):
        stack.read()


@pytest.fixture(autouse=True)
def same_weights_every_time() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
