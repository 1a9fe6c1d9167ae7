"""What the repository holds, as git sees it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def files() -> list[Path]:
    """Every file of the project, relative to its root; built and ignored ones are left out."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: what belongs to the project is what git lists")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    names = [Path(name) for name in listed.decode().split("\0") if name]
    return sorted(name for name in names if (ROOT / name).is_symlink() or (ROOT / name).exists())
