"""Folders of quantised weights: what other engines read in them, and what stops, full disks and
broken weights leave behind.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import offload
from offload.errors import BudgetError, CheckpointError, UnsupportedError
from offload.models.quantized import write
from offload.models.quantized.wanted import Wishes

ROOT = Path(__file__).resolve().parents[2]
Source = Callable[[str], Path]
MIXED = {
    "default": "int4",
    r"layers\.1\.": "int8-g32",
    "lm_head": "fp8",
    "layers.2.*o_proj": "none",
}
SYMMETRIC: list[Any] = ["int4", "int8-channel", "w8a8", "fp8", "fp8-tensor", "mxfp4", MIXED]
WITH_ZEROS = ["int4-g32-zp-clip", "int8-zp", "int4-channel-zp"]


@pytest.mark.parametrize("asked", SYMMETRIC + WITH_ZEROS, ids=str)
def test_transformers_reads_it(source: Source, tmp_path: Path, asked: Any) -> None:
    """Plain transformers with compressed-tensors, and the reference: the same logits."""
    from compressed_tensors.quantization import QuantizationConfig

    out = folders.pack(source("llama"), tmp_path / "out", asked)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    QuantizationConfig.model_validate(config)
    # Without it, this release takes zero points for unpacked ones, whoever packed them.
    options = (
        {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
        if asked in [*WITH_ZEROS, "w8a8"]
        else {}
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, **options)
    state = folders.whole(out, asked, torch.bfloat16)
    ours = folders.plain_model(source("llama"), state, tmp_path / "whole")
    assert torch.equal(folders.logits(theirs), folders.logits(ours))
    plain = transformers.AutoModelForCausalLM.from_pretrained(source("llama"))
    difference = (folders.logits(plain) - folders.logits(ours)).abs().max()
    assert 0 < difference < 0.2 * folders.logits(plain).abs().max()


@pytest.mark.parametrize("name", sorted(folders.VARIANTS))
def test_only_the_linears_of_the_layers_change(source: Source, tmp_path: Path, name: str) -> None:
    """Experts too, which transformers merges; all else is in the new folder byte by byte."""
    before = folders.tensors(source(name))
    after = folders.tensors(folders.pack(source(name), tmp_path / "out", "int4-g32"))
    changed = {n.removesuffix("_packed") for n in after if n.endswith(".weight_packed")}
    routers = {"mixtral": ".gate.weight", "qwen3_moe": ".gate.weight", "gpt_oss": ".router.weight"}
    assert changed == {
        n
        for n, tensor in before.items()
        if ".layers." in n
        and tensor.ndim == 2
        and n.endswith(".weight")
        and not n.endswith(routers.get(name, "no such"))
    }
    assert changed
    for n in before.keys() - changed:
        assert torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)), n
    left = {n for n in after if not n.startswith(tuple(c.removesuffix("weight") for c in changed))}
    assert left <= before.keys() - changed
    for n in changed:
        assert n not in after
        assert after[f"{n}_shape"].tolist() == list(before[n].shape)


def test_every_tensor_is_aligned_and_indexed(
    source: Source, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(write, "SHARD", 20_000)
    out = folders.pack(source("llama"), tmp_path / "out", "int4-zp")
    index = json.loads((out / write.INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file.name)
        head = int.from_bytes(file.read_bytes()[:8], "little")
        assert (8 + head) % 4096 == 0
    assert index["weight_map"] == found
    assert not list(tmp_path.glob("*.partial"))
    assert {f.name for f in out.iterdir()} - {f.name for f in files} == {
        write.INDEX, "config.json", "generation_config.json",
    }  # fmt: skip


def test_a_bin_checkpoint_is_packed_too(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    state = {n: t.clone() for n, t in folders.tensors(source("llama")).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].T.contiguous().T  # a stride of its own
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text((source("llama") / "config.json").read_text())
    found = folders.tensors(folders.pack(folder, tmp_path / "a", "int4"))
    wanted = folders.tensors(folders.pack(source("llama"), tmp_path / "b", "int4"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n].view(torch.uint8), wanted[n].view(torch.uint8)) for n in found)


def test_heads_and_embeddings_where_asked(source: Source, tmp_path: Path) -> None:
    asked = {"lm_head|embed_tokens": "int8"}
    found = folders.tensors(folders.pack(source("llama"), tmp_path / "out", asked))
    assert {n for n in found if n.endswith("_packed")} == {
        "lm_head.weight_packed",
        "model.embed_tokens.weight_packed",
    }


@pytest.mark.parametrize(
    ("name", "asked", "error", "message"),
    [
        ("llama", {"nosuch": "int4"}, ValueError, "'nosuch' is found in the name of no weight"),
        ("llama", {"default": "int4", "norm": "int8"}, ValueError, "'norm' is found in the name"),
        ("llama", {"default": "int4", ".": "none"}, ValueError, r"left to quantise: \['.'\] leave"),
        ("llama", "int4-g128", ValueError, r"q_proj.weight \(.*: 64 inputs do not divide into gr"),
    ],
)
def test_wishes_that_cannot_be_met(
    source: Source, tmp_path: Path, name: str, asked: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        folders.pack(source(name), tmp_path / "out", asked)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (7, TypeError, "a dict of patterns to formats, got 7"),
        ({"default": 4}, TypeError, "such as 'int4', got 4"),
        ({"(": "int4"}, ValueError, r"'\(' is no regular expression"),
        ({"a": "none"}, ValueError, "asks for no format"),
        ({}, ValueError, "asks for no format"),
        ("int5", ValueError, "'int5' is no format"),
        ("fp8-clip", ValueError, "what fp8 gains by clipping is nothing"),
    ],
)
def test_wishes_that_mean_nothing(asked: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Wishes.of(asked)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"device": "tpu"}, ValueError, "device='tpu' is not a device"),
        ({"device": "meta"}, ValueError, "device='meta': layers are streamed to 'cuda' devices"),
        ({"out": None}, TypeError, "out must be the path of a folder that is not there yet, got N"),
        ({"out": ""}, TypeError, "out must be the path of a folder that is not there yet, got ''"),
        ({"progress": 3}, TypeError, "progress must be a function of two numbers of bytes, got 3"),
        ({"revision": 3}, TypeError, "revision must be the name of a revision or None, got 3"),
        ({"trust_remote_code": "no"}, TypeError, "must be True or False, got 'no'"),
    ],
)
def test_arguments_are_refused_before_anything_is_written(
    source: Source, tmp_path: Path, wrong: dict[str, Any], error: type, message: str
) -> None:
    given = {"model": source("llama"), "out": tmp_path / "out", "quantization": "int4"}
    with pytest.raises(error, match=message):
        offload.pack(**(given | wrong))
    assert list(tmp_path.iterdir()) == []


def test_the_first_pattern_decides() -> None:
    wishes = Wishes.of({"default": "int8", "a": "int4", "ab": "none"})
    assert [w.name if w else w for w, _ in map(wishes.find, (["ab"], ["b"], ["xa", "y"]))] == [
        "int4-g64", "int8-g64", "int4-g64",
    ]  # fmt: skip
    assert wishes.key == "default=int8-g64;a=int4-g64;ab=none"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers(source: Source, tmp_path: Path, value: float) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    state = folders.tensors(source("llama"))
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text((source("llama") / "config.json").read_text())
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.up_proj.weight \(.*broken.*NaN or inf"
    ):
        folders.pack(folder, tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_not_touched(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FileExistsError, match="out is there already; remove it"):
        folders.pack(source("llama"), out, "int4")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("own", [True, False])
def test_a_folder_of_the_name_that_is_worked_in_is_not_touched(
    source: Source, tmp_path: Path, own: bool
) -> None:
    """Be it the checkpoint itself."""
    partial = tmp_path / "out.partial"
    if own:
        partial.mkdir()
        (partial / "notes").write_text("of the user")
    else:
        shutil.copytree(source("llama"), partial)
    before = {f.name: f.read_bytes() for f in partial.iterdir()}
    with pytest.raises(FileExistsError, match=r"out.partial is where this works .* move it"):
        folders.pack(source("llama") if own else partial, tmp_path / "out", "int4")
    assert {f.name: f.read_bytes() for f in partial.iterdir()} == before


def test_what_is_killed_at_its_very_beginning_or_end_is_in_nobodys_way(
    source: Source, tmp_path: Path, monkeypatch: Any
) -> None:
    partial, out = tmp_path / "out.partial", tmp_path / "out"
    partial.mkdir()
    for name in ("pack.lock", ".part-12-ab"):
        (partial / name).touch()
    rename = os.rename

    def stop(*args: Any) -> None:
        rename(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", stop)
        folders.pack(source("llama"), out, "int4")
    fresh = folders.pack(source("llama"), tmp_path / "fresh", "int4")
    assert folders.tensors(out).keys() == folders.tensors(fresh).keys()
    assert not partial.exists()


def test_another_process_is_done_before_the_lock_is_asked_for(
    source: Source, tmp_path: Path, monkeypatch: Any
) -> None:
    out, ready = tmp_path / "out", write.check_folder

    def done_meanwhile(folder: Path) -> None:
        ready(folder)
        folder.rename(out)

    monkeypatch.setattr(write, "check_folder", done_meanwhile)
    with pytest.raises(FileExistsError, match="out is there already; remove it"):
        folders.pack(source("llama"), out, "int4")


def test_a_quantised_checkpoint_is_not_quantised_again(source: Source, tmp_path: Path) -> None:
    out = folders.pack(source("llama"), tmp_path / "out", "int4")
    with pytest.raises(UnsupportedError, match=r"quantised .*compressed-tensors"):
        folders.pack(out, tmp_path / "again", "int4")


def test_a_full_disk(source: Source, tmp_path: Path, monkeypatch: Any) -> None:
    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="the disk is full"):
        folders.pack(source("llama"), tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()
    left = {f.name for f in (tmp_path / "out.partial").iterdir()}
    assert left == {"pack.json", "pack.lock"}
    monkeypatch.undo()
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 9, 1, 1, *[9] * 5))
    )
    with pytest.raises(BudgetError, match="has 4096 free"):
        folders.pack(source("llama"), tmp_path / "out", "int4")


def test_a_disk_that_is_full_before_the_tokenizer_is_copied(
    source: Source, tmp_path: Path, monkeypatch: Any
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    shutil.copytree(source("llama"), plain)
    (plain / "tokenizer.json").write_bytes(b"some" * 1000)

    copy = shutil.copyfileobj

    def write(source: Any, target: Any) -> None:
        if Path(source.name).name != "tokenizer.json":
            copy(source, target)
            return
        target.write(source.read(1000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", write)
        with pytest.raises(OSError, match=r"the disk is full .* while writing .*tokenizer\.json"):
            folders.pack(plain, out, "int4")
    assert not (tmp_path / "out.partial" / "tokenizer.json").exists()
    folders.pack(plain, out, "int4")
    assert (out / "tokenizer.json").read_bytes() == b"some" * 1000


def test_a_stopped_run_is_taken_up(source: Source, tmp_path: Path, monkeypatch: Any) -> None:
    """What is whole is not written again; another format starts anew."""
    monkeypatch.setattr(write, "SHARD", 20_000)
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    class Stop(BaseException):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        folders.pack(source("llama"), out, "int4", progress=stop)
    first = {f.name: f.stat().st_ino for f in partial.glob("*.safetensors")}
    assert first
    with pytest.raises(Stop):
        folders.pack(source("llama"), out, "int4", progress=stop)
    rest: list[int] = []
    folders.pack(source("llama"), out, "int4", progress=lambda done, total: rest.append(done))
    assert first.items() <= {f.name: f.stat().st_ino for f in out.iterdir()}.items()
    every: list[int] = []
    fresh = folders.pack(
        source("llama"), tmp_path / "fresh", "int4", progress=lambda done, total: every.append(done)
    )
    assert len(rest) < len(every) and rest[-1] == every[-1]  # what was there counts as done
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {
        f.name: f.read_bytes() for f in fresh.iterdir()
    }
    with pytest.raises(Stop):
        folders.pack(source("llama"), tmp_path / "other", "int4", progress=stop)
    folders.pack(source("llama"), tmp_path / "other", "int8")
    wanted = folders.pack(source("llama"), tmp_path / "eight", "int8")
    for file in wanted.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_a_killed_run_is_taken_up(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import sys, time; sys.path[:0] = [sys.argv[1], sys.argv[2], sys.argv[3]]\n"
        "from pathlib import Path\n"
        "import folders\n"
        "from offload.models.quantized import write\n"
        "write.SHARD = 20_000\n"
        "def slow(done, total): print(done, flush=True); time.sleep(0.2)\n"
        "folders.pack(Path(sys.argv[4]), Path(sys.argv[5]), 'int4', progress=slow)\n"
    )
    arguments = [ROOT, ROOT / "tests", ROOT / "tests" / "quantized", source("llama"), out]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out.partial").glob("*.safetensors")):
        assert process.stdout.readline() and time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not out.exists()
    folders.pack(source("llama"), out, "int4")
    fresh = folders.pack(source("llama"), tmp_path / "fresh", "int4")
    assert folders.tensors(out).keys() == folders.tensors(fresh).keys()
    assert not list(tmp_path.glob("*.partial"))
    assert not [f for f in out.iterdir() if f.name.startswith(".part-")]


def test_at_most_a_few_tensors_are_in_memory(
    source: Source, tmp_path: Path, monkeypatch: Any
) -> None:
    held, most = 0, 0
    extent = write.Extent
    read, quantise = extent.read, write.quantise

    def counted(self: Any) -> torch.Tensor:
        nonlocal held, most
        held += 1
        most = max(most, held)
        return read(self)

    def finished(*args: Any, **options: Any) -> Any:
        nonlocal held
        result = quantise(*args, **options)
        held -= 1
        return result

    monkeypatch.setattr(extent, "read", counted)
    monkeypatch.setattr(write, "quantise", finished)
    folders.pack(source("llama"), tmp_path / "out", "int4")
    assert 1 <= most <= write.WORKERS


def test_float32_weights_have_float32_scales(tmp_path: Path) -> None:
    plain = folders.save("llama", tmp_path / "plain", torch.float32)
    out = folders.pack(plain, tmp_path / "out", "int4")
    found = load_file(out / "model-00001-of-00001.safetensors")
    assert found["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32
