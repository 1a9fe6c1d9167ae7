"""Where the product's tests run: the reference, the kernels on the host, the kernels on a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import CSRC, HERE, ON_HOST, SHARED, cuda_headers, guarded_workspace

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


def run_keeping_statistics(
    call_arguments: dict[str, Any], machine: str, turn: int = 0
) -> torch.Tensor | None:
    """The same, and what the call leaves of its output's rows; None where it leaves nothing."""
    if machine == "cuda":
        return run({**call_arguments, "keep_statistics": True}, machine).statistics
    call = SkinnyGemm(**call_arguments)
    parts = host_library().offload_skinny_gemm_statistics(ctypes.byref(call.arguments))
    assert parts >= 0, host_library().offload_last_error()
    left = torch.full((call.arguments.rows, parts, 2), math.nan)
    call.arguments.output_statistics = left.data_ptr() if parts else None
    _run_on_host(call, turn)
    return left if parts else None


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
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers: runs the kernels on the host")
    folder = Path(tempfile.mkdtemp(prefix="offload-host-gemm-"))
    try:
        for name in ("skinny_gemm_math.cuh", "skinny_gemm_norm.cuh", "library.cu", "common.cuh"):
            shutil.copy(CSRC / name, folder)
        shutil.copy(CSRC / "offload_kernels.h", folder)
        shutil.copy(HERE / "host_async_copy.hpp", folder / "async_copy.cuh")
        # What it would declare is in host_gemm.hpp.
        (folder / "cluster.cuh").write_text("#pragma once\n#define OFFLOAD_HAS_CLUSTERS 1\n")
        shutil.copy(HERE / "host_tensor_core.hpp", folder / "tensor_core.cuh")
        for name in ("skinny_gemm.cu", "skinny_gemm_staged.cuh"):
            source = (CSRC / name).read_text()
            assert source.count(SHARED) == 1
            (folder / name).write_text(source.replace(SHARED, ON_HOST))
        flags = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-w"]
        flags += ["-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
        flags += ["-fno-sanitize-recover=all", "-static-libubsan"]
        flags += ["-isystem", str(headers), "-I", str(folder), "-I", str(HERE)]
        flags += ["-include", str(HERE / "host_gemm.hpp")]
        processes = [
            subprocess.Popen(
                [compiler, "-x", "c++", *flags, "-c", f"{name}.cu", "-o", f"{name}.o"],
                cwd=folder,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in ("library", "skinny_gemm")
        ]
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        link = [compiler, "-shared", "-static-libubsan", "-fsanitize=undefined"]
        link += ["library.o", "skinny_gemm.o", "-o", "libgemm.so"]
        subprocess.run(link, check=True, cwd=folder)
        library = ctypes.CDLL(str(folder / "libgemm.so"))
    finally:
        shutil.rmtree(folder)
    pointer = ctypes.POINTER(structs.SkinnyGemmStruct)
    library.offload_skinny_gemm_statistics.argtypes = [pointer]
    library.offload_skinny_gemm.argtypes = [pointer, ctypes.c_void_p]
    for name in ("workspace", "counters"):
        getattr(library, f"offload_skinny_gemm_{name}").restype = ctypes.c_int64
    library.offload_last_error.restype = ctypes.c_char_p
    return library
