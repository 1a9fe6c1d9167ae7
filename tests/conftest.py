"""What every test needs before torch is imported, and the models that many tests share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run: a failure that comes and goes teaches nobody.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")

# One-row products in MKL depend on the weight's address alignment unless a code path is fixed.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def variant_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`variant_folder("llama")` is its checkpoint, written once a session: do not change it."""
    import variants

    parent = tmp_path_factory.mktemp("variants")
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = variants.save(name, parent)
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint folder of a real small model, kept between sessions."""
    import demo_model

    # In a process of its own: converting would leave a gigabyte behind in this one.
    done = subprocess.run([sys.executable, demo_model.__file__], capture_output=True, text=True)
    if done.returncode == demo_model.UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
