"""Builds a transformers model whose weights stay in their files, with transformers' own loading
code.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from offload.checkpoint import Checkpoint
from offload.checkpoint.lazy import LazyTensor
from offload.checkpoint.weight_files import read_json
from offload.errors import CheckpointError, MissingWeightError, OffloadError, UnsupportedError
from offload.models.quantized.modules import keep_quantised
from offload.models.quantized.read import lazy_state

_log = logging.getLogger(__name__)

# While transformers builds a model it changes torch's default dtype, its initialisers and its own
# tying of weights for everyone. A fork waits too: its child would keep all this, and the lock.
_LOADING = threading.RLock()
os.register_at_fork(
    before=_LOADING.acquire, after_in_parent=_LOADING.release, after_in_child=_LOADING.release
)


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | str = "auto",
    model_class: type | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a checkpoint folder; every stored parameter is a `LazyTensor`, every other
    buffer is real.

    Names, merged experts, dtypes, ties and buffers come out as `from_pretrained` makes them, since
    it is the one that runs. Modules with quantised weights hold the stored tensors as parameters
    (`keep_quantised`). Raises MissingWeightError where a parameter would be left to chance,
    CheckpointError where shapes differ.
    """
    if not isinstance(attn_implementation, (str, Mapping, type(None))):
        raise TypeError(
            f"attn_implementation must be a name such as 'sdpa', got {attn_implementation!r}"
        )
    folder = checkpoint.folder
    with blamed_on(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        cls = _resolve_class(config, folder, model_class, trust_remote_code)
    options: dict[str, Any] = {}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    state = lazy_state(checkpoint, _dtype(config, dtype))
    _forget_quantization(config)  # loading should see the weights that are stood for
    with _LOADING, _quiet_loading(), blamed_on(folder / "config.json"):
        loaded: Any = _guarded(cls, folder).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    model.__class__ = cls
    _check(model, info, folder)
    keep_quantised(model)
    model.config._name_or_path = model.name_or_path = str(folder)
    generation = folder / "generation_config.json"
    if model.can_generate() and generation.is_file():
        read_json(generation)
        with blamed_on(generation):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _dtype(config: PreTrainedConfig, asked: torch.dtype | str) -> torch.dtype | None:
    """What the model's weights are to be, where that is said anywhere."""
    if asked != "auto":
        return getattr(torch, asked) if isinstance(asked, str) else asked
    for part in (config, config.get_text_config(decoder=True)):
        said = getattr(part, "dtype", None)
        if isinstance(said, torch.dtype):
            return said
    return None


def _forget_quantization(config: PreTrainedConfig) -> None:
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None and getattr(part, "quantization_config", None) is not None:
            del part.quantization_config


def _resolve_class(
    config: PreTrainedConfig, folder: Path, wanted: type | str | None, trust_remote_code: bool
) -> type[PreTrainedModel]:
    if isinstance(wanted, str):
        if not hasattr(transformers, wanted):
            raise ValueError(f"model_class={wanted!r} is not a class of transformers")
        wanted = getattr(transformers, wanted)
    if wanted is not None and not hasattr(wanted, "_model_mapping"):
        if not (isinstance(wanted, type) and issubclass(wanted, PreTrainedModel)):
            raise ValueError(f"model_class must be a PreTrainedModel or Auto class, got {wanted!r}")
        return wanted
    auto: Any = wanted or transformers.AutoModelForCausalLM
    remote = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if remote and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, str(folder))
    if wanted is None:
        for name in config.architectures or ():
            named = getattr(transformers, str(name), None)
            if isinstance(named, type) and issubclass(named, PreTrainedModel):
                return named
    if type(config) not in auto._model_mapping:
        hint = "; pass trust_remote_code=True if you trust its code" if remote else ""
        raise UnsupportedError(
            f"{folder}: model type {config.model_type!r} with architectures {config.architectures} "
            f"has no {auto.__name__} in transformers {transformers.__version__}; pass "
            f"model_class{hint}"
        )
    found = auto._model_mapping[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def _guarded(cls: type[PreTrainedModel], folder: Path) -> type[PreTrainedModel]:
    """`cls` that refuses missing weights before it would allocate and invent them."""

    def finalize(model: PreTrainedModel, load_config: Any, info: Any) -> Any:
        _check_loaded(model, info, folder)
        return cls._finalize_model_loading(model, load_config, info)

    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_finalize_model_loading": staticmethod(finalize),
    }
    return type(cls.__name__, (cls,), body)


def _check(model: PreTrainedModel, info: Any, folder: Path) -> None:
    _check_loaded(model, info, folder)
    unexpected = _field(info, "unexpected_keys")
    if unexpected:
        _log.info("%s: tensors that the model does not use: %s", folder, sorted(unexpected))
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"{type(model).__name__} left its buffer {name} without a value (its code computes "
                "it in a way that loading does not repeat)"
            )


def _check_loaded(model: PreTrainedModel, info: Any, folder: Path) -> None:
    """Refuse what transformers would repair by chance, or report in a table."""
    mismatched = _field(info, "mismatched_keys")
    if mismatched:
        rows = ", ".join(
            f"{n} (file {tuple(a)}, model {tuple(b)})" for n, a, b in sorted(mismatched)
        )
        raise CheckpointError(
            f"{folder}: shapes in the files differ from those of config.json: {rows}"
        )
    if conversions := _field(info, "conversion_errors"):
        raise MissingWeightError(
            f"{folder}: the files hold only a part of what {', '.join(sorted(conversions))} is "
            "made of (several tensors are merged into one, such as those of experts); the "
            "checkpoint is incomplete: download the model again"
        )
    if errors := _field(info, "error_msgs"):
        raise CheckpointError(f"{folder}: transformers could not load the weights: {errors}")
    _refuse_missing(model, set(_field(info, "missing_keys")), folder)


def _field(info: Any, name: str) -> Any:
    return info.get(name, ()) if isinstance(info, dict) else getattr(info, name, ())


def _refuse_missing(model: PreTrainedModel, missing: set[str], folder: Path) -> None:
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    absent = sorted(
        name
        for name in missing
        if not isinstance(parameters.get(name), LazyTensor)
        and not _found_by_tie(model, name, missing)
        and not any(re.search(pattern, name) for pattern in ignored)
    )
    if not absent:
        return
    shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
    hint = "the checkpoint is incomplete, or made for another class (model_class)"
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if output is not None and len(absent) == 1:
        names = {n for n, p in parameters.items() if p is getattr(output, "weight", None)}
        if absent[0] in names:
            hint = (
                "set tie_word_embeddings to true in config.json if the head shares the embedding, "
                "or add the tensor"
            )
    raise MissingWeightError(
        f"{folder} holds no tensor for {len(absent)} of the model's {len(parameters)} parameters: "
        f"{shown}; {hint}"
    )


def _found_by_tie(model: PreTrainedModel, name: str, missing: set[str]) -> bool:
    """Whether the files hold another name of the same tensor, be it source or target of the tie."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    source = tied.get(name, name)
    return any(
        other not in missing for other in (source, *(t for t, s in tied.items() if s == source))
    )


# Which say themselves what is wrong, or have nothing to do with what stands in a file.
_OF_OTHER_CAUSES = (
    *(OffloadError, OSError, ImportError, ValueError, NotImplementedError),
    *(MemoryError, torch.OutOfMemoryError),
)


@contextmanager
def blamed_on(file: Path) -> Iterator[None]:
    """Errors that name neither file nor value, such as KeyError('nosuch'), as one that does."""
    try:
        yield
    except _OF_OTHER_CAUSES:
        raise
    except Exception as error:
        said, _, _ = str(error).partition("Exception raised from ")  # torch's stack in C++
        raise CheckpointError(
            f"{file}: transformers {transformers.__version__} cannot use this "
            f"({type(error).__name__}: {' '.join(said.split())})"
        ) from error


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar over weights that are not read."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
