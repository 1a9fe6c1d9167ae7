"""Page-locking for CUDA, and copies of rows: the runtime that torch has loaded, through ctypes."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

_PORTABLE = 1  # pinned for every context, whichever device copies from it
_DEFAULT_KIND = 4  # of a copy: the addresses tell where it goes
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered


class Cudart:
    """The few calls of libcudart that pinned memory needs."""

    def __init__(self, path: str) -> None:
        lib = ctypes.CDLL(path)
        lib.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        lib.cudaHostRegister.restype = ctypes.c_int
        lib.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        lib.cudaHostUnregister.restype = ctypes.c_int
        lib.cudaGetErrorString.argtypes = [ctypes.c_int]
        lib.cudaGetErrorString.restype = ctypes.c_char_p
        lib.cudaGetLastError.argtypes = []
        lib.cudaGetLastError.restype = ctypes.c_int
        lib.cudaSetDevice.argtypes = [ctypes.c_int]
        lib.cudaSetDevice.restype = ctypes.c_int
        lib.cudaMemcpy2DAsync.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
        ]
        lib.cudaMemcpy2DAsync.restype = ctypes.c_int
        self._lib = lib
        self.path = path

    def register(self, address: int, nbytes: int, device: int | None) -> str | None:
        """Pin a range; returns None, or why it could not be pinned."""
        if device is not None:
            # The current device is each thread's own: without this, a background thread would
            # open a context (and take memory) on GPU 0.
            self._lib.cudaSetDevice(device)
        code = self._lib.cudaHostRegister(address, nbytes, _PORTABLE)
        if code == 0:
            return None
        self._lib.cudaGetLastError()  # or torch would report this error at its next call
        # CUDA may report another call's failure here and have pinned the range all the same.
        self.unregister(address)
        text = self._lib.cudaGetErrorString(code).decode()
        return f"cudaHostRegister of {nbytes} bytes: {text}"

    def copy_rows(
        self,
        target: tuple[int, int],
        source: tuple[int, int],
        nbytes: int,
        rows: int,
        stream: int,
    ) -> None:
        """Issue a copy of `rows` rows of `nbytes` on `stream`, between any memory that CUDA knows;
        target and source: address, and bytes from a row to the next one. Raises OSError.
        """
        code = self._lib.cudaMemcpy2DAsync(*target, *source, nbytes, rows, _DEFAULT_KIND, stream)
        if code:
            self._lib.cudaGetLastError()  # or torch would report this error at its next call
            text = self._lib.cudaGetErrorString(code).decode()
            raise OSError(f"cudaMemcpy2DAsync of {rows} rows of {nbytes} bytes: {text}")

    def unregister(self, address: int) -> bool:
        """Undo `register`; False where CUDA refuses (while a graph is captured) and the range is
        still pinned: its memory must not be given back then, or CUDA would take whatever comes to
        lie there for pinned.
        """
        code = self._lib.cudaHostUnregister(address)
        if code == 0:
            return True
        self._lib.cudaGetLastError()
        return code == _NOT_REGISTERED


def cuda_state() -> tuple[Cudart | None, int | None, str]:
    """(runtime, current device, reason): the runtime is None where nothing can be pinned."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None, None, "torch is not imported"
    if not torch.cuda.is_available():
        return None, None, "no CUDA device"
    runtime = _loaded_runtime()
    if runtime is None:
        return None, None, "libcudart is not among the loaded libraries"
    return runtime, torch.cuda.current_device(), runtime.path


@lru_cache(maxsize=1)
def _loaded_runtime() -> Cudart | None:
    # The very library that torch uses: a second copy would have its own idea of the context.
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if "/libcudart" in path:
                return Cudart(path)
    return None
