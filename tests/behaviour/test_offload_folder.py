"""The offload folder end to end: stale, interrupted, full, read-only, shared by processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoints
import comparison
import process
import pytest
import torch
import transformers
import variants
from comparison import output

import offload

Folder = Callable[[str], Path]
HERE = Path(__file__).parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount or to change user")
NOBODY = 65534


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of change."""
    return {
        str(f.relative_to(folder)): (f.stat().st_size, f.stat().st_mtime_ns)
        for f in folder.rglob("*")
        if f.is_file()
    }


def big_llama(layers: int = 6, hidden: int = 512) -> transformers.LlamaForCausalLM:
    """A random model with layers of a few MB."""
    config = transformers.LlamaConfig(
        vocab_size=131,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        dtype="float32",
    )
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(config).eval()


@contextlib.contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def child(code: str, *arguments: object, user: int | None = None) -> subprocess.Popen[str]:
    """Python in a process of its own, with the tests' modules."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1]))),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        user=user,
        group=user,
        extra_groups=[] if user else None,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> str:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


RUN = """
import sys, torch, variants, offload
name, folder, home, dtype, tier, target = sys.argv[1:]
torch.set_num_threads(1)
with offload.run(folder, device_map=tier, offload_folder=home, dtype=dtype) as model:
    with torch.no_grad():
        torch.save(model(**variants.inputs(name)).logits, target)
"""


def of_one_shape(folder: Path, count: int) -> list[Path]:
    """Checkpoints that differ in their weights alone, and one that does not fit them."""
    paths = [variants.save("llama", folder / str(i), seed=i) for i in range(count - 1)]
    return [*paths, variants.save("qwen3", folder)]


@pytest.mark.compat
def test_second_model_in_a_used_folder(tmp_path: Path) -> None:
    """Each answers as itself, also at the same time in one folder."""
    folders = of_one_shape(tmp_path, 4)
    arguments = {"device_map": "nvme", "dtype": "bfloat16", "offload_folder": tmp_path / "home"}
    models = [offload.run(folder, **arguments) for folder in folders]
    for folder, model in [*zip(folders, models, strict=True)] * 2:
        plain = comparison.plain_model(folder, dtype=torch.bfloat16)
        assert torch.equal(output(model), output(plain))
    for model in models:
        model.offload.close()


def test_changed_checkpoint_gets_a_new_pack(tmp_path: Path) -> None:
    """The same folder name, other weights."""
    home = tmp_path / "home"
    for seed in (1, 2):
        folder = variants.save("llama", tmp_path, seed=seed)
        plain = comparison.plain_model(folder, dtype=torch.float16)
        with offload.run(folder, device_map="nvme", dtype="float16", offload_folder=home) as model:
            assert torch.equal(output(model), output(plain))


@pytest.mark.compat
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
@pytest.mark.parametrize("tier", ["nvme", "cpu", "auto"])
def test_no_second_copy(variant_folder: Folder, tmp_path: Path, name: str, tier: str) -> None:
    """Safetensors are streamed from where they are; nothing is written anywhere."""
    folder, home = variant_folder(name), tmp_path / "home"
    before = files(folder)
    with offload.run(folder, device_map=tier, offload_folder=home) as model:
        output(model, name)
        assert not home.exists() or not files(home)
    assert files(folder) == before


def test_bin_is_streamed_without_a_copy(variant_folder: Folder, tmp_path: Path) -> None:
    folder = checkpoints.as_bin(variant_folder("llama"), tmp_path / "bin", shards=2)
    before = files(folder)
    with offload.run(folder, device_map="nvme", offload_folder=tmp_path / "home") as model:
        output(model)
    assert files(folder) == before
    assert not (tmp_path / "home").exists() or not files(tmp_path / "home")


@pytest.mark.compat
def test_no_weight_file_is_mapped(tmp_path: Path) -> None:
    plain = big_llama()
    plain.save_pretrained(tmp_path / "m", max_shard_size="10MB")
    want = output(plain)
    for arguments in ({"device_map": "nvme"}, {"device_map": "nvme", "dtype": "bfloat16"}):
        with offload.run(tmp_path / "m", offload_folder=tmp_path / "home", **arguments) as model:
            got = output(model)
            mapped = [f for f in process.mapped_files() if f.startswith(str(tmp_path))]
            assert not mapped
        if "dtype" not in arguments:
            assert torch.equal(got, want)


def test_memory_while_packing(tmp_path: Path) -> None:
    """A cast of 200 MB takes a few tensors' memory, not the model's."""
    big_llama(layers=20, hidden=768).save_pretrained(tmp_path / "m")
    size = sum(f.stat().st_size for f in (tmp_path / "m").glob("*.safetensors"))
    assert size > 300 << 20
    with process.PeakMemory() as memory:
        offload.run(
            tmp_path / "m", device_map="nvme", dtype="float16", offload_folder=tmp_path / "home"
        ).offload.close()
    assert memory.growth < 100 << 20


def test_killed_while_packing(tmp_path: Path) -> None:
    """What a killed writer leaves is no model to anybody, and the next run mends it."""
    plain = big_llama()
    plain.save_pretrained(tmp_path / "m")
    name, home = "llama", tmp_path / "home"
    for delay in (0.0, 0.05):
        writer = child(
            RUN.replace("import sys", "import sys; print('go', flush=True); import sys").replace(
                "torch.set_num", "print('imported', flush=True); torch.set_num"
            ),
            *(name, tmp_path / "m", home, "float16", "nvme", tmp_path / "x"),
        )
        assert writer.stdout is not None
        while "imported" not in writer.stdout.readline():
            pass
        deadline = time.monotonic() + 30
        while not list(home.rglob("layer-*")) and time.monotonic() < deadline:
            time.sleep(0.002)
            if writer.poll() is not None:
                break
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    want = output(comparison.plain_model(tmp_path / "m", dtype=torch.float16))
    with offload.run(
        tmp_path / "m", device_map="nvme", dtype="float16", offload_folder=home
    ) as model:
        assert torch.equal(output(model), want)
    assert not [f for f in files(home) if ".part-" in f]


def test_pack_file_cut_behind_our_back(tmp_path: Path, variant_folder: Folder) -> None:
    home = tmp_path / "home"
    want = output(comparison.plain_model(variant_folder("llama"), dtype=torch.float16))
    arguments = {"device_map": "nvme", "dtype": "float16", "offload_folder": home}
    offload.run(variant_folder("llama"), **arguments).offload.close()
    victim = next(home.rglob("layer-*.safetensors"))
    os.truncate(victim, victim.stat().st_size - 100)
    with offload.run(variant_folder("llama"), **arguments) as model:
        assert torch.equal(output(model), want)


@as_root
def test_disk_full(tmp_path: Path) -> None:
    """A clear OSError or BudgetError, nothing left behind; it works once there is room."""
    plain = big_llama()
    plain.save_pretrained(tmp_path / "m")
    arguments = {"device_map": "nvme", "dtype": "float16"}
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as small:
        with pytest.raises((OSError, offload.BudgetError), match=r"needs \d+ bytes.*free"):
            offload.run(tmp_path / "m", offload_folder=small, **arguments)
        assert not [f for f in files(small) if not f.endswith(".lock")]
        subprocess.run(["mount", "-o", "remount,size=60m", str(small)], check=True)
        with offload.run(tmp_path / "m", offload_folder=small, **arguments) as model:
            want = output(comparison.plain_model(tmp_path / "m", dtype=torch.float16))
            assert torch.equal(output(model), want)


@as_root
def test_disk_full_for_a_live_model(tmp_path: Path) -> None:
    """The model must still be whole: nothing of it was given away yet."""
    plain = big_llama()
    want = output(plain)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as small:
        with pytest.raises((OSError, offload.BudgetError)):
            offload.run(plain, device_map="nvme", offload_folder=small)
        assert not [f for f in files(small) if not f.endswith(".lock")]
    assert torch.equal(output(plain), want)
    with offload.run(plain, device_map="nvme", offload_folder=tmp_path / "home") as model:
        assert torch.equal(output(model), want)


@as_root
def test_read_only_checkpoint(variant_folder: Folder, tmp_path: Path) -> None:
    want = output(comparison.plain_model(variant_folder("llama")))
    with mounted(tmp_path / "ro", "--bind", "-o", "ro", str(variant_folder("llama"))) as folder:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (folder / "x").touch()
        for tier in ("cpu", "nvme"):
            with offload.run(folder, device_map=tier) as model:
                assert torch.equal(output(model), want)


@as_root
def test_offload_folder_of_another_user(tmp_path: Path, variant_folder: Folder) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # only the checks of the folder run here, before any thread or tensor
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            from offload.store.folder import check_folder

            check_folder(home)
            text = "no error"
        except OSError as error:
            text = f"{error.errno} {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(reader, 10_000).decode()
    # Root's own tmp folder may shut the user out already; both are errors of access.
    assert text.startswith(str(errno.EACCES)) and "not writable" in text
    assert len(text.splitlines()) == 1 and "offload_folder" in text


def test_offload_folder_is_a_file(tmp_path: Path, variant_folder: Folder) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(NotADirectoryError, match="is a file"):
        offload.run(
            variant_folder("llama"),
            device_map="nvme",
            dtype="float16",
            offload_folder=tmp_path / "home",
        )


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Two of one model, and two of others, all at once."""
    folders = of_one_shape(tmp_path, 3)
    folders.append(folders[0])
    home = tmp_path / "home"
    children = [
        child(RUN, "llama", folder, home, "bfloat16", "nvme", tmp_path / f"{i}.pt")
        for i, folder in enumerate(folders)
    ]
    for one in children:
        finish(one)
    for i, folder in enumerate(folders):
        plain = comparison.plain_model(folder, dtype=torch.bfloat16)
        assert torch.equal(torch.load(tmp_path / f"{i}.pt"), output(plain))
    packs = {Path(f).parent for f in files(home) if f.endswith("manifest.json")}
    assert len(packs) == len(set(folders))


FORK = """
import os, sys, torch, variants, offload
folder, tier, live, ending = sys.argv[1:]
torch.set_num_threads(1)  # torch's own threads do not survive a fork
import comparison
source = comparison.plain_model(folder) if live == "live" else folder
model = offload.run(source, device_map=tier)
x = variants.inputs("llama")
with torch.no_grad():
    want = model(**x).logits
    pid = os.fork()
    if pid == 0:
        try:
            model(**x)
            print("no error", flush=True)
        except offload.OffloadError as error:
            print("refused:", error, flush=True)
        if ending == "close":
            model.offload.close()
        if ending == "exit":
            sys.exit(0)  # runs finalizers
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for _ in range(3):
        assert torch.equal(model(**x).logits, want)
    assert len(model.state_dict()) == len(comparison.plain_model(folder).state_dict())
print("parent works", flush=True)
"""


@pytest.mark.parametrize(
    ("tier", "live", "ending"),
    [
        ("cpu", "file", "close"),
        ("nvme", "file", "_exit"),
        ("nvme", "live", "exit"),
    ],
)
def test_fork(variant_folder: Folder, tier: str, live: str, ending: str) -> None:
    """A child is told to start over; it hangs nowhere, and takes nothing from its parent."""
    out = finish(child(FORK, variant_folder("llama"), tier, live, ending), timeout=60)
    assert "refused:" in out and "spawn" in out and "parent works" in out


def test_manifest_is_readable(tmp_path: Path, variant_folder: Folder) -> None:
    home = tmp_path / "home"
    offload.run(
        variant_folder("llama"), device_map="nvme", dtype="float16", offload_folder=home
    ).offload.close()
    manifest = next(home.rglob("manifest.json"))
    content = json.loads(manifest.read_text())
    assert set(content["files"]) == {f.name for f in manifest.parent.glob("*.safetensors")}
