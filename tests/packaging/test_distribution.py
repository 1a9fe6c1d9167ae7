"""What is packed and installed: all sources, nothing built, and a package that works uncompiled."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import source_tree
from source_tree import ROOT

import offload
from offload.build_report import build_report

BUILT = [
    "offload/_build.json",
    "offload/aio/_aio.cpython-311-x86_64-linux-gnu.so",
    "offload/aio/csrc/engine.o",
    "offload/kernels/_host_kernels.so",
    "offload/kernels/_kernels.so",
    "offload/__pycache__/api.cpython-311.pyc",
    "build/lib/offload/stale.py",
]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a copy of the project in which something was built before."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("project")
    for name in source_tree.files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    for name in BUILT:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("built")
    out = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, str(out)], cwd=copy)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the package from the sdist: no network, no torch asked for, no compiler."""
    pytest.importorskip("pybind11")
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    run([*command, "--no-index", "--target", str(target), str(sdist)], env=without_compilers())
    return target


def without_compilers() -> dict[str, str]:
    named = {"CC", "CXX", "CUDACXX", "PYTHONPATH"}
    kept = {k: v for k, v in os.environ.items() if k not in named}
    return {**kept, "PATH": ""}


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sdist_holds_every_source_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {Path(*Path(m.name).parts[1:]) for m in archive.getmembers() if not m.isdir()}
    sources = {name for name in source_tree.files() if not (ROOT / name).is_symlink()}
    made = {p for p in packed if p.parts[0] == "offload.egg-info"} | {
        Path("PKG-INFO"),
        Path("setup.cfg"),
    }
    assert sources - packed == set(), "MANIFEST.in misses these"
    assert packed - sources - made == set(), "these do not belong to the sources"


def test_only_offload_is_installed(installed: Path) -> None:
    """No top-level `aio`, `kernels`, `scheduler`, `tests`, `examples` or `scripts`."""
    names = {path.name for path in installed.iterdir()}
    (metadata,) = (name for name in names if name.endswith(".dist-info"))
    assert names == {"offload", metadata, "bin"}
    found = {path.relative_to(installed) for path in (installed / "offload").rglob("*")}
    modules = {path for path in found if path.suffix == ".py"}
    expected = {n for n in source_tree.files() if n.parts[0] == "offload" and n.suffix == ".py"}
    assert modules == expected
    assert not [p for p in found if p.suffix in {".cpp", ".h", ".hpp", ".cu", ".so"}]


def test_installs_without_compiler_and_says_why(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, offload; from offload.build_report import build_report; "
        "print(json.dumps([offload.__file__, offload.__version__, build_report()]))"
    )
    out = run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**without_compilers(), "PYTHONPATH": str(installed)},
    )
    file, version, report = json.loads(out)
    assert Path(file).is_relative_to(installed)
    assert version == offload.__version__
    assert report.keys() == {
        "offload.aio._aio",
        "offload.kernels._host_kernels",
        "offload.kernels._kernels",
    }
    assert "No such file or directory" in report["offload.aio._aio"]
    assert "nvcc" in report["offload.kernels._kernels"]
    assert "no C++ compiler" in report["offload.kernels._host_kernels"]


def test_extension_is_compiled_where_a_compiler_is() -> None:
    """A failed compile installs all the same, so nothing but this test would show it."""
    if not build_report():
        pytest.skip("offload runs from a plain source folder here; nothing was compiled")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on PATH")
    failed = {name: why for name, why in build_report().items() if why is not None}
    expected = ("nvcc was not found", "built to be checked")
    assert not [why for why in failed.values() if not any(text in why for text in expected)]


def test_version_has_one_source(sdist: Path, installed: Path) -> None:
    version = offload.__version__
    assert sdist.name == f"offload-{version}.tar.gz"
    assert (installed / f"offload-{version}.dist-info").is_dir()
    literal = re.compile(r"""^\s*(__version__|version)\s*(:.*)?=\s*["']\d""", re.MULTILINE)
    texts = {n: (ROOT / n).read_text() for n in source_tree.files() if n.suffix in {".py", ".toml"}}
    assert [str(n) for n, text in texts.items() if literal.search(text)] == ["offload/version.py"]
    try:
        running = importlib.metadata.version("offload")
    except importlib.metadata.PackageNotFoundError:
        return  # from a plain source folder
    assert running == version, "installed metadata is older than the sources: install again"
