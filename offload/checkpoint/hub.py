"""A model's name as the user gives it -> its checkpoint folder: a folder itself, or a hub id."""

import os
from pathlib import Path

from offload.checkpoint.weight_files import find_weight_files, read_config
from offload.errors import CheckpointError, ModelNotFoundError

_ALWAYS = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "spiece*", "merges*")


def resolve_model(
    model: str | os.PathLike[str], revision: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The checkpoint folder of `model`.

    An existing folder is itself. Anything else is a hub id: its complete snapshot in the local
    cache is taken without any network; else it is downloaded, unless HF_HUB_OFFLINE=1.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"the model must be a checkpoint folder, a hub id or a PreTrainedModel, got {model!r}"
        )
    if revision is not None and not isinstance(revision, str):
        raise TypeError(f"revision must be the name of a revision or None, got {revision!r}")
    if not isinstance(trust_remote_code, bool):  # "no" would be taken for yes
        raise TypeError(f"trust_remote_code must be True or False, got {trust_remote_code!r}")
    name = os.fspath(model)
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
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
    if cached is not None and _is_complete(cached, trust_remote_code):
        return cached
    try:
        return _download(name, revision, trust_remote_code)
    except Exception as error:  # the client lets through those of its HTTP library, which changes
        if cached is not None and _has_weights(cached):  # and no tokenizer, maybe by design
            return cached
        raise _not_found(name, revision, cached, error) from error


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


def _has_weights(snapshot: Path) -> bool:
    """Whether the snapshot has a config and all its weight files, by name."""
    if not (snapshot / "config.json").is_file():
        return False
    try:
        find_weight_files(snapshot, read_config(snapshot))
    except CheckpointError:
        return False
    return True


def _is_complete(snapshot: Path, trust_remote_code: bool) -> bool:
    """Whether nothing is missing that a run may want."""
    if not _has_weights(snapshot) or not any(any(snapshot.glob(name)) for name in _TOKENIZERS):
        return False
    wants_code = trust_remote_code and "auto_map" in read_config(snapshot)
    return not wants_code or any(snapshot.glob("*.py"))


def _download(repo_id: str, revision: str | None, trust_remote_code: bool) -> Path:
    """The snapshot, fetched: configuration, tokenizer, and weights in one format only."""
    from huggingface_hub import HfApi, snapshot_download

    # Unlike a listing, this request is not tried again for half a minute without a network.
    siblings = HfApi().model_info(repo_id, revision=revision).siblings or []
    names = [file.rfilename for file in siblings]
    has_safetensors = any("/" not in name and name.endswith(".safetensors") for name in names)
    patterns = [*_ALWAYS, "*.safetensors" if has_safetensors else "pytorch_model*.bin"]
    if trust_remote_code:
        patterns.append("*.py")
    return Path(
        snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    )


def _not_found(
    repo_id: str, revision: str | None, cached: Path | None, error: Exception
) -> ModelNotFoundError:
    from huggingface_hub import constants

    at = f" at revision {revision!r}" if revision else ""
    command = f"hf download {repo_id}" + (f" --revision {revision}" if revision else "")
    where = "it is neither a folder nor a hub id in the local cache"
    if cached is not None:
        where = f"the local cache holds only a part of it ({cached})"
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE=1 forbids a download"
        what = f"run `{command}` where there is a network"
    else:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        why = f"fetching it from the hub failed ({first})"
        what = f"check the name and the network and try `{command}`"
    return ModelNotFoundError(
        f"no model {repo_id!r}{at}: {where} ({constants.HF_HUB_CACHE}), and {why}; "
        f"{what}, or give a checkpoint folder"
    )
