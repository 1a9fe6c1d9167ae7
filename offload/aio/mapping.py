"""One anonymous private mapping, aligned to 2 MiB, with huge pages where the system grants them."""

from __future__ import annotations

import ctypes
import os
from typing import Literal

from . import system
from .system import libc

Huge = Literal["auto", "hugetlb", "thp", False]

HUGE_PAGE = 2 << 20


class Mapping:
    """Memory from mmap; pages are of the kind asked for from the first touch on."""

    def __init__(self, nbytes: int, huge: Huge = False) -> None:
        self.address = 0
        page = os.sysconf("SC_PAGESIZE")
        self.nbytes = -(-max(nbytes, 1) // page) * page
        self.kind = "4K" if page == 4096 else f"{page >> 10}K"
        self.reason = "huge pages were not asked for"
        if huge not in ("auto", "hugetlb", "thp", False):
            raise ValueError(f"huge must be 'auto', 'hugetlb', 'thp' or False, not {huge!r}")
        if huge and nbytes >= HUGE_PAGE:
            self._map_huge(huge)
        if not self.address:
            self._map_aligned(HUGE_PAGE if nbytes >= HUGE_PAGE else page)
            if huge == "auto" or huge == "thp":
                self._advise_huge()
        # A forked child must not share pages that a device writes into: the copy that
        # copy-on-write makes in the parent would leave the device with the old page.
        system.madvise(self.address, self.nbytes, system.MADV_DONTFORK)

    def _map_huge(self, huge: Huge) -> None:
        if huge == "thp":
            return
        rounded = -(-self.nbytes // HUGE_PAGE) * HUGE_PAGE
        flags = system.MAP_PRIVATE | system.MAP_ANONYMOUS | system.MAP_HUGETLB | system.MAP_HUGE_2MB
        address = libc.mmap(None, rounded, system.PROT_READ_WRITE, flags, -1, 0)
        if address == system.MAP_FAILED:
            code = ctypes.get_errno()
            if huge == "hugetlb":
                raise OSError(
                    code,
                    f"mmap of {rounded} bytes of huge pages: {os.strerror(code)}; reserve "
                    f"{rounded // HUGE_PAGE} with `sysctl -w vm.nr_hugepages=...`, or huge='auto'",
                )
            return
        self.address, self.nbytes, self.kind = address, rounded, "hugetlb"
        self.reason = "reserved huge pages (vm.nr_hugepages)"

    def _map_aligned(self, alignment: int) -> None:
        flags = system.MAP_PRIVATE | system.MAP_ANONYMOUS
        slack = alignment if alignment > os.sysconf("SC_PAGESIZE") else 0
        start = libc.mmap(None, self.nbytes + slack, system.PROT_READ_WRITE, flags, -1, 0)
        if start == system.MAP_FAILED:
            code = ctypes.get_errno()
            raise MemoryError(f"mmap of {self.nbytes} bytes: {os.strerror(code)}")
        self.address = -(-start // alignment) * alignment
        # Give the slack back on both sides: exact size, aligned start.
        before, after = self.address - start, start + slack - self.address
        if before:
            system.check(libc.munmap(start, before), "munmap")
        if after:
            system.check(libc.munmap(self.address + self.nbytes, after), "munmap")

    def _advise_huge(self) -> None:
        code = system.madvise(self.address, self.nbytes, system.MADV_HUGEPAGE)
        if code:
            self.reason = f"madvise(MADV_HUGEPAGE): {os.strerror(code)}"
        elif self.nbytes < HUGE_PAGE:
            self.reason = "smaller than one huge page"
        elif _thp_mode() == "never":
            self.reason = "/sys/kernel/mm/transparent_hugepage/enabled is 'never'"
        else:
            self.kind, self.reason = "thp", "transparent huge pages (madvise)"

    def fall_back_to_small(self) -> None:
        """Replace untouched reserved huge pages that cannot be had by an ordinary mapping."""
        self.close()
        self.address = 0
        self._map_aligned(HUGE_PAGE)
        self._advise_huge()
        system.madvise(self.address, self.nbytes, system.MADV_DONTFORK)

    def read(self, nbytes: int) -> bytes:
        """A copy of the first bytes."""
        return ctypes.string_at(self.address, nbytes)

    def close(self) -> None:
        if self.address:
            libc.munmap(self.address, self.nbytes)
            self.address = 0

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _thp_mode() -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            text = file.read()
    except OSError:
        return "never"
    return text[text.find("[") + 1 : text.find("]")]
