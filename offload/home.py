"""Where the package keeps files for a user: packs, measured rates, tables of choices."""

import os
from pathlib import Path


def home_folder() -> Path:
    """$OFFLOAD_HOME, else `offload` in the user's cache folder. It still begins with `~` where the
    user has no home folder: `expanded` refuses that once something is to be kept.
    """
    if home := os.environ.get("OFFLOAD_HOME"):
        return Path(os.path.expanduser(home))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache), "offload")


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with the home folder for `~`. Raises FileNotFoundError where that is not known, as of
    a container's user without a name.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise FileNotFoundError(
            f"the home folder that {found!r} begins with is not known: set HOME, or name a whole "
            "path (OFFLOAD_HOME is the folder of what is kept between runs)"
        )
    return Path(found)
