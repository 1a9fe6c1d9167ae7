"""A packed folder: the tensors that no file of the checkpoint holds as they are streamed, written
once.

Each layer is one safetensors file whose data begins at a multiple of 4 KiB; any safetensors reader
opens it. Files appear whole or not at all, the manifest last, so an interrupted pack is taken up
where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint import safetensors_header
from offload.checkpoint.expressions import Expression, Pieces
from offload.progress import LoggedProgress
from offload.sizes import format_size
from offload.store.chunk_writer import ChunkWriter
from offload.store.folder import atomic_write, check_folder, lock, remove_temporaries, sync_folder
from offload.store.layout import Layer, TensorPlace
from offload.store.reads import SECTOR
from offload.store.tensor_file import file_head, holds

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_LIVE = re.compile("live-[0-9]+-[0-9a-f]{12}")  # of live models: the user may have "live-music"
_HOLDER = "holder.lock"
_VERSION = 1


_Job = tuple[Path, list[TensorPlace]]  # a file, and what it must hold


def needs_pack(layer: Layer) -> list[TensorPlace]:
    """The tensors of a layer that cannot be streamed from where they are."""
    return [p for p in layer.places if not isinstance(p.source, Pieces)]


class Pack:
    """A packed folder on disk. `folder / key` holds it; a key names exactly these weights in
    exactly this form.
    """

    def __init__(self, folder: str | os.PathLike[str] | Path, key: str) -> None:
        self._home = Path(folder)
        self.folder = self._home / key
        self._key = key
        self._pid = os.getpid()
        self._held: int | None = None

    def write(
        self, layers: Sequence[Layer], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Expression]:
        """Write what `layers` need and say where each tensor lies now; what is there already is
        kept.

        Needed and free bytes are checked first. At most one tensor is in memory at a time. Several
        processes may do this at once: one writes, the others wait and read. `progress` is called
        after every file with the bytes that are there and those that there will be; where there is
        none, the log is told every few seconds.
        """
        jobs = [
            (self.folder / f"layer-{i:05d}.safetensors", needs_pack(x))
            for i, x in enumerate(layers)
        ]
        jobs = [(file, places) for file, places in jobs if places]
        if not self._is_whole(jobs):
            self._fill(jobs, progress)
        return {
            name: Pieces((extent,), torch.Size(extent.shape), extent.dtype)
            for file, _ in jobs
            for name, extent in safetensors_header.read_header(str(file))[0].items()
        }

    def _is_whole(self, jobs: Sequence[_Job]) -> bool:
        """Whether all of it is there, in a folder that may be for reading only: nothing is made,
        no lock is taken.
        """
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            listed = {**manifest["files"], "version": manifest["version"], "key": manifest["key"]}
            needed: dict[str, Any] = {file.name: file.stat().st_size for file, _ in jobs}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        needed |= {"version": _VERSION, "key": self._key}
        return needed.items() <= listed.items() and all(_holds(*job) for job in jobs)

    def _fill(self, jobs: Sequence[_Job], progress: Callable[[int, int], None] | None) -> None:
        """Write what is missing; one process at a time."""
        total = sum(p.nbytes for _, places in jobs for p in places)
        check_folder(self._home)
        self.folder.mkdir(exist_ok=True)
        with lock(self.folder, "pack"):
            remove_temporaries(self.folder)
            missing = [(file, places) for file, places in jobs if not _holds(file, places)]
            if missing:
                needed = sum(p.nbytes + SECTOR for _, places in missing for p in places)
                check_folder(self.folder, needed)
                _log.info("packing %s into %s", format_size(needed), self.folder)
                (self.folder / MANIFEST).unlink(missing_ok=True)
            done = total - sum(p.nbytes for _, places in missing for p in places)
            if missing:
                progress = progress or LoggedProgress(_log, "packed")
                with ChunkWriter() as writer:
                    for file, places in missing:
                        _write_file(file, places, writer)
                        done += sum(p.nbytes for p in places)
                        progress(done, total)
            if missing or not self._is_whole(jobs):
                self._write_manifest()

    def _write_manifest(self) -> None:
        """Of all files, those too that only another run needed (it had less memory)."""
        content = {
            "version": _VERSION,
            "key": self._key,
            "files": {f.name: f.stat().st_size for f in sorted(self.folder.glob("*.safetensors"))},
        }
        with atomic_write(self.folder / MANIFEST) as stream:
            stream.write(json.dumps(content, indent=1).encode())

    def remove(self) -> None:
        """Delete the folder; in a forked child that is left to the parent, which still reads it."""
        if os.getpid() != self._pid:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None
        with suppress(OSError):
            sync_folder(self._home)

    def hold(self) -> None:
        """Make the folder and show that a process uses it, until `remove` or that process's end."""
        self.folder.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._held = os.open(self.folder / _HOLDER, flags, 0o666)
        fcntl.flock(self._held, fcntl.LOCK_EX)


def live_pack(folder: str | os.PathLike[str]) -> Pack:
    """A pack for the weights of a live model: a folder of its own, to be removed when the model is
    closed. Those of killed processes are removed here.
    """
    home = check_folder(folder)
    with lock(home, "live"):  # else a folder that is not held yet would look like an orphan
        for each in home.iterdir():
            if _LIVE.fullmatch(each.name) and each.is_dir() and _is_orphan(each):
                shutil.rmtree(each, ignore_errors=True)
        pack = Pack(home, f"live-{os.getpid()}-{secrets.token_hex(6)}")
        pack.hold()
    return pack


def _is_orphan(folder: Path) -> bool:
    """Whether nobody holds it. The kernel frees a lock when its holder dies, in any container and,
    where the file system passes locks on, on any machine; a process id would say less.
    """
    try:
        descriptor = os.open(folder / _HOLDER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _holds(file: Path, places: Sequence[TensorPlace]) -> bool:
    return holds(file, {p.name: (p.dtype, tuple(p.shape)) for p in places})


def _write_file(file: Path, places: Sequence[TensorPlace], writer: ChunkWriter) -> None:
    head, offsets = file_head({p.name: (p.dtype, tuple(p.shape)) for p in places})
    with atomic_write(file) as stream:
        writer.begin(stream.name)
        writer.write(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for p in sorted(places, key=lambda p: offsets[p.name]):
            writer.write(p.source.read().reshape(-1).view(torch.uint8))
        writer.finish()
