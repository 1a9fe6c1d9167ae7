"""Compiles what tests load: the kernels for this processor, and the host library for any.

A library is kept in build/ under the hash of all that goes into it: the processes of one run
share it, and the next run compiles only what has changed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "offload" / "kernels" / "csrc"
KEPT = ROOT / "build" / "tests"
# Shared memory in a kernel's source, and what takes its place.
SHARED = "extern __shared__ __align__(128) unsigned char shared[];"
ON_HOST = "unsigned char* const shared = host_cuda::dynamic_shared();"
EMULATED_PATHS = ("path_avx512", "path_avx512_bf16", "path_amx")
SANITIZED = ["-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
SANITIZED += ["-fno-sanitize-recover=all", "-static-libubsan"]

_failed: dict[Path, str] = {}


def kernels(
    name: str,
    sources: Sequence[str],
    preamble: str,
    instead: Mapping[str, str] | None = None,
    flags: Sequence[str] = SANITIZED,
) -> ctypes.CDLL:
    """.cu files compiled for this processor; skips the test where that is not possible.

    `preamble`, a header of this folder, is included ahead of each and stands for CUDA; `instead`:
    texts in the place of headers that hold what only a GPU has.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers: runs the kernels on the host")
    files = _with_includes([*sources, preamble], instead or {})
    files |= {name: text.replace(SHARED, ON_HOST) for name, text in files.items()}
    command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-w"]
    # What the stand-ins keep is of one library: others of the process have their own.
    command += ["-fvisibility=hidden", "-U_FORTIFY_SOURCE"]  # the latter refuses fibers' longjmp
    command += [*flags, "-isystem", str(headers), "-I", ".", "-include", preamble]
    link = [compiler, "-shared", *flags]
    version = (headers / "cuda.h").read_text()
    built = library(name, files, dict.fromkeys(sources, command), link, version)
    return ctypes.CDLL(str(built))


def host_library() -> Path:
    """The host library, from setup.py's own commands."""
    commands, link = _commands()
    return library("host", _host_files(), commands, link)


def host_library_with_tiles() -> Path:
    """The library as a CPU with AMX would run it, its tiles emulated over AVX-512."""
    commands, link = _commands()
    files = _host_files()
    _emulate_tiles(files, commands)
    # Other paths take most of the time to compile, and are not what it is for.
    others = ("path_portable.cpp", "path_avx2.cpp")
    files["others.cpp"] = '#include "job.hpp"\nnamespace offload_host {\n'
    for source in others:
        files["others.cpp"] += f"void run_{source[5:-4]}(Job&, int) {{ __builtin_trap(); }}\n"
        del commands[source]
    files["others.cpp"] += "}\n"
    commands["others.cpp"] = commands["pool.cpp"]
    return library("host-amx", files, commands, link)


def emulated_host_library() -> Path:
    """The library as a CPU with AVX-512 and AMX would run it, all of both emulated over AVX2."""
    commands, link = _commands()
    files = _host_files() | {"host_avx512.hpp": (HERE / "host_avx512.hpp").read_text()}
    _emulate_tiles(files, commands)
    text = files["simd_avx512.hpp"]
    for real, emulated in (
        ("<immintrin.h>", '"host_avx512.hpp"'),
        ("__m512", "emulated_m512"),
        ("_mm512_", "emulated::"),
        ('__asm__("" : "+v"(v));', ""),
    ):
        assert real in text
        text = text.replace(real, emulated)
    files["simd_avx512.hpp"] = text
    for source, command in commands.items():
        path = Path(source).stem
        own = [flag for flag in command if not flag.startswith("-mavx512")]
        # What is wanted of it is what it computes; that it says yes to all instructions is meant.
        own += ["-O1", "-Wno-psabi"] if path in EMULATED_PATHS else []
        own += ["-D__builtin_cpu_supports(name)=1"] if path == "library" else []
        commands[source] = own
    return library("host-avx512", files, commands, link)


def _emulate_tiles(files: dict[str, str], commands: dict[str, list[str]]) -> None:
    files["host_amx.hpp"] = (HERE / "host_amx.hpp").read_text()
    for name, real, emulated in (
        ("tiles.hpp", "_tile_", "emulated::tile_"),
        ("block_tiles.hpp", "_tile_", "emulated::tile_"),
        ("path_amx.cpp", '#include "block_tiles.hpp"', '#include "host_amx.hpp"\n\\g<0>'),
        ("library.cpp", r"if \(has_tiles\(\)\)", "if (has_tiles() || true)"),
    ):
        files[name], count = re.subn(real, emulated, files[name])
        assert count
    own = [flag for flag in commands["path_amx.cpp"] if not flag.startswith("-mamx")]
    commands["path_amx.cpp"] = [*own, "-O1"]


def library(
    name: str,
    files: Mapping[str, str],
    commands: Mapping[str, Sequence[str]],
    link: Sequence[str],
    version: str = "",
) -> Path:
    """The shared library of `files` (name: text): each of `commands` (source: command, without
    `-c SOURCE -o OBJECT`) is run in a folder of them, then `link`. `version`: of what else it is
    made from.
    """
    parts = [sorted(files.items()), sorted(commands.items()), link, _version(link[0]), version]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    made = KEPT / f"{name}-{digest}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            assert made not in _failed, _failed[made]  # said at once to the next test
            for old in KEPT.glob(f"{name}-{'?' * len(digest)}.so"):
                old.unlink()
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=KEPT) as folder:
                try:
                    _compile(Path(folder), files, commands, link).rename(made)
                except subprocess.CalledProcessError as error:
                    _failed[made] = error.stderr
                    raise AssertionError(error.stderr) from None
    return made


def _compile(
    folder: Path,
    files: Mapping[str, str],
    commands: Mapping[str, Sequence[str]],
    link: Sequence[str],
) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)

    def run(command: Sequence[str]) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)

    def compile_one(source: str) -> str:
        run([*commands[source], "-c", source, "-o", f"{source}.o"])
        return f"{source}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, commands))
    run([*link, *objects, "-o", "made.so"])
    return folder / "made.so"


def _with_includes(names: Sequence[str], instead: Mapping[str, str]) -> dict[str, str]:
    """The named files of the kernels or of this folder, and all of them that they include."""
    files: dict[str, str] = {}
    queue = list(names)
    for name in queue:
        places = [place for place in (CSRC / name, HERE / name) if place.exists()]
        files[name] = instead[name] if name in instead else places[0].read_text()
        found = re.findall(r'^\s*#\s*include "(.+?)"', files[name], re.MULTILINE)
        queue += [other for other in found if other not in queue]
    return files


def _host_files() -> dict[str, str]:
    return {path.name: path.read_text() for path in (CSRC / "cpu").iterdir() if path.is_file()}


def _commands() -> tuple[dict[str, list[str]], list[str]]:
    """setup.py's command for each source of the host library, and the one that links."""
    pytest.importorskip("setuptools")
    with mock.patch("setuptools.setup"), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        names = runpy.run_path("setup.py")
        (part,) = (p for p in names["compiled_parts"]() if p.name == names["HOST_KERNELS"])
        compiler = names["find_cxx"]()
        if compiler is None:
            pytest.skip("no C++ compiler")
        commands = names["host_commands"](part, compiler)
        link = [*compiler, *part.extra_link_args]
    return {Path(source).name: command for source, command in commands.items()}, link


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def cuda_headers() -> Path | None:
    """Where CUDA's headers are, if anywhere."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).parents[1])]
    folders = [Path(root) / "include" for root in roots if root]
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)
