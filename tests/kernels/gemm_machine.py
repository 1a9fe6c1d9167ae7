"""Where the product's tests run: the reference, the kernels on the host, the kernels on a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from typing import Any

import host_build
import torch
from machines import guarded_workspace

from offload.kernels import structs
from offload.kernels.call import current_stream
from offload.kernels.gemm import SkinnyGemm
from offload.kernels.workspace import Workspace


def run(call_arguments: dict[str, Any], machine: str, turn: int = 0) -> SkinnyGemm:
    """Make the call, issue it on `machine`, and check what it must leave behind.

    Partial sums are NaN before, counters zero before and after. On the host an odd turn does in
    another order what the hardware may do in any.
    """
    if machine == "host":
        return _run_on_host(SkinnyGemm(**call_arguments), turn)
    workspace = Workspace(call_arguments["input"].device)
    call = SkinnyGemm(**call_arguments, workspace=workspace)
    workspace._partials.fill_(math.nan)
    call.launch(current_stream(workspace.device))
    if machine == "cuda":
        torch.cuda.synchronize()
    assert not workspace._counters.any(), "counters were left behind"
    return call


def host_variants(call: SkinnyGemm) -> int:
    """How many variants the library has for the call, on the host's pretended GPU."""
    return host_library().offload_skinny_gemm_variants(ctypes.byref(call.arguments))


def _run_on_host(call: SkinnyGemm, turn: int) -> SkinnyGemm:
    library, a = host_library(), call.arguments
    nbytes = library.offload_skinny_gemm_workspace(ctypes.byref(a))
    count = library.offload_skinny_gemm_counters(ctypes.byref(a))
    assert nbytes >= 0 and count >= 0, library.offload_last_error()
    os.environ["HOST_COPIES"] = "soon" if turn % 2 else "late"
    os.environ["HOST_BLOCKS"] = "backwards" if turn % 2 else "forwards"
    with guarded_workspace(a, nbytes, count):
        status = library.offload_skinny_gemm(ctypes.byref(a), None)
        assert status == 0, library.offload_last_error()
    return call


@functools.cache
def host_library() -> ctypes.CDLL:
    """skinny_gemm.cu compiled for this processor, with stand-ins for what only a GPU has."""
    instead = {
        "async_copy.cuh": '#include "host_async_copy.hpp"\n',
        "tensor_core.cuh": '#include "host_tensor_core.hpp"\n',
        # What it would declare is in host_gemm.hpp.
        "cluster.cuh": "#pragma once\n#define OFFLOAD_HAS_CLUSTERS 1\n",
    }
    sources = ["library.cu", "skinny_gemm.cu"]
    library = host_build.kernels("gemm", sources, "host_gemm.hpp", instead)
    pointer = ctypes.POINTER(structs.SkinnyGemmStruct)
    library.offload_skinny_gemm.argtypes = [pointer, ctypes.c_void_p]
    for name in ("workspace", "counters"):
        getattr(library, f"offload_skinny_gemm_{name}").restype = ctypes.c_int64
    library.offload_last_error.restype = ctypes.c_char_p
    return library
