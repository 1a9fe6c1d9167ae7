"""Packed folders: what any reader of safetensors finds in them, and what kills, full disks and
other processes leave behind.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from offload.checkpoint.expressions import Deferred, Expression, Held, Pieces
from offload.checkpoint.extent import Extent
from offload.errors import BudgetError
from offload.store.layout import Layer
from offload.store.pack import MANIFEST, Pack, live_pack, needs_pack

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
SECTOR = 4096
processes = multiprocessing.get_context("fork")  # a fresh interpreter would import torch first


def layer(tensors: dict[str, torch.Tensor], number: int = 0) -> Layer:
    return Layer.lay_out(f"layers.{number}", [(name, Held(t)) for name, t in tensors.items()])


def layers(count: int = 4, size: int = 3000) -> list[Layer]:
    """Layers of two tensors; always the same numbers."""
    made = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        tensors = {
            f"layers.{i}.a": torch.randn(size, generator=generator),
            f"layers.{i}.b": torch.randn(7, 5, generator=generator).half(),
        }
        made.append(layer(tensors, i))
    return made


def check(sources: dict[str, Expression], expected: list[Layer]) -> None:
    """Every tensor is in a file now, with the right bytes."""
    wanted = [place for each in expected for place in each.places]
    assert set(sources) == {place.name for place in wanted}
    for place in wanted:
        source = sources[place.name]
        assert isinstance(source, Pieces) and len(source.extents) == 1
        assert (source.shape, source.dtype) == (place.shape, place.dtype)
        assert torch.equal(source.read(), place.source.read()), place.name


def times(folder: Path) -> dict[str, int]:
    return {f.name: f.stat().st_mtime_ns for f in folder.glob("*.safetensors")}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- what is in it ------------------------------------------------------------------------------

ODD: dict[str, torch.Tensor] = {
    "bytes": torch.arange(7, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "double": torch.randn(3, dtype=torch.float64),
    "half": torch.randn(5).half(),
    "single": torch.randn(2, 3),
    "brain": torch.randn(1, 1, 3).bfloat16(),
    "whole": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    'na"me.ünï': torch.randn(3).t(),
    "transposed": torch.randn(4, 3).t(),
}


def test_any_reader_opens_it(tmp_path: Path) -> None:
    """Sizes are odd, but each tensor stands where readers that map files want it."""
    pack = Pack(tmp_path, "key")
    sources = pack.write([layer(ODD)])
    check(sources, [layer(ODD)])
    [file] = pack.folder.glob("*.safetensors")
    loaded = load_file(file)
    assert set(loaded) == set(ODD)
    for name, tensor in ODD.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), bytes_of(tensor)), name
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        for name, tensor in ODD.items():
            assert torch.equal(bytes_of(opened.get_tensor(name)), bytes_of(tensor)), name
    with safetensors.safe_open(file, "np") as opened:
        assert opened.get_tensor("transposed").tolist() == ODD["transposed"].tolist()
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert start % SECTOR == 0
    header = json.loads(content[8:start])
    for name, tensor in ODD.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("count", [1, 300])
def test_data_start_on_a_sector_however_long_the_header(tmp_path: Path, count: int) -> None:
    tensors = {f"a.rather.long.name.{i}": torch.randn(5) for i in range(count)}
    sources = Pack(tmp_path, "key").write([layer(tensors)])
    check(sources, [layer(tensors)])
    first = sources["a.rather.long.name.0"]
    assert isinstance(first, Pieces) and first.extents[0].offset % SECTOR == 0


def test_only_what_needs_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(torch.randn(16).numpy().tobytes())  # none of them NaN
    stored = Pieces(
        (Extent(str(tmp_path / "weights"), 0, 64, torch.float32, (16,)),),
        torch.Size((16,)),
        torch.float32,
    )
    changed = Deferred(stored.read().half, (), {}, None, torch.Size((16,)), torch.float16)
    mixed = Layer.lay_out("layers.0", [("kept", stored), ("cast", changed)])
    plain = Layer.lay_out("layers.1", [("kept too", stored)])
    assert [p.name for p in needs_pack(mixed)] == ["cast"] and needs_pack(plain) == []
    pack = Pack(tmp_path / "packs", "key")
    sources = pack.write([plain, mixed])
    assert set(sources) == {"cast"}
    assert [f.name for f in pack.folder.glob("*.safetensors")] == ["layer-00001.safetensors"]
    moved = mixed.with_sources(sources)
    assert needs_pack(moved) == [] and moved.places[0].source is stored
    assert torch.equal(moved.places[1].source.read(), stored.read().half())


def test_manifest_and_progress(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    pack = Pack(tmp_path, "key")
    pack.write(layers(3), progress=lambda *step: steps.append(step))
    manifest = json.loads((pack.folder / MANIFEST).read_text())
    assert manifest["version"] == 1 and manifest["key"] == "key"
    sizes = {f.name: f.stat().st_size for f in pack.folder.glob("*.safetensors")}
    assert manifest["files"] == sizes and len(sizes) == 3
    each = 3000 * 4 + 35 * 2
    assert steps == [(i * each, 3 * each) for i in (1, 2, 3)]


def test_the_log_is_told_every_few_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(key: str) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "offload.store.pack"):
            Pack(tmp_path, key).write(layers(3))
        return [record.getMessage() for record in caplog.records]

    monkeypatch.setattr("offload.progress.SAY_EVERY", 1e9)
    [started] = said("quick")
    assert re.fullmatch(rf"packing [\d.]+ KiB into {tmp_path}/quick", started)
    monkeypatch.setattr("offload.progress.SAY_EVERY", 0.0)
    assert said("slow")[1:] == [f"packed {part} KiB of 35.36 KiB" for part in (11.79, 23.57, 35.36)]
    assert said("slow") == []  # nothing was written


# ---- what is there already ----------------------------------------------------------------------


def test_a_second_run_writes_nothing(tmp_path: Path) -> None:
    Pack(tmp_path, "key").write(layers())
    before = times(tmp_path / "key")
    steps: list[object] = []
    sources = Pack(tmp_path, "key").write(layers(), progress=lambda *step: steps.append(step))
    assert times(tmp_path / "key") == before and not steps
    check(sources, layers())


def test_a_whole_pack_is_used_where_nothing_can_be_written(small_disk: Path) -> None:
    Pack(small_disk, "key").write(layers())
    none = Layer("in memory", (), 0)
    Pack(small_disk, "two runs").write([*layers(3), none, none])
    Pack(small_disk, "two runs").write([none, none, none, *layers(5)[3:]])
    (small_disk / "key" / "pack.lock").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    check(Pack(small_disk, "key").write(layers()), layers())
    check(Pack(small_disk, "two runs").write(layers(5)), layers(5))
    assert not (small_disk / "key" / "pack.lock").exists()
    with pytest.raises(OSError, match="is not writable") as caught:
        Pack(small_disk, "key").write(layers(9))
    assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"key": "other"}, {"files": {"layer-00000.safetensors": 1}}, "?", "[]"],
)
def test_a_manifest_of_something_else_is_written_anew(
    tmp_path: Path, change: dict[str, Any] | str
) -> None:
    pack = Pack(tmp_path, "key")
    pack.write(layers())
    before = times(pack.folder)
    manifest = (pack.folder / MANIFEST).read_bytes()
    text = change if isinstance(change, str) else json.dumps(json.loads(manifest) | change)
    (pack.folder / MANIFEST).write_text(text)
    check(pack.write(layers()), layers())
    assert (pack.folder / MANIFEST).read_bytes() == manifest and times(pack.folder) == before


@pytest.mark.parametrize("size", [0, 7, 100, 4096, 5000, "one byte less", "one byte more"])
def test_a_damaged_file_is_written_anew(tmp_path: Path, size: int | str) -> None:
    pack = Pack(tmp_path, "key")
    pack.write(layers())
    before = times(pack.folder)
    file = pack.folder / "layer-00002.safetensors"
    whole = file.stat().st_size
    os.truncate(file, {"one byte less": whole - 1, "one byte more": whole + 1}.get(str(size), size))
    check(Pack(tmp_path, "key").write(layers()), layers())
    after = times(pack.folder)
    assert {n for n in after if after[n] != before[n]} == {"layer-00002.safetensors"}


def test_a_file_of_other_tensors_is_written_anew(tmp_path: Path) -> None:
    pack = Pack(tmp_path, "key")
    pack.write(layers())
    folder = pack.folder
    (folder / "layer-00001.safetensors").write_bytes(
        (folder / "layer-00002.safetensors").read_bytes()
    )
    (folder / "layer-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    check(Pack(tmp_path, "key").write(layers()), layers())


def test_a_lost_manifest_comes_back(tmp_path: Path) -> None:
    pack = Pack(tmp_path, "key")
    pack.write(layers())
    before = times(pack.folder)
    (pack.folder / MANIFEST).unlink()
    pack.write(layers())
    assert (pack.folder / MANIFEST).exists() and times(pack.folder) == before


# ---- killed, full, forbidden --------------------------------------------------------------------


def slow(tensor: torch.Tensor, seconds: float) -> Expression:
    """A tensor whose computation takes its time."""

    def compute() -> torch.Tensor:
        time.sleep(seconds)
        return tensor

    return Deferred(compute, (), {}, None, tensor.shape, tensor.dtype)


def slowly(made: list[Layer], seconds: float) -> list[Layer]:
    return [
        each.with_sources({p.name: slow(p.source.read(), seconds) for p in each.places})
        for each in made
    ]


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_any_moment_and_taken_up_again(tmp_path: Path) -> None:
    chance = random.Random(3)
    many = layers(12, size=40_000)
    kills = finished = 0
    for _ in range(30):
        child = in_child(lambda: Pack(tmp_path, "key").write(slowly(many, 0.002)))
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        kills += code == -signal.SIGKILL
        # Whatever stands under its own name is whole; the manifest stands only over all of it.
        folder = tmp_path / "key"
        whole = [file for file in folder.glob("*.safetensors") if load_file(file)]
        if (folder / MANIFEST).exists():
            finished += 1
            assert len(whole) == 12
    assert kills > 5
    check(Pack(tmp_path, "key").write(many), many)
    names = {f.name for f in (tmp_path / "key").iterdir()}
    assert names == {f"layer-{i:05d}.safetensors" for i in range(12)} | {MANIFEST, "pack.lock"}


def test_what_was_written_before_the_kill_is_kept(tmp_path: Path) -> None:
    def die_at_the_third(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    child = in_child(lambda: Pack(tmp_path, "key").write(layers(), progress=die_at_the_third))
    assert exit_code(child) == -signal.SIGKILL
    before = times(tmp_path / "key")
    assert len(before) == 3 and not (tmp_path / "key" / MANIFEST).exists()
    check(Pack(tmp_path, "key").write(layers()), layers())
    after = times(tmp_path / "key")
    assert {name: after[name] for name in before} == before and len(after) == 4


def test_a_disk_without_the_room_is_refused_first(small_disk: Path) -> None:
    big = layers(4, size=512 << 10)  # 8 MiB
    with pytest.raises(BudgetError, match=r"needs 84\d{5} bytes.*has \d+ free"):
        Pack(small_disk, "key").write(big)
    assert not list(small_disk.glob("key/*.safetensors"))


def test_a_disk_that_fills_up_while_packing(small_disk: Path) -> None:
    big = layers(4, size=256 << 10)  # 4 MiB

    def fill(done: int, total: int) -> None:
        if done < total // 2:  # another program writes, after the first layer
            (small_disk / "filler").write_bytes(bytes(3 * MIB))

    with pytest.raises(OSError, match=r"disk is full.*layer-0000\d.*free some space"):
        Pack(small_disk, "key").write(big, progress=fill)
    folder = small_disk / "key"
    assert not (folder / MANIFEST).exists() and not list(folder.glob(".part-*"))
    for file in folder.glob("*.safetensors"):
        assert load_file(file)
    (small_disk / "filler").unlink()
    check(Pack(small_disk, "key").write(big), big)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    for parent in [tmp_path, *tmp_path.parents]:  # pytest's own folders are closed to others
        if parent != Path("/") and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)

    def write_as_nobody() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(PermissionError, match=rf"{closed} is not writable.*offload_folder="):
            Pack(closed, "key").write(layers())

    assert exit_code(in_child(write_as_nobody)) == 0
    assert list(closed.iterdir()) == []


# ---- several processes --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_processes_write_a_pack_once(tmp_path: Path, count: int) -> None:
    written = processes.Value("i", 0)

    def work() -> None:
        def step(done: int, total: int) -> None:
            with written.get_lock():
                written.value += 1

        check(Pack(tmp_path, "key").write(slowly(layers(), 0.01), progress=step), layers())

    children = [in_child(work) for _ in range(count)]
    assert [exit_code(child) for child in children] == [0] * count
    assert written.value == 4


def test_processes_write_different_packs_at_once(tmp_path: Path) -> None:
    def work(number: int) -> None:
        check(Pack(tmp_path, f"key{number}").write(slowly(layers(), 0.01)), layers())

    children = [in_child(lambda number=number: work(number)) for number in range(4)]
    assert [exit_code(child) for child in children] == [0] * 4
    assert len(list(tmp_path.glob("key*/manifest.json"))) == 4


# ---- live models --------------------------------------------------------------------------------


def live_folders(home: Path) -> list[Path]:
    return sorted(home.glob("live-*"))


def test_the_folder_of_a_live_model_goes_with_it(tmp_path: Path) -> None:
    pack, other = live_pack(tmp_path), live_pack(tmp_path)
    check(pack.write(layers()), layers())
    before = len(os.listdir("/proc/self/fd"))
    assert live_folders(tmp_path) == sorted([pack.folder, other.folder])
    pack.remove()
    assert live_folders(tmp_path) == [other.folder]
    other.remove()
    other.remove()
    assert live_folders(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_folders_of_killed_processes_are_removed_and_others_are_not(tmp_path: Path) -> None:
    ready = processes.Event()

    def live() -> None:
        live_pack(tmp_path).write(layers())
        ready.set()
        time.sleep(60)

    child = in_child(live)
    assert ready.wait(30)
    [theirs] = live_folders(tmp_path)
    old = time.time() - 30 * 24 * 3600  # it has lived for long
    os.utime(theirs, (old, old))
    mine = live_pack(tmp_path)
    assert live_folders(tmp_path) == sorted([mine.folder, theirs])
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    assert theirs.exists()
    again = live_pack(tmp_path)
    assert live_folders(tmp_path) == sorted([mine.folder, again.folder])
    (tmp_path / "live-notes").write_text("a user's own file")
    (tmp_path / "live-music").mkdir()
    (tmp_path / "live-music" / "song").touch()
    live_pack(tmp_path).remove()
    assert (tmp_path / "live-notes").exists() and (tmp_path / "live-music" / "song").exists()
    mine.remove()
    again.remove()


def test_a_forked_child_neither_removes_nor_keeps_its_parents_folder(tmp_path: Path) -> None:
    pack = live_pack(tmp_path)
    pack.write(layers())
    assert exit_code(in_child(pack.remove)) == 0
    assert pack.folder.exists()
    live_pack(tmp_path).remove()  # the child's end has not let go of the parent's hold
    assert pack.folder.exists()
    pack.remove()


# ---- memory -------------------------------------------------------------------------------------

PEAK = """
import sys, torch
from offload.store.chunk_writer import CHUNK, CHUNKS
from offload.store.layout import Layer
from offload.checkpoint.expressions import Deferred
from offload.store.pack import Pack

MIB = 1 << 20
sizes = []

def anonymous():  # code that is paged in meanwhile does not count
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            sizes.append(int(line.split()[1]) * 1024)

def tensor(i):
    def made():
        value = torch.full((16 * MIB // 4,), float(i))
        anonymous()
        return value
    return Deferred(made, (), {}, None, torch.Size((16 * MIB // 4,)), torch.float32)

layers = [
    Layer.lay_out(f"layers.{i}", [(f"{i}.{j}", tensor(4 * i + j)) for j in range(4)])
    for i in range(6)
]
anonymous()
sources = Pack(sys.argv[1], "key").write(layers, progress=lambda *_: anonymous())
print((max(sizes) - sizes[0] - CHUNK * CHUNKS) // MIB)
assert all(float(e.read()[-1]) == int(n.split(".")[0]) * 4 + int(n[-1]) for n, e in sources.items())
"""


def test_packing_needs_memory_for_a_few_tensors(tmp_path: Path) -> None:
    """384 MiB of weights in tensors of 16 MiB, beside the ring of chunks."""
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    # A fixed threshold: freed tensors go back to the system, and what is counted is what is alive.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 3 * 16
