"""Reserved huge pages, so that fio gets the same memory as we do; given back at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_FOLDER = "/sys/kernel/mm/hugepages/hugepages-2048kB/"
_PAGE = 2 << 20


def free_huge_bytes() -> int:
    """Bytes of reserved 2 MiB pages that nobody uses."""
    try:
        with open(_FOLDER + "free_hugepages") as file:
            return int(file.read()) * _PAGE
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def reserved(nbytes: int) -> Iterator[bool]:
    """Have `nbytes` of free huge pages for a while, if we may; says whether they are there."""
    missing = -(-(nbytes - free_huge_bytes()) // _PAGE)
    if missing <= 0:
        yield True
        return
    try:
        _add(missing)
    except (OSError, ValueError):  # only root may
        yield False
        return
    try:
        yield free_huge_bytes() >= nbytes
    finally:
        with contextlib.suppress(OSError):
            _add(-missing)  # not the old number: another run may have added its own


def _add(pages: int) -> None:
    with open(_FOLDER + "nr_hugepages") as file:
        present = int(file.read())
    with open(_FOLDER + "nr_hugepages", "w") as file:
        file.write(str(max(0, present + pages)))
