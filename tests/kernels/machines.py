"""Where the ops' tests run: the reference, the kernels on the host, the kernels on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator
from typing import Any

import host_build
import pytest
import torch

from offload.kernels import structs
from offload.kernels.call import Call, current_stream
from offload.kernels.library import LAUNCHERS

# The kernels that need nothing but loads, barriers and shuffles.
HOSTED = ("activation", "arrange", "dequantize", "residual_norm", "rotary_append", "step_inputs")
HOSTED += ("int8_rows",)

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MACHINES = [
    pytest.param("reference"),
    pytest.param("host"),
    pytest.param("cuda", marks=needs_gpu),
]


def device_of(machine: str) -> str:
    return "cuda" if machine == "cuda" else "cpu"


def launch(call: Call, machine: str) -> None:
    """Issue the call on `machine` and wait for it."""
    if machine == "reference":
        call.launch()
    elif machine == "host":
        library = host_library()
        assert getattr(library, call.function)(ctypes.byref(call.arguments), None) == 0, (
            library.offload_last_error()
        )
    else:
        call.launch(current_stream(torch.device("cuda")))
        torch.cuda.synchronize()


@functools.cache
def host_library() -> ctypes.CDLL:
    """The kernels compiled for this processor; skips the test where that is not possible."""
    sources = [f"{part}.cu" for part in ("library", *HOSTED)]
    library = host_build.kernels("rows", sources, "host_rows.hpp")
    for name, struct in LAUNCHERS.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [ctypes.POINTER(struct), ctypes.c_void_p]
    library.offload_last_error.restype = ctypes.c_char_p
    library.offload_struct_size.restype = ctypes.c_int64
    for i, struct in enumerate(structs.ALL):
        assert library.offload_struct_size(i) == ctypes.sizeof(struct)
    return library


@contextlib.contextmanager
def guarded_workspace(arguments: Any, nbytes: int, counters: int) -> Iterator[None]:
    """Gives a call on the host a workspace, and looks what the call left in it and behind it."""
    # torch's memory begins at a multiple of 64.
    partials = torch.full((nbytes // 4 + 64,), math.nan)
    count = torch.zeros(counters + 16, dtype=torch.int32)
    arguments.workspace, arguments.workspace_bytes = partials.data_ptr(), nbytes
    arguments.counters = count.data_ptr()
    yield
    assert not count.any(), "counters were left behind"
    assert torch.isnan(partials[nbytes // 4 :]).all(), "written behind the workspace"
