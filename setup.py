"""Builds the optional compiled parts; everything else about the package stands in pyproject.toml.

A part that cannot be built here (no compiler, no pybind11, a failed compile) is left out with one
warning, and its reason is kept in the installed package for `offload info`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = "offload.kernels._kernels"
HOST_KERNELS = "offload.kernels._host_kernels"
# GPUs that the kernels are compiled for; newer ones compile the last one's PTX when they load it.
CUDA_ARCHITECTURES = ("80", "90")
# Sources for one kind of GPU alone, and how they are compiled: their instructions are in no other's
# set, newer ones' neither. A compiler that does not know it leaves what is in them out.
SM90A = ("-gencode=arch=compute_90a,code=sm_90a", "-DOFFLOAD_SM90A")
FOR_SM90A = ("quant_gemm_wide",)
# Where this is set, CUDA code is compiled in a third of the time, hardly optimised: for machines
# without a GPU, where all there is to see is whether it compiles. The library refuses every GPU.
CHECK_KERNELS = "OFFLOAD_CHECK_KERNELS"
ONLY_CHECKED = f"built to be checked, as {CHECK_KERNELS} was set; no GPU is served"

# Some files of the host library are compiled for more than the least x86-64: it looks what the CPU
# has before it runs one. Never -march=native: what was built here may run elsewhere.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
HOST_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-exceptions"]
HOST_FLAGS += ["-fno-rtti", "-fno-threadsafe-statics"]
X86_PATHS = {
    "path_avx2": AVX2,
    "path_avx512": AVX512,
    "path_avx512_bf16": AVX512_BF16,
    "path_amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


class CudaLibrary(Extension):
    """A plain C library that nvcc builds: no Python and no torch in it, so one file serves all."""


class HostLibrary(Extension):
    """A plain C library for the CPU: no Python, no torch, and nothing of libstdc++ at run time."""


def compiled_parts() -> list[Extension]:
    """The parts whose sources are there, each named as the module (or library) it becomes."""
    aio = sources("offload/aio/csrc", "*.cpp")
    kernels = sources("offload/kernels/csrc", "*.cu")
    parts = [
        Extension(
            "offload.aio._aio",
            sources=aio,
            depends=sources("offload/aio/csrc", "*.h*"),
            language="c++",
            extra_compile_args=["-O2", "-std=c++17", "-fvisibility=hidden", "-g0", "-pthread"],
            extra_link_args=["-pthread"],
        ),
        CudaLibrary(
            KERNELS,
            sources=kernels,
            depends=sources("offload/kernels/csrc", "*.*h"),
            extra_compile_args=["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden"],
        ),
        HostLibrary(
            HOST_KERNELS,
            sources=sources("offload/kernels/csrc/cpu", "*.cpp"),
            depends=sources("offload/kernels/csrc/cpu", "*.h*"),
            extra_compile_args=HOST_FLAGS,
            extra_link_args=["-shared", "-pthread", "-static-libgcc", "-static-libstdc++"],
        ),
    ]
    return [part for part in parts if part.sources]


def sources(folder: str, pattern: str) -> list[str]:
    """The files of a folder, in a fixed order."""
    return sorted(path.as_posix() for path in Path(folder).glob(pattern))


class BuildOptional(build_ext):
    """Builds what can be built and records why the rest could not."""

    def run(self) -> None:
        wanted = list(self.extensions)
        self.reasons: dict[str, str | None] = {}  # None: it was built
        super().run()
        for ext in wanted:
            if self.reasons[ext.name] is not None:  # an older build no longer fits its sources
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        if self.inplace:
            package = Path(self.get_finalized_command("build_py").get_package_dir("offload"))
        else:
            package = Path(self.build_lib) / "offload"
        package.mkdir(parents=True, exist_ok=True)
        reasons = dict(self.reasons)
        if only_checked() and KERNELS in reasons:
            reasons[KERNELS] = reasons[KERNELS] or ONLY_CHECKED
        report = json.dumps(reasons, indent=1, ensure_ascii=False) + "\n"
        (package / "_build.json").write_text(report, encoding="utf-8")

    def get_ext_filename(self, fullname: str) -> str:
        """Where the part lies in the package; a library's name tells no Python version."""
        *folders, name = fullname.split(".")
        if name in {library.rpartition(".")[2] for library in (KERNELS, HOST_KERNELS)}:
            return os.path.join(*folders, f"{name}.so")
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        for ext in self.extensions:
            self.reasons[ext.name] = reason = self._build(ext)
            if reason is not None:
                print(
                    f"warning: {ext.name} was not built: {reason}. offload works without it, "
                    "on slower Python code; install again once this is mended",
                    file=sys.stderr,
                )
        self.extensions = [ext for ext in self.extensions if self.reasons[ext.name] is None]

    def _build(self, ext: Extension) -> str | None:
        """Build one part; on failure return why."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                with stderr_to(log):
                    if isinstance(ext, CudaLibrary):
                        self._build_cuda(ext)
                    elif isinstance(ext, HostLibrary):
                        self._build_host(ext)
                    else:
                        self._build_python(ext)
            except Exception as error:
                return first_error(log) or str(error)
            finally:
                log.seek(0)
                sys.stderr.write(log.read())
        return None

    def _build_python(self, ext: Extension) -> None:
        try:
            import pybind11  # present at build time only
        except ImportError as error:
            raise RuntimeError(f"{error}; it is needed at build time") from None
        ext.include_dirs.append(pybind11.get_include())
        self.build_extension(ext)

    def _build_cuda(self, ext: CudaLibrary) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            raise RuntimeError("nvcc was not found (looked at $CUDACXX, $CUDA_HOME/bin, and PATH)")
        last = CUDA_ARCHITECTURES[-1]
        code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in CUDA_ARCHITECTURES]
        code.append(f"-gencode=arch=compute_{last},code=compute_{last}")
        command = [nvcc, *ext.extra_compile_args]
        options = subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout
        if only_checked():
            command.append("-DOFFLOAD_CHECK_ONLY")
            command += ["--Ofast-compile=max"] if "--Ofast-compile" in options else []
        commands = {source: [*command, *code] for source in ext.sources}
        if "sm_90a" in options:
            special = [source for source in ext.sources if Path(source).stem in FOR_SM90A]
            commands.update({source: [*command, *SM90A] for source in special})
        self._build_library(ext, commands, [nvcc, "-shared"], "-check" if only_checked() else "")

    def _build_host(self, ext: HostLibrary) -> None:
        compiler = find_cxx()
        if compiler is None:
            raise RuntimeError(
                "no C++ compiler was found (looked at $CXX, and for g++, c++, clang++)"
            )
        commands = host_commands(ext, compiler)
        self._build_library(ext, commands, [*compiler, *ext.extra_link_args])

    def _build_library(
        self, ext: Extension, commands: dict[str, list[str]], link: list[str], kind: str = ""
    ) -> None:
        """Compile each source by its command, several at a time, and link them. Objects of another
        `kind` lie in another folder.
        """
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = Path(self.build_temp) / f"{target.stem}{kind}"
        objects.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            made = objects / f"{Path(source).stem}.o"
            wanted = max(os.path.getmtime(path) for path in (source, "setup.py", *ext.depends))
            if self.force or not made.exists() or made.stat().st_mtime < wanted:
                run_compiler([*commands[source], "-c", source, "-o", str(made)])
            return str(made)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = list(pool.map(compile_one, commands))
        run_compiler([*link, *made, "-o", str(target)])


def only_checked() -> bool:
    """Whether CUDA code is compiled for that alone."""
    return bool(os.environ.get(CHECK_KERNELS))


def find_nvcc() -> str | None:
    """CUDA's compiler, as CUDA's own tools look for it."""
    named = os.environ.get("CUDACXX")
    if named:
        return shutil.which(named)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [os.path.join(home, "bin") for home in homes if home]
    folders += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def host_commands(ext: Extension, compiler: list[str]) -> dict[str, list[str]]:
    """How each source of the host library is compiled: `-c SOURCE -o OBJECT` is missing."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    commands = {}
    for source in ext.sources:
        path = X86_PATHS.get(Path(source).stem)
        if path is None or x86:
            commands[source] = [*compiler, *ext.extra_compile_args, *(path or [])]
    return commands


def find_cxx() -> list[str] | None:
    """The C++ compiler's command."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def run_compiler(command: list[str]) -> None:
    """Run it, its messages going to this process's stderr."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{os.path.basename(command[0])} ended with {done.returncode}")


@contextlib.contextmanager
def stderr_to(log: TextIO) -> Iterator[None]:
    """Send what this process and its compilers write to stderr into `log`."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def first_error(log: TextIO) -> str | None:
    """The first error that a compiler reported."""
    log.seek(0)
    marks = ("error:", "error :", "nvcc fatal")
    return next((line.strip() for line in log if any(mark in line for mark in marks)), None)


setup(ext_modules=compiled_parts(), cmdclass={"build_ext": BuildOptional})
