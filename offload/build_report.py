"""What the installation compiled, and why not the rest."""

import json
from pathlib import Path


def build_report() -> dict[str, str | None]:
    """Each compiled part by module name: None where it was built to be used, else why it was not.

    Empty where nothing was to be built, or where the package runs from a plain source folder.
    """
    file = Path(__file__).with_name("_build.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
