"""Requests for a layer: every byte once and in its place, whole sectors, few and large."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.checkpoint.expressions import Expression, Held, Pieces
from offload.checkpoint.extent import Extent
from offload.errors import CheckpointError
from offload.store.layout import Layer
from offload.store.reads import MAX_GAP, SECTOR, ReadOp, plan_reads

FILE_BYTES = 3 << 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two files of random bytes, by path."""
    folder = tmp_path_factory.mktemp("reads")
    found = {}
    for name in ("one", "two"):
        content = os.urandom(FILE_BYTES)
        (folder / name).write_bytes(content)
        found[str(folder / name)] = content
    return found


def tensor(*extents: tuple[str, int, int]) -> Pieces:
    """A uint8 tensor of `(file, offset, nbytes)` extents."""
    total = sum(nbytes for _, _, nbytes in extents)
    made = tuple(Extent(file, at, n, torch.uint8, (n,)) for file, at, n in extents)
    return Pieces(made, torch.Size((total,)), torch.uint8)


def layer_of(tensors: Sequence[Expression]) -> Layer:
    return Layer.lay_out("layers.0", [(f"weight{i}", t) for i, t in enumerate(tensors)])


def carry_out(ops: Sequence[ReadOp], layer: Layer) -> tuple[bytearray, list[int]]:
    """The slot after all requests to the real files, and how often each byte was written."""
    slot, written = bytearray(layer.nbytes), [0] * layer.nbytes
    for op in ops:
        descriptor = os.open(op.file, os.O_RDONLY)
        got = os.pread(descriptor, op.nbytes, op.offset)
        os.close(descriptor)
        assert len(got) == op.nbytes, "a request beyond the end of the file"
        for move in op.moves:
            assert move.nbytes > 0 and move.source + move.nbytes <= op.nbytes
            slot[move.target : move.target + move.nbytes] = got[move.source :][: move.nbytes]
            for i in range(move.target, move.target + move.nbytes):
                written[i] += 1
    return slot, written


def check(layer: Layer, ops: Sequence[ReadOp], files: dict[str, bytes], chunk: int) -> None:
    sizes = {file: os.path.getsize(file) for file in files}
    for op in ops:
        assert op.offset % SECTOR == 0 and 0 < op.nbytes <= chunk and op.moves
        assert op.nbytes % SECTOR == 0 or op.offset + op.nbytes == sizes[op.file]
    slot, written = carry_out(ops, layer)
    inside = [0] * layer.nbytes
    for place in layer.places:
        assert isinstance(place.source, Pieces)
        expected = b"".join(
            files[e.file][e.offset : e.offset + e.nbytes] for e in place.source.extents
        )
        assert slot[place.offset : place.offset + place.nbytes] == expected, place.name
        inside[place.offset : place.offset + place.nbytes] = [1] * place.nbytes
    assert written == inside  # every byte once, and no byte of the padding


def joined(ops: Sequence[ReadOp]) -> int:
    """How many separate stretches of files the requests cover."""
    ends = {(op.file, op.offset + op.nbytes) for op in ops}
    return sum((op.file, op.offset) not in ends for op in ops)


@st.composite
def extents(draw: st.DrawFn, names: Sequence[str]) -> list[list[tuple[str, int, int]]]:
    """Tensors of one or more pieces, strewn over the files; pieces may overlap or be empty."""
    sizes = st.integers(0, 40) | st.integers(3000, 9000) | st.just(SECTOR)
    gaps = st.integers(0, 40) | st.integers(3000, 9000) | st.just(MAX_GAP + 5000) | st.just(-7)
    found = []
    for name in names:
        at = draw(st.integers(0, 9000))
        for _ in range(draw(st.integers(0, 5))):
            size = draw(sizes)
            found.append((name, at, size))
            at = max(0, at + size + draw(gaps))
    found = draw(st.permutations(found))
    tensors: list[list[tuple[str, int, int]]] = []
    while found:
        count = draw(st.integers(1, 3))
        tensors.append(list(found[:count]))
        found = found[count:]
    return tensors


@settings(max_examples=150)
@given(data=st.data(), chunk=st.sampled_from([SECTOR, 3 * SECTOR, 1 << 20]))
def test_every_byte_once_and_in_its_place(
    files: dict[str, bytes], data: st.DataObject, chunk: int
) -> None:
    tensors = data.draw(extents(list(files)))
    layer = layer_of([tensor(*pieces) for pieces in tensors])
    ops = plan_reads(layer, chunk, dict.fromkeys(files, FILE_BYTES))
    check(layer, ops, files, chunk)
    # Read more than asked: at most two sectors and small gaps a stretch.
    pieces = [piece for pieces in tensors for piece in pieces if piece[2]]
    gaps = 0
    for file in files:
        mine = sorted((at, at + n) for name, at, n in pieces if name == file)
        end = mine[0][0] if mine else 0
        for start, stop in mine:
            gaps += start - end if 0 < start - end <= MAX_GAP else 0
            end = max(end, stop)
    asked = sum(
        len({i for f, a, n in pieces if f == file for i in range(a, a + n)}) for file in files
    )
    assert sum(op.nbytes for op in ops) < asked + gaps + 2 * SECTOR * max(1, joined(ops))


@pytest.mark.parametrize("chunk", [SECTOR, 5 * SECTOR, 1 << 20])
@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 4097, 123457])
@pytest.mark.parametrize("count", [1, 7])
def test_neighbours_are_read_together(
    files: dict[str, bytes], chunk: int, start: int, count: int
) -> None:
    """A layer as it stands in a checkpoint: one tensor after the other."""
    file = next(iter(files))
    layer = layer_of([tensor((file, start + i * 20001, 20001)) for i in range(count)])
    ops = plan_reads(layer, chunk, {file: FILE_BYTES})
    check(layer, ops, files, chunk)
    first, last = start // SECTOR * SECTOR, -(-(start + count * 20001) // SECTOR) * SECTOR
    assert len(ops) == math.ceil((last - first) / chunk)
    assert sum(op.nbytes for op in ops) == last - first


def test_the_order_in_the_layer_does_not_matter(files: dict[str, bytes]) -> None:
    file = next(iter(files))
    pieces = [tensor((file, i * 20001, 20001)) for i in (3, 0, 2, 1)]
    ops = plan_reads(layer_of(pieces), 1 << 20, {file: FILE_BYTES})
    assert len(ops) == 1
    check(layer_of(pieces), ops, files, 1 << 20)


@pytest.mark.parametrize(("gap", "requests"), [(MAX_GAP, 1), (MAX_GAP + 1, 2)])
def test_small_gaps_are_read_over_and_large_ones_are_not(
    files: dict[str, bytes], gap: int, requests: int
) -> None:
    file = next(iter(files))
    layer = layer_of([tensor((file, 0, 100)), tensor((file, 100 + gap, 100))])
    ops = plan_reads(layer, 1 << 20, {file: FILE_BYTES})
    assert len(ops) == requests
    check(layer, ops, files, 1 << 20)


def test_a_gap_as_large_as_a_request_is_left_out(files: dict[str, bytes]) -> None:
    file = next(iter(files))
    layer = layer_of([tensor((file, 0, 100)), tensor((file, 20 * SECTOR, 100))])
    ops = plan_reads(layer, 2 * SECTOR, {file: FILE_BYTES})
    assert [op.offset for op in ops] == [0, 20 * SECTOR]
    check(layer, ops, files, 2 * SECTOR)


@pytest.mark.parametrize("size", [4096, 4097, 8191, 10000])
def test_the_end_of_a_file_is_the_end_of_a_request(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    file = str(tmp_path / "short")
    Path(file).write_bytes(content)
    layer = layer_of([tensor((file, size - 3, 3)), tensor((file, 1, 50))])
    ops = plan_reads(layer, 1 << 20, {file: size})
    assert max(op.offset + op.nbytes for op in ops) == size
    check(layer, ops, {file: content}, 1 << 20)


def test_a_file_that_became_shorter_is_an_error(files: dict[str, bytes]) -> None:
    file = next(iter(files))
    layer = layer_of([tensor((file, 0, 5000)), tensor((file, 5000, 5000))])
    assert plan_reads(layer, SECTOR, {file: 10000})
    with pytest.raises(CheckpointError, match=rf"{file} has 9999 bytes, .*layers\.0.* 10000"):
        plan_reads(layer, SECTOR, {file: 9999})


def test_what_is_not_in_a_file_cannot_be_planned() -> None:
    layer = layer_of([Held(torch.zeros(3))])
    with pytest.raises(TypeError, match="weight0 is not stored as plain bytes"):
        plan_reads(layer, SECTOR, {})


def test_nothing_to_read(files: dict[str, bytes]) -> None:
    file = next(iter(files))
    assert plan_reads(layer_of([]), SECTOR, {}) == ()
    assert plan_reads(layer_of([tensor((file, 50, 0))]), SECTOR, {file: FILE_BYTES}) == ()


def test_neighbours_without_padding_between_them_move_together(files: dict[str, bytes]) -> None:
    file = next(iter(files))
    layer = layer_of([tensor((file, 100 + i * 512, 512)) for i in range(6)])
    [op] = plan_reads(layer, 1 << 20, {file: FILE_BYTES})
    assert len(op.moves) == 1  # 512 is a multiple of the alignment
