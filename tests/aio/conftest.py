"""What the tests of asynchronous I/O share: every backend, and files on a real disk."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aio_machine import ROOT, why_not

from offload import aio
from offload.aio.backends import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture(params=["uring-fixed", "libaio", "threads", "ctypes-libaio", "python-threads"])
def each_engine(request: pytest.FixtureRequest) -> str:
    """One backend of each kind of machinery, for tests that take longer."""
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture(scope="session")
def content() -> bytes:
    return os.urandom(3 * (1 << 20) + 1234)


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Path:
    """A file of odd length with random bytes; do not change it."""
    path = tmp_path_factory.mktemp("aio") / "data.bin"
    path.write_bytes(content)
    return path


@pytest.fixture
def direct_file(data_file: Path) -> Iterator[aio.AioFile]:
    with aio.open(data_file) as file:
        if not file.direct:
            pytest.skip(f"no O_DIRECT in {data_file.parent}: {file.direct_reason}")
        yield file


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess]:
    """Run a script in a process of its own, which finds this package."""

    def run(code: str, *arguments: object, timeout: float = 60, **options):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, env=environment, **options,
        )  # fmt: skip

    return run
