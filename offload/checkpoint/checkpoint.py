"""A Hugging Face checkpoint folder -> extents: where each tensor's bytes lie, by headers only."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.checkpoint import pickles, safetensors_header
from offload.checkpoint.extent import Extent
from offload.checkpoint.weight_files import (
    Format,
    WeightFiles,
    find_weight_files,
    quantization_of,
    read_config,
    refuse_quantised,
)
from offload.errors import CheckpointError

_FINGERPRINT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder holds; every file was checked, no weight was read."""

    folder: Path
    format: Format
    tensors: dict[str, Extent]
    files: tuple[tuple[str, int, int], ...]  # (path, size in bytes, mtime in ns)
    metadata: dict[str, Any] = field(default_factory=dict)  # of the index, else of the only file
    header_digest: str = ""  # of every header, the index and config.json
    quantization: dict[str, Any] | None = None  # config.json's quantization_config

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors; a storage that several names share counts once."""
        return sum(
            nbytes for _, _, nbytes in {(e.file, e.offset, e.nbytes) for e in self.tensors.values()}
        )

    def fingerprint(self, **salt: object) -> str:
        """A hex name for exactly these weights, prepared as `salt` (dtype and the like) says.

        It changes with the files' names, sizes and times, with a header, the index or config.json.
        """
        digest = hashlib.sha256()
        parts: list[object] = [_FINGERPRINT_VERSION, self.format, self.header_digest]
        parts += [(os.path.basename(path), size, mtime) for path, size, mtime in self.files]
        parts += sorted((name, str(value)) for name, value in salt.items())
        digest.update(json.dumps(parts).encode())
        return digest.hexdigest()[:32]


def open_checkpoint(
    folder: str | os.PathLike[str],
    quantised: Callable[[Path, str, Any], object] = refuse_quantised,
) -> Checkpoint:
    """The checkpoint in `folder`, after every check that needs no weights.

    Raises CheckpointError, naming the file, for anything missing, cut, or contradicting its own
    header. Of a quantised checkpoint, `quantised` is asked before a weight file is touched: it is
    given the folder, and the key and value of config.json that say how, and raises UnsupportedError
    for what its caller cannot read (by default: anything).
    """
    folder = Path(os.path.abspath(folder))  # not resolved: messages should show the name as given
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; a checkpoint folder was expected")
    config = read_config(folder)
    said = quantization_of(config)
    if said is not None:
        quantised(folder, *said)
    weights = find_weight_files(folder, config)
    digest = hashlib.sha256()
    for extra in (folder / "config.json", weights.index):
        content = extra.read_bytes() if extra is not None and extra.is_file() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    tensors: dict[str, Extent] = {}
    files = []
    metadata: dict[str, Any] = dict(weights.metadata or {})
    for file, stat, found, header_metadata, raw in _headers(weights):
        files.append((file, stat.st_size, stat.st_mtime_ns))
        digest.update(len(raw).to_bytes(8, "little") + raw)
        for name, extent in found.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in two files, {tensors[name].file} and {file}; "
                    "a shard of another checkpoint lies between them: download the model again"
                )
            tensors[name] = extent
        if weights.index is None:
            metadata.update(header_metadata)
    _check_index(weights, tensors)
    if not tensors:
        raise CheckpointError(f"{folder}: its weight files hold no tensor")
    return Checkpoint(
        folder,
        weights.format,
        tensors,
        tuple(files),
        metadata,
        digest.hexdigest(),
        said[1] if said is not None else None,
    )


def _headers(
    weights: WeightFiles,
) -> Iterator[tuple[str, os.stat_result, dict[str, Extent], dict[str, str], bytes]]:
    """File by file: its path, stat, tensors, free-form metadata and the bytes that said so."""
    read = (
        safetensors_header.read_header if weights.format == "safetensors" else pickles.read_header
    )
    for path in weights.files:
        file = os.fspath(path)
        yield file, os.stat(file), *read(file)


def _check_index(weights: WeightFiles, tensors: dict[str, Extent]) -> None:
    """What the index promises must be in the shard it names; more in a shard is no harm."""
    if weights.weight_map is None or weights.index is None:
        return
    for name, shard in weights.weight_map.items():
        wanted = os.fspath(weights.index.parent / shard)
        if name not in tensors or tensors[name].file != wanted:
            raise CheckpointError(
                f"{weights.index} places tensor {name!r} in {shard}, but that file does not hold "
                "it; index and shards belong to different versions: download the model again"
            )
