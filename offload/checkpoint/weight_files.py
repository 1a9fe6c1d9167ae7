"""Which files of a checkpoint folder hold its weights, and whether all of them are there."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from offload.errors import CheckpointError, UnsupportedError

Format = Literal["safetensors", "bin"]

# In the order in which transformers looks: a single file wins over an index, safetensors over .bin.
_NAMES: tuple[tuple[str, Format], ...] = (
    ("model.safetensors", "safetensors"),
    ("model.safetensors.index.json", "safetensors"),
    ("pytorch_model.bin", "bin"),
    ("pytorch_model.bin.index.json", "bin"),
)


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of one folder; `weight_map` is None where no index names the tensors."""

    format: Format
    files: tuple[Path, ...]
    index: Path | None = None
    weight_map: dict[str, str] | None = None
    metadata: dict[str, Any] | None = None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`; anything else is an error that names the file."""
    try:
        value = json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} should hold a JSON object, not a {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, or an empty dict where there is none."""
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def quantization_of(config: dict[str, Any]) -> tuple[str, Any] | None:
    """What config.json says about quantised weights: the key, and what stands there."""
    parts = [config] + [value for value in config.values() if isinstance(value, dict)]
    for part in parts:  # a composite model keeps the entry in its text_config
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                return key, part[key]
    return None


def refuse_quantised(folder: Path, key: str, entry: Any) -> NoReturn:
    """Refuse a quantised checkpoint by its method's name."""
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    raise UnsupportedError(
        f"{folder} is quantised (config.json: {key}.quant_method = {method!r}), and this is for "
        "plain weights only; use the checkpoint in bf16, fp16 or fp32"
    )


def find_weight_files(folder: Path, config: dict[str, Any]) -> WeightFiles:
    """The weight files of `folder`, all of which are there; no weight file is opened."""
    named = config.get("transformers_weights")
    if isinstance(named, str):
        _check_inside(folder / "config.json", "transformers_weights", named)
        candidates: tuple[tuple[str, Format], ...] = ((named, "safetensors"),)
    else:
        candidates = _NAMES
    for name, kind in candidates:
        file = folder / name
        if os.path.lexists(file):
            if name.endswith(".index.json"):
                return _sharded(folder, file, kind)
            _check_present(folder, [name], None)
            return WeightFiles(kind, (file,))
    if isinstance(named, str):
        raise CheckpointError(f"{folder}: config.json names {named} as its weights: no such file")
    return _unconventional(folder)


def _unconventional(folder: Path) -> WeightFiles:
    """A folder without the usual names: accepted where only one reading is possible."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) == 1:
        return _sharded(folder, indexes[0], "safetensors")
    singles = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if len(singles) == 1 and not indexes:
        return WeightFiles("safetensors", (singles[0],))
    if len(indexes) > 1 or len(singles) > 1:
        found = ", ".join(file.name for file in [*indexes, *singles][:4])
        raise CheckpointError(
            f"{folder} has several weight files ({found}, ...) and no model.safetensors.index.json "
            "that says which belong together; incomplete download? Download the model again"
        )
    names = ", ".join(name for name, _ in _NAMES)
    raise CheckpointError(
        f"{folder} holds no weights: none of {names} is there; give a checkpoint folder, or "
        "download the model again"
    )


def _sharded(folder: Path, index: Path, kind: Format) -> WeightFiles:
    """The shards that `index` names."""
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map that says which file holds which tensor")
    for name, file in weight_map.items():
        _check_inside(index, f"weight_map[{name!r}]", file)
    names = sorted(set(weight_map.values()))
    _check_present(folder, names, index)
    metadata = content.get("metadata")
    return WeightFiles(
        kind,
        tuple(folder / name for name in names),
        index,
        weight_map,
        metadata if isinstance(metadata, dict) else {},
    )


def _check_inside(source: Path, key: str, name: Any) -> None:
    """A file name from a downloaded file must not lead out of the checkpoint's folder."""
    if isinstance(name, str) and name and "\0" not in name:
        path = Path(name)
        if not path.is_absolute() and ".." not in path.parts:
            return
    raise CheckpointError(f"{source}: {key} is {name!r:.200}, not the name of a file in its folder")


def _check_present(folder: Path, names: list[str], index: Path | None) -> None:
    """Every file must be there and be a file; all that are not are named at once."""
    missing = [
        name + (" (a link to nothing)" if os.path.islink(folder / name) else "")
        for name in names
        if not os.path.isfile(folder / name)
    ]
    if missing:
        count = (
            f"{len(missing)} of the {len(names)} files that {index.name} names"
            if index
            else ("its weight file")
        )
        raise CheckpointError(
            f"{folder}: {count} missing: {', '.join(missing)}; incomplete download? "
            "Download the model again"
        )
