"""Builds the host library for tests: as it is installed, and with AVX-512 emulated."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EMULATED = ("path_avx512", "path_avx512_bf16")


def build(folder: Path) -> Path:
    """The library, from setup.py's own commands."""
    commands, link = _commands()
    return _build(folder, {ROOT / source: command for source, command in commands.items()}, link)


def build_emulated(folder: Path) -> Path:
    """The library as a CPU with AVX-512 would run it, its instructions emulated over AVX2."""
    commands, link = _commands()
    copy = folder / "csrc"
    shutil.copytree(ROOT / "offload/kernels/csrc/cpu", copy)
    shutil.copy(HERE / "host_avx512.hpp", copy)
    simd = copy / "simd_avx512.hpp"
    text = simd.read_text()
    for real, emulated in (
        ("<immintrin.h>", '"host_avx512.hpp"'),
        ("__m512", "emulated_m512"),
        ("_mm512_", "emulated::"),
        ('__asm__("" : "+v"(v));', ""),
    ):
        assert real in text
        text = text.replace(real, emulated)
    simd.write_text(text)
    flags = {}
    for source, command in commands.items():
        path = Path(source).stem
        own = [flag for flag in command if not flag.startswith("-mavx512")]
        # What is wanted of it is what it computes; that it says yes to all instructions is meant.
        own += ["-O1", "-Wno-psabi"] if path in EMULATED else []
        own += ["-D__builtin_cpu_supports(name)=1"] if path == "library" else []
        flags[copy / Path(source).name] = own
    return _build(folder, flags, link)


def _commands() -> tuple[dict[str, list[str]], list[str]]:
    """setup.py's command for each source, and the one that links."""
    pytest.importorskip("setuptools")
    with mock.patch("setuptools.setup"), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        names = runpy.run_path("setup.py")
        (part,) = (p for p in names["compiled_parts"]() if p.name == names["HOST_KERNELS"])
        compiler = names["find_cxx"]()
        if compiler is None:
            pytest.skip("no C++ compiler")
        return names["host_commands"](part, compiler), [*compiler, *part.extra_link_args]


def _build(folder: Path, commands: dict[Path, list[str]], link: list[str]) -> Path:
    def compile_one(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        _run([*commands[source], "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, commands))
    library = folder / "_host_kernels.so"
    _run([*link, *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
