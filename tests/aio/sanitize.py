"""Run the I/O engine under AddressSanitizer (with UBSan) and ThreadSanitizer.

    python tests/aio/sanitize.py [address] [thread] [python]

`address` and `thread` build `stress.cpp` with the engine's sources and run it; `python` builds the
extension with AddressSanitizer and runs the contract's tests on it. All three by default.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "offload" / "aio" / "csrc"
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread", "-Wall", "-Wextra"]
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def stress(kind: str, folder: Path) -> None:
    """Build and run the stress program with one sanitizer."""
    program = folder / f"stress-{kind}"
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "bindings.cpp"]
    sanitizers = "address,undefined" if kind == "address" else kind
    subprocess.run(
        [compiler(), *FLAGS, f"-fsanitize={sanitizers}", *map(str, sources),
         str(Path(__file__).with_name("stress.cpp")), "-o", str(program)],
        check=True,
    )  # fmt: skip
    subprocess.run([str(program), str(folder)], check=True, env=ENVIRONMENT, timeout=600)


def python(folder: Path) -> None:
    """Build the extension with AddressSanitizer into a copy of the package; run the tests on it."""
    import pybind11

    package = folder / "offload"
    shutil.copytree(
        ROOT / "offload", package,
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "csrc"),
    )  # fmt: skip
    shutil.copytree(ROOT / "tests" / "aio", folder / "tests")
    extension = package / "aio" / f"_aio{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    subprocess.run(
        [compiler(), *FLAGS, "-fsanitize=address", "-shared", "-fPIC", "-fvisibility=hidden",
         *(f"-isystem{path}" for path in includes), *map(str, sorted(SOURCES.glob("*.cpp"))),
         "-o", str(extension)],
        check=True,
    )  # fmt: skip
    runtime = subprocess.run(
        [compiler(), "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = {
        **ENVIRONMENT,
        "LD_PRELOAD": runtime,
        # The interpreter keeps what it has till it ends.
        "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=0",
        "PYTHONPATH": str(folder),
    }
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x",
         "-k", "not gib and not leave_nothing",
         *(f"tests/test_aio_{name}.py" for name in ("contract", "script", "libaio"))],
        check=True, env=environment, cwd=folder, timeout=900,
    )  # fmt: skip


def main() -> None:
    wanted = sys.argv[1:] or ["address", "thread", "python"]
    # In the working folder's file system: O_DIRECT means nothing in a tmpfs.
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:
        for kind in wanted:
            print(f"--- {kind}", flush=True)
            if kind == "python":
                python(Path(folder))
            else:
                stress(kind, Path(folder))
    print("no sanitizer has found anything")


if __name__ == "__main__":
    main()
