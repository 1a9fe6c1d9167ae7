"""Builds the optional compiled parts; everything else about the package stands in pyproject.toml.

A part that cannot be built here (no compiler, no pybind11, a failed compile) is left out with one
warning, and its reason is kept in the installed package for `offload info`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def compiled_parts() -> list[Extension]:
    """The parts whose sources are there, each named as the module it becomes."""
    aio = sorted(path.as_posix() for path in Path("offload/aio/csrc").glob("*.cpp"))
    if not aio:
        return []
    return [
        Extension(
            "offload.aio._aio",
            sources=aio,
            depends=sorted(path.as_posix() for path in Path("offload/aio/csrc").glob("*.h*")),
            language="c++",
            extra_compile_args=["-O2", "-std=c++17", "-fvisibility=hidden", "-g0", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]


class BuildOptional(build_ext):
    """Builds what can be built and records why the rest could not."""

    def run(self) -> None:
        wanted = list(self.extensions)
        self.reasons: dict[str, str | None] = {}  # None: it was built
        super().run()
        if self.inplace:
            for ext in wanted:
                if self.reasons[ext.name] is not None:  # an older build no longer fits its sources
                    Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            package = Path(self.get_finalized_command("build_py").get_package_dir("offload"))
        else:
            package = Path(self.build_lib) / "offload"
        package.mkdir(parents=True, exist_ok=True)
        report = json.dumps(self.reasons, indent=1, ensure_ascii=False) + "\n"
        (package / "_build.json").write_text(report, encoding="utf-8")

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
        try:
            import pybind11  # present at build time only

            ext.include_dirs.append(pybind11.get_include())
            with tempfile.TemporaryFile("w+", errors="replace") as log:
                try:
                    with stderr_to(log):
                        self.build_extension(ext)
                except Exception as error:
                    return first_error(log) or str(error)
                finally:
                    log.seek(0)
                    sys.stderr.write(log.read())
        except ImportError as error:
            return f"{error}; it is needed at build time"
        return None


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
    return next((line.strip() for line in log if "error:" in line), None)


setup(ext_modules=compiled_parts(), cmdclass={"build_ext": BuildOptional})
