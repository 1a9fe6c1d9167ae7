"""A model's name as the user gives it -> its checkpoint folder: a folder itself, or a hub id."""

import os
from pathlib import Path

from offload.errors import CheckpointError, ModelNotFoundError
from offload.weight_files import find_weight_files, read_config

_ALWAYS = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt")


def resolve_model(
    model: str | os.PathLike[str],
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """The checkpoint folder of `model`.

    An existing folder is itself. Anything else is a hub id: its complete snapshot in the local
    cache is taken without any network; else it is downloaded, unless HF_HUB_OFFLINE=1.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise NotADirectoryError(
            f"{name} is a file; give the checkpoint's folder instead: {path.absolute().parent}"
        )
    if not _is_hub_id(name):
        raise ModelNotFoundError(
            f"no model {name!r}: there is no such folder, and it cannot be a hub id "
            "(OWNER/NAME of letters, digits, '-', '_', '.'); give a checkpoint folder or a hub id"
        )
    cached = _cached_snapshot(name, revision)
    if cached is not None and _is_complete(cached):
        return cached
    return _download(name, revision, trust_remote_code, cached)


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _cached_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot folder in the hub's local cache, complete or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return _partial_snapshot(repo_id, revision)


def _partial_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot that holds at least config.json: what a download by another tool leaves."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _is_complete(snapshot: Path) -> bool:
    """Whether the snapshot has a config and all its weight files, by name."""
    if not (snapshot / "config.json").is_file():
        return False
    try:
        find_weight_files(snapshot, read_config(snapshot))
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _download(
    repo_id: str, revision: str | None, trust_remote_code: bool, cached: Path | None
) -> Path:
    """The snapshot, fetched: configuration, tokenizer, and weights in one format only."""
    from huggingface_hub import HfApi, constants, snapshot_download

    at = f" at revision {revision!r}" if revision else ""
    command = f"hf download {repo_id}" + (f" --revision {revision}" if revision else "")
    if constants.HF_HUB_OFFLINE:
        if cached is not None:  # opening it says exactly what is missing
            return cached
        raise ModelNotFoundError(
            f"no model {repo_id!r}{at}: it is neither a folder nor a hub id in the local cache "
            f"({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE=1 forbids a download; "
            f"run `{command}` where there is a network, or give a checkpoint folder"
        )
    try:
        names = HfApi().list_repo_files(repo_id, revision=revision)
        patterns = list(_ALWAYS)
        has_safetensors = any("/" not in n and n.endswith(".safetensors") for n in names)
        patterns.append("*.safetensors" if has_safetensors else "pytorch_model*.bin")
        if trust_remote_code:
            patterns.append("*.py")
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    except OSError as error:  # every error of the hub's client and of the disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"no model {repo_id!r}{at}: it is neither a folder nor a hub id in the local cache "
            f"({constants.HF_HUB_CACHE}), and fetching it from the hub failed ({reason}); check the "
            f"name and the network and try `{command}`, or give a checkpoint folder"
        ) from error
    return Path(folder)
