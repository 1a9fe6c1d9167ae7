"""The microbenchmarks: what they move, what they leave behind, and what they refuse."""

import json
import os
import shutil

import pytest
import torch
from aio_machine import why_not

from offload import aio
from offload.aio import benchmark, tuning
from offload.aio.bench import peers, sizes
from offload.aio.bench.work import Work, _layers, _requests

MIB = 1 << 20
SMALL = ["--max-size", "32MiB", "--rounds", "2"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("128KiB", 128 << 10), ("1.5MiB", 3 << 19), ("8GB", 8 * 10**9), ("2k", 2000)],
)
def test_sizes_are_parsed(text, nbytes):
    assert sizes.parse(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsec", "-1MiB", "i"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="128KiB"):
        sizes.parse(text)


def run_json(capsys, *arguments: object) -> dict:
    assert benchmark.main(["nvme", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_sweep_reads_and_writes_and_cleans_up(tmp_path, capsys):
    found = run_json(
        capsys, tmp_path, *SMALL, "--block", "256KiB,1MiB", "--depth", "2,4", "--write"
    )
    assert os.listdir(tmp_path) == []
    assert found["bytes"] == 32 * MIB
    cells = {(row["block"], row["depth"], row["direction"]) for row in found["rows"]}
    assert len(cells) == len(found["rows"]) == 8
    for row in found["rows"]:
        assert 0 < row["least"] <= row["gbps"] <= row["most"]
        assert row["cpu"] >= 0
        assert row["name"] == found["probe"]["selected"]
        assert row["ratio"] is None


def test_every_backend_by_name(tmp_path, capsys):
    found = run_json(
        capsys, tmp_path, *SMALL, "--backend", "all", "--depth", "2", "--block", "1MiB"
    )
    assert {row["name"] for row in found["rows"]} == {
        name for name in aio.backends.BACKENDS if why_not(name) is None
    }


def test_an_existing_file_is_only_read(tmp_path, capsys):
    path = tmp_path / "mine"
    path.write_bytes(os.urandom(40 * MIB))
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    found = run_json(capsys, "--file", path, "--rounds", 1, "--pattern", "layers")
    assert found["bytes"] == 32 * MIB
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    with pytest.raises(ValueError, match="only read"):
        benchmark.main(["nvme", "--file", str(path), "--write"])
    path.write_bytes(b"small")
    with pytest.raises(ValueError, match="too small"):
        benchmark.main(["nvme", "--file", str(path)])


def test_the_file_goes_when_the_run_fails(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        assert len(os.listdir(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("offload.aio.bench.nvme.run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["nvme", str(tmp_path), *SMALL])
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_told_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ValueError, match="--max-size"):
        benchmark.main(["nvme", str(tmp_path), "--max-size", str(free)])
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="no folder"):
        benchmark.main(["nvme", str(tmp_path / "missing")])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block", "1parsec"],
        ["--block", "100"],
        ["--depth", "0"],
        ["--backend", "posix"],
        ["--file", ""],
        ["--plot", ""],
    ],
)
def test_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["nvme", *arguments])
    said = capsys.readouterr().err
    assert f"argument {arguments[0]}: " in said and arguments[1] in said


def test_tuning_is_remembered_for_the_drive(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OFFLOAD_HOME", str(tmp_path / "cache"))
    assert aio.tuned(tmp_path) == {}
    assert (
        benchmark.main(
            ["nvme", str(tmp_path), *SMALL, "--tune", "--block", "1MiB,2MiB", "--depth", "2,3"]
        )
        == 0
    )
    assert tuning.cache_path() in capsys.readouterr().out
    settings = aio.tuned(tmp_path)
    assert settings["block_size"] in (MIB, 2 * MIB)
    assert settings["queue_depth"] in (2, 3)
    aio.AioHandle(**settings).close()
    # Another drive's settings stay, and nonsense in the file harms nobody.
    assert aio.tuned("/proc") == {}
    for nonsense in ("not json", "[]", json.dumps({tuning.drive_of(tmp_path): 3})):
        with open(tuning.cache_path(), "w") as file:
            file.write(nonsense)
        assert aio.tuned(tmp_path) == {}
    assert aio.tuned(tmp_path / "missing") == {}


def test_fio_does_the_same_work(tmp_path, capsys):
    try:
        peers.check("fio")
    except peers.PeerMissing as error:
        pytest.skip(str(error))
    arguments = [tmp_path, *SMALL, "--compare", "fio", "--block", "1MiB", "--depth", "4", "--write"]
    found = run_json(capsys, *arguments)
    names = [row["name"] for row in found["rows"] if row["direction"] == "read"]
    assert names[0] == "fio"
    assert len(names) > 1
    for row in found["rows"]:
        assert row["gbps"] > 0
        if found["rows"][0]["pages"] == "hugetlb":
            assert row["ratio_least"] <= row["ratio"] <= row["ratio_most"]
        if row["name"] == "fio" and row["ratio"] is not None:
            assert row["ratio"] == 1.0
    assert os.listdir(tmp_path) == []


def test_without_huge_pages_for_fio_there_is_no_ratio(tmp_path, capsys, monkeypatch):
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    monkeypatch.setattr(peers, "free_huge_bytes", lambda: 0)
    assert benchmark.main(
        ["nvme", str(tmp_path), *SMALL, "--compare", "fio", "--block", "1MiB", "--depth", "4"]
    ) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "fio: 4K pages, so no ratio" in text
    assert "of fio" not in text


def test_fio_gets_the_same_file_block_depth_and_memory():
    work = Work("/data/file", 1 << 30, 16 << 20, 8, threads=2)
    command = peers.fio_command(work, huge=True)
    for argument in (
        "--filename=/data/file", "--bs=16777216", "--iodepth=16", "--size=1073741824",
        "--iomem=mmaphuge", "--readonly", "--rw=read", "--direct=1",
    ):  # fmt: skip
        assert argument in command
    assert work.pool == 16 * (16 << 20)
    writing = peers.fio_command(Work("/f", 1 << 30, MIB, 8, write=True), huge=False)
    assert "--readonly" not in writing
    assert {"--rw=write", "--iomem=mmap", "--end_fsync=1"} <= set(writing)


def test_a_peer_that_is_missing_is_told_at_once(tmp_path):
    pytest.importorskip("torch")
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="deepspeed is not installed"):
            benchmark.main(["nvme", str(tmp_path), "--compare", "deepspeed"])
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("block", [4096, 128 << 10, MIB, 16 << 20])
@pytest.mark.parametrize("depth", [1, 4, 32])
@pytest.mark.parametrize("pattern", ["sequential", "layers"])
def test_all_bytes_are_moved_within_the_pool(block, depth, pattern):
    work = Work("file", 3 << 30, block, depth, pattern=pattern)
    ranges = _requests(work) if pattern == "sequential" else _layers(work)
    assert all(start + size <= work.pool for start, size in ranges.slots)
    assert max(size for _, size in ranges.spans) <= ranges.slots[0][1]
    covered = 0
    for offset, size in ranges.spans:
        assert offset <= covered
        assert offset % 4096 == 0
        covered = offset + size
    assert covered == work.nbytes


def test_a_picture(tmp_path, capsys):
    target = tmp_path / "sweep.png"
    arguments = ["nvme", str(tmp_path), *SMALL, "--block", "1MiB", "--depth", "2"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install matplotlib"):
            benchmark.main([*arguments, "--plot", str(target)])
        return
    assert benchmark.main([*arguments, "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_link(capsys):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            benchmark.main(["link"])
        return
    assert benchmark.main(["link", "--size", "4KiB,16MiB", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["size"] for row in found["rows"]] == [4096, 16 * MIB]
    assert found["rows"][1]["gbps"]["aio.alloc"] > 1
