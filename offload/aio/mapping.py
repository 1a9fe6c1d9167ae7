"""One anonymous private mapping, aligned to 2 MiB, with huge pages where the system grants them."""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from . import system
from .system import libc

Huge = Literal["auto", "hugetlb", "thp", False]

HUGE_PAGE = 2 << 20
_TOUCH_PIECE = 64 << 20  # what one thread touches at a time
_MAX_TOUCH_THREADS = 16


class Mapping:
    """Memory from mmap; pages are of the kind asked for from the first touch on."""

    def __init__(self, nbytes: int, huge: Huge = False) -> None:
        self.address = 0
        page = os.sysconf("SC_PAGESIZE")
        self.nbytes = -(-max(nbytes, 1) // page) * page
        self.kind = self._ordinary = f"{page >> 10}K"
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
        self.kind = self._ordinary
        self._map_aligned(HUGE_PAGE)
        self._advise_huge()
        system.madvise(self.address, self.nbytes, system.MADV_DONTFORK)

    def touch(self, start: int, stop: int) -> None:
        """Have the kernel provide the pages of [start, stop) now, by as many threads as help.
        Raises MemoryError where one cannot be had.
        """
        pieces = [
            (self.address + at, min(_TOUCH_PIECE, stop - at))
            for at in range(start, stop, _TOUCH_PIECE)
        ]
        threads = min(len(pieces), len(os.sched_getaffinity(0)), _MAX_TOUCH_THREADS)
        if threads <= 1:
            for piece in pieces:
                _touch_piece(*piece)
            return
        with ThreadPoolExecutor(threads, "offload-touch") as pool:
            list(pool.map(lambda piece: _touch_piece(*piece), pieces))

    def huge_share(self) -> float:
        """Bytes on huge pages over resident bytes (from /proc/self/smaps); 0 where none are."""
        return _huge_share(self.address, self.nbytes)

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


def _touch_piece(address: int, nbytes: int) -> None:
    # Through ctypes the GIL is free: the threads fault in parallel. Unlike a write from user
    # space, this reports a page that cannot be had instead of killing the process.
    code = system.madvise(address, nbytes, system.MADV_POPULATE_WRITE)
    if code == errno.EINVAL:  # a kernel older than 5.14
        ctypes.memset(address, 0, nbytes)
    elif code:
        raise MemoryError(f"touching {nbytes} bytes: {os.strerror(code)}")


def _huge_share(address: int, nbytes: int) -> float:
    """Bytes on huge pages / resident bytes, over the mappings inside [address, +nbytes)."""
    resident = huge = 0
    inside = False
    page = 4
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                low, _, high = name.partition("-")
                inside = int(low, 16) < address + nbytes and int(high, 16) > address
            elif inside:
                if name == "KernelPageSize:":
                    page = int(rest.split()[0])
                elif name == "Rss:":
                    resident += int(rest.split()[0])
                elif name == "AnonHugePages:":
                    huge += int(rest.split()[0])
                elif name == "Private_Hugetlb:" and page > 4:
                    huge += int(rest.split()[0])
                    resident += int(rest.split()[0])
    return huge / resident if resident else 0.0


def _thp_mode() -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            text = file.read()
    except OSError:
        return "never"
    return text[text.find("[") + 1 : text.find("]")]
