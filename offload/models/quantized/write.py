"""Writes a quantised checkpoint folder that other engines read too, tensor by tensor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from offload.checkpoint import Checkpoint
from offload.checkpoint.extent import Extent, read_into
from offload.checkpoint.weight_files import read_config
from offload.errors import CheckpointError
from offload.home import expanded
from offload.kernels.quantize import quantise
from offload.models.quantized.choose import CheckpointWeight, choose
from offload.models.quantized.published import describe_choice
from offload.models.quantized.wanted import Wishes
from offload.store.folder import (
    atomic_write,
    check_folder,
    is_temporary,
    lock,
    remove_temporaries,
    sync_folder,
)
from offload.store.reads import SECTOR
from offload.store.tensor_file import file_head, holds

SHARD = 1 << 30  # bytes of a file, if one tensor is not more
PIECE = 64 << 20  # bytes of a plain tensor that are copied at once
WORKERS = 4  # tensors that are read or worked on at once, of large ones fewer:
HELD = 1 << 30  # bytes of the checkpoint in memory, but for one that is larger
FILES = 2  # one is brought to the disk while the next is begun
INDEX = "model.safetensors.index.json"
_KEY, _LOCK = "pack.json", "pack"
_VERSION = 1
# Of the checkpoint's folder these do not come along: they hold its weights, in any framework.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot"),
    ".index.json",
)

Progress = Callable[[int, int], None]  # bytes of the checkpoint that were worked on, and of all
_Parts = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the checkpoint in its new file: the tensors it becomes, by their full names."""

    weight: CheckpointWeight
    parts: _Parts

    @property
    def held(self) -> int:
        """Bytes of the checkpoint that are in memory while it is worked on."""
        nbytes = self.weight.extent.nbytes
        return nbytes if self.weight.wanted is not None else min(nbytes, PIECE)

    @classmethod
    def of(cls, weight: CheckpointWeight) -> _Entry:
        extent = weight.extent
        if weight.wanted is None:
            return cls(weight, {weight.name: (extent.dtype, tuple(extent.shape))})
        scale = extent.dtype if extent.dtype.itemsize == 2 else torch.float32
        stored = weight.wanted.form.stored(tuple(extent.shape), scale)
        return cls(weight, {f"{weight.module}.{end}": part for end, part in stored.items()})

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.parts.values())


def write_quantised(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    wishes: Wishes,
    out: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """The folder `out`, made of `checkpoint`, on which the lazy `model` was built.

    It holds safetensors in the layout that compressed-tensors publishes, an index, config.json
    with its quantization_config, and whatever else lay in the checkpoint's folder but weights.
    It appears whole: until then `out`.partial is worked on, file by file, and a run that was
    stopped is taken up at the first file that is missing. Quantising runs on `device`.

    Raises FileExistsError where `out` is there, or `out`.partial with files of somebody else's;
    CheckpointError (tensor and file named) for weights that cannot be quantised, ValueError and
    UnsupportedError as `choose`, BudgetError or OSError for a disk that is full.
    """
    out = expanded(out).absolute()
    _refuse_existing(out)
    choice = choose(model, checkpoint, wishes)
    shards = _shards([_Entry.of(weight) for weight in choice.weights])
    partial = out.with_name(out.name + ".partial")
    _refuse_foreign(partial)
    with _locked(partial, out):
        if os.path.lexists(out):  # another process wrote it while this one waited
            # Its folder became `out`, and the lock that was waited for went with it.
            with contextlib.suppress(FileNotFoundError):
                if [f.name for f in partial.iterdir()] == [f"{_LOCK}.lock"]:
                    shutil.rmtree(partial)
            _refuse_existing(out)
        remove_temporaries(partial)
        _begin(partial, checkpoint.fingerprint(wishes=wishes.key, pack=_VERSION))
        missing = {
            name: entries
            for name, entries in shards.items()
            if not holds(partial / name, _tensors(entries))
        }
        check_folder(partial, sum(SECTOR + e.nbytes for x in missing.values() for e in x))
        _write_shards(partial, missing, shards, torch.device(device), progress)
        _write_index(partial / INDEX, shards)
        _copy_rest(checkpoint.folder, partial)
        config = {**read_config(checkpoint.folder), "quantization_config": describe_choice(choice)}
        if choice.untied:
            config["tie_word_embeddings"] = False
        with atomic_write(partial / "config.json") as stream:
            stream.write(json.dumps(config, indent=2).encode() + b"\n")
        os.rename(partial, out)
        for name in (_KEY, f"{_LOCK}.lock"):  # last: without them the folder would be nobody's
            (out / name).unlink()
        sync_folder(out)
        sync_folder(out.parent)
    return out


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already; remove it, or name another folder")


@contextlib.contextmanager
def _locked(partial: Path, out: Path) -> Iterator[None]:
    """Holds the folder, made where it is missing, against other processes."""
    with contextlib.ExitStack() as held:
        while True:
            check_folder(partial)
            try:
                held.enter_context(lock(partial, _LOCK))
                break
            except FileNotFoundError:  # another process was done just now
                _refuse_existing(out)
        yield


def _refuse_foreign(partial: Path) -> None:
    """A folder that happens to have this name is not taken for what a stopped run left."""
    if not partial.is_dir() or (partial / _KEY).is_file():
        return
    # Of a run that was killed before it made its note there may be these.
    others = (f for f in partial.iterdir() if f.name != f"{_LOCK}.lock" and not is_temporary(f))
    found = next(others, None)
    if found is not None:
        raise FileExistsError(
            f"{found} would be in the way: {partial} is where this works until all is there, and "
            "no earlier run left that; move it, or name another folder"
        )


def _begin(partial: Path, key: str) -> None:
    """Keep the files of an earlier run of the same; of any other, start anew."""
    note = partial / _KEY
    content = json.dumps({"key": key}).encode()
    if note.is_file() and note.read_bytes() == content:
        return
    for file in partial.iterdir():
        if file.name != f"{_LOCK}.lock" and file.is_file():
            file.unlink()
    with atomic_write(note) as stream:
        stream.write(content)


def _shards(entries: Sequence[_Entry]) -> dict[str, list[_Entry]]:
    """The files, by name, in the order of the entries."""
    groups: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > SHARD:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _tensors(entries: Sequence[_Entry]) -> _Parts:
    return {name: part for entry in entries for name, part in entry.parts.items()}


def _write_shards(
    folder: Path,
    missing: dict[str, list[_Entry]],
    shards: dict[str, list[_Entry]],
    device: torch.device,
    progress: Progress | None,
) -> None:
    total = sum(e.weight.extent.nbytes for entries in shards.values() for e in entries)
    done = total - sum(e.weight.extent.nbytes for entries in missing.values() for e in entries)
    counting, failed = threading.Lock(), threading.Event()

    def count(nbytes: int) -> None:
        nonlocal done
        if failed.is_set():  # another file; this one is given up
            raise concurrent.futures.CancelledError
        with counting:
            done += nbytes
            if progress is not None:
                progress(done, total)

    largest = max((e.held for entries in missing.values() for e in entries), default=1)
    workers = max(1, min(WORKERS, HELD // max(largest, 1)))
    with (
        concurrent.futures.ThreadPoolExecutor(FILES, "offload-file") as files,
        concurrent.futures.ThreadPoolExecutor(workers, "offload-quantise") as pool,
    ):
        jobs = [
            files.submit(_write_shard, folder / name, entries, device, pool, count)
            for name, entries in missing.items()
        ]
        try:
            for job in concurrent.futures.as_completed(jobs):
                job.result()
        except BaseException:
            failed.set()
            files.shutdown(wait=False, cancel_futures=True)
            raise


def _write_shard(
    file: Path,
    entries: list[_Entry],
    device: torch.device,
    pool: concurrent.futures.Executor,
    count: Callable[[int], None],
) -> None:
    head, offsets = file_head(_tensors(entries))
    with atomic_write(file) as stream:
        descriptor = stream.fileno()
        _write_at(descriptor, memoryview(head), 0)
        jobs: dict[concurrent.futures.Future[None], _Entry] = {}
        try:
            for entry in entries:
                jobs[pool.submit(_write_entry, descriptor, entry, offsets, device)] = entry
            for job in concurrent.futures.as_completed(jobs):
                job.result()
                count(jobs[job].weight.extent.nbytes)
        except BaseException:
            for job in jobs:  # none may write into a file that is closed
                job.cancel()
            concurrent.futures.wait(jobs)
            raise


def _write_entry(
    descriptor: int, entry: _Entry, offsets: dict[str, int], device: torch.device
) -> None:
    weight = entry.weight
    if weight.wanted is None:
        for offset, piece in _pieces(weight.extent):
            _write_at(descriptor, piece, offsets[weight.name] + offset)
        return
    try:
        value = weight.extent.read().to(device)
        stored = quantise(value, weight.wanted.form, clip=weight.wanted.clip)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{weight.name} ({weight.extent.file}): {error}") from None
    for end, tensor in stored.items():
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        _write_at(descriptor, data.numpy().data, offsets[f"{weight.module}.{end}"])


def _pieces(extent: Extent) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a tensor, contiguous, a part at a time, each with its place among them."""
    if extent.stride is not None:
        yield 0, extent.read().reshape(-1).view(torch.uint8).numpy().data
        return
    for start in range(0, extent.nbytes, PIECE):
        piece = memoryview(bytearray(min(PIECE, extent.nbytes - start)))
        read_into(extent.file, extent.offset + start, piece)
        yield start, piece


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + PIECE], offset + done)


def _write_index(file: Path, shards: dict[str, list[_Entry]]) -> None:
    weight_map = {name: shard for shard, entries in shards.items() for name in _tensors(entries)}
    total = sum(e.nbytes for entries in shards.values() for e in entries)
    content: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with atomic_write(file) as stream:
        stream.write(json.dumps(content, indent=2).encode() + b"\n")


def _copy_rest(source: Path, target: Path) -> None:
    """Tokenizer, generation settings, code and papers of the checkpoint."""
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name.startswith(".") or file.name.endswith(_WEIGHTS):
            continue
        if file.name != "config.json":
            with open(file, "rb") as found, atomic_write(target / file.name) as stream:
                shutil.copyfileobj(found, stream)
