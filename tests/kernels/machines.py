"""Where the ops' tests run: the reference, the kernels on the host, the kernels on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from offload.kernels import structs
from offload.kernels.call import Call, current_stream
from offload.kernels.library import LAUNCHERS

# What tests of other kernels replace in their source.
SHARED = "extern __shared__ __align__(128) unsigned char shared[];"
ON_HOST = "unsigned char* const shared = host_cuda::dynamic_shared();"
HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "offload" / "kernels" / "csrc"
# The kernels that need nothing but loads, barriers and shuffles.
HOSTED = ("activation", "dequantize", "residual_norm", "rotary_append", "step_inputs")

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


def host_library() -> ctypes.CDLL:
    """The kernels compiled for this processor; skips the test where that is not possible."""
    library, errors = _compiled()
    if library is None:
        pytest.skip("needs g++ and CUDA's headers: runs the kernels on the host")
    assert isinstance(library, ctypes.CDLL), errors
    return library


@functools.cache
def _compiled() -> tuple[ctypes.CDLL | Literal["failed"] | None, str]:
    """The library; what the compiler said where it failed; None where there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = cuda_headers()
    if compiler is None or headers is None:
        return None, ""
    with tempfile.TemporaryDirectory(prefix="offload-host-kernels-") as name:
        folder = Path(name)
        processes = []
        for part in ("library", *HOSTED):
            command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing"]
            command += ["-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
            command += ["-fno-sanitize-recover=all", "-static-libubsan", "-w"]
            command += ["-isystem", str(headers), "-I", str(HERE)]
            command += ["-include", str(HERE / "host_rows.hpp")]
            command += ["-c", str(CSRC / f"{part}.cu"), "-o", str(folder / f"{part}.o")]
            processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate()[1] for process in processes]
        if any(process.returncode for process in processes):
            return "failed", "\n".join(errors)
        objects = [str(path) for path in sorted(folder.glob("*.o"))]
        file = folder / "libhost.so"
        link = [compiler, "-shared", "-static-libubsan", "-fsanitize=undefined", "-o", str(file)]
        done = subprocess.run([*link, *objects], capture_output=True, text=True)
        if done.returncode:
            return "failed", done.stderr
        library = ctypes.CDLL(str(file))
    for hosted in HOSTED:
        function = getattr(library, f"offload_{hosted}")
        function.argtypes = [ctypes.POINTER(LAUNCHERS[function.__name__]), ctypes.c_void_p]
    library.offload_last_error.restype = ctypes.c_char_p
    library.offload_struct_size.restype = ctypes.c_int64
    for i, struct in enumerate(structs.ALL):
        assert library.offload_struct_size(i) == ctypes.sizeof(struct)
    return library, ""


def cuda_headers() -> Path | None:
    """Where CUDA's headers are, if anywhere."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).parents[1])]
    folders = [Path(root) / "include" for root in roots if root]
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)


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
