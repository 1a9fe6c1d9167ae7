"""Where the package keeps files for a user: packs, measured rates, tables of choices."""

import os
from pathlib import Path


def home_folder() -> Path:
    """$OFFLOAD_HOME, else `offload` in the user's cache folder."""
    if home := os.environ.get("OFFLOAD_HOME"):
        return Path(os.path.expanduser(home))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache), "offload")
