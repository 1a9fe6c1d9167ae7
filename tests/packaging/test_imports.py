"""Who imports whom: the parts stand on each other in one direction, and on no outsider's name."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

# Which parts a part may reach, directly or through others. Every part has its place here or in TOP.
BASE = ("errors", "home", "sizes", "trace", "memory_limits", "build_report", "version")
MAY_REACH: dict[str, set[str]] = {
    **{part: set() for part in BASE},
    "aio": {"home"},
    "kernels": {"home"},
    "scheduler": {"errors", "sizes"},
    "checkpoint": {"errors"},
    "device": {"trace"},
    "progress": {"sizes"},
}
MAY_REACH["row_copies"] = {"aio", "device", "errors", "home", "trace"}
MAY_REACH["store"] = MAY_REACH["row_copies"] | {"checkpoint", "progress", "scheduler", "sizes"}
MAY_REACH["measure"] = MAY_REACH["store"] | {"kernels", "memory_limits", "row_copies", "store"}
MAY_REACH["models"] = MAY_REACH["measure"]
MAY_REACH["config"] = {"errors", "memory_limits", "scheduler", "sizes"}
MAY_REACH["packed"] = MAY_REACH["models"] | MAY_REACH["config"] | {"config", "models"}
MAY_REACH["report"] = {"errors", "scheduler", "sizes", "trace"}
MAY_REACH["budget"] = MAY_REACH["config"] | {"config"}
MAY_REACH["planned"] = MAY_REACH["models"] | {"config", "measure", "models"}
MAY_REACH["placement"] = MAY_REACH["planned"] | {"budget", "planned"}
MAY_REACH["offloaded"] = MAY_REACH["models"] | {"measure", "models", "report"}
MAY_REACH["engine_choice"] = MAY_REACH["models"] | {"config", "models"}
MAY_REACH["assemble"] = set(MAY_REACH) - {"build_report", "packed", "version"}
MAY_REACH["api"] = MAY_REACH["assemble"] | {"assemble", "packed"}
# These stand on everything, and nobody on them: the package's face, and its commands.
TOP = {"", "__main__", "bench", "cli", "commands"}
# What is no Python of this package: the scheduler decides, and leaves doing to others.
OUTSIDE = {
    "aio": {"transformers", "safetensors"},
    "kernels": {"transformers", "safetensors"},
    "scheduler": {"torch", "transformers", "safetensors", "numpy", "ctypes", "mmap"},
    "checkpoint": {"transformers"},
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


COMPILED = {"offload.aio._aio"}
SOURCES = {module_name(file): file for file in sorted((ROOT / "offload").rglob("*.py"))}


def imports(module: str) -> set[str]:
    """Every module that this one imports, wherever in the file the import stands."""
    found = set()
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names = {f"{base}.{alias.name}" for alias in node.names}
            # `from package import name` imports a module, or a name of the package itself.
            modules = names & (SOURCES.keys() | COMPILED)
            found |= modules
            if names - modules:
                found.add(base)
    return found - {module}


IMPORTS = {module: imports(module) for module in SOURCES}


def part_of(module: str) -> str:
    """The first name below `offload`: `offload.aio.handle` is of `aio`, `offload` itself of ``."""
    return [*module.split("."), ""][1]


def inside(modules: set[str]) -> set[str]:
    return {module for module in modules if module.split(".")[0] == "offload"}


def reached_from(part: str) -> dict[str, list[str]]:
    """Every module that a part's modules lead to, with one way to it."""
    ways = {module: [module] for module in SOURCES if part_of(module) == part}
    queue = list(ways)
    for module in queue:
        for target in sorted(inside(IMPORTS.get(module, set())) - ways.keys()):
            ways[target] = [*ways[module], target]
            queue.append(target)
    return ways


@pytest.mark.parametrize("part", MAY_REACH)
def test_parts_reach_only_what_stands_below(part: str) -> None:
    wrong = [
        " -> ".join(way)
        for module, way in reached_from(part).items()
        if part_of(module) not in MAY_REACH[part] | {part}
    ]
    assert wrong == []


def test_every_part_has_its_place() -> None:
    assert {part_of(module) for module in SOURCES} == MAY_REACH.keys() | TOP


@pytest.mark.parametrize("part", ["aio", "kernels"])
def test_these_import_nothing_else_of_the_package(part: str) -> None:
    """But where it keeps files."""
    outside = {
        f"{module} -> {target}"
        for module in SOURCES
        if part_of(module) == part
        for target in inside(IMPORTS[module])
        if part_of(target) not in (part, "home")
    }
    assert outside == set()


@pytest.mark.parametrize("part", OUTSIDE)
def test_parts_know_no_more_of_the_world_than_they_need(part: str) -> None:
    known = {
        f"{module} -> {target}"
        for module in SOURCES
        if part_of(module) == part
        for target in IMPORTS[module]
        if target.split(".")[0] in OUTSIDE[part]
    }
    assert known == set()


def test_only_the_top_imports_api() -> None:
    importers = {part_of(module) for module in SOURCES if "offload.api" in IMPORTS[module]}
    assert importers - {"api"} <= TOP


def test_no_import_circles() -> None:
    """No module leads back to itself, not even through an import inside a function."""
    done: set[str] = set()

    def circle(module: str, way: list[str]) -> list[str] | None:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for target in sorted(inside(IMPORTS.get(module, set()))):
                if found := circle(target, [*way, module]):
                    return found
            done.add(module)
        return None

    assert next((found for module in SOURCES if (found := circle(module, []))), None) is None


def test_every_import_of_the_package_exists() -> None:
    there = SOURCES.keys() | COMPILED
    missing = {f"{m} -> {t}" for m in SOURCES for t in inside(IMPORTS[m]) - there}
    assert missing == set()


def test_transformers_pipeline_imports_in_the_repository_root() -> None:
    """The names of the links at the root are also those of other people's packages."""
    for link in ("aio", "scheduler", "kernels"):
        path = ROOT / link
        if os.path.lexists(path):
            assert path.is_symlink() and path.is_dir(), f"{link} must be a link into offload/"
    assert not list((ROOT / "kernels").glob("*.py")), "Hugging Face's `kernels` has this name"
    code = "from transformers import pipeline; print(pipeline.__module__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "transformers.pipelines"
