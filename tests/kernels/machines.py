"""Where the ops' tests run: the reference, the kernels on the host, the kernels on a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from offload.kernels import structs
from offload.kernels.call import Call, current_stream
from offload.kernels.library import LAUNCHERS

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "offload" / "kernels" / "csrc"
# The kernels that need nothing but plain loads, barriers and shuffles.
HOSTED = ("activation", "residual_norm", "rotary_append")

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
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = _cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers: runs the kernels on the host")
    folder = Path(tempfile.mkdtemp(prefix="offload-host-kernels-"))
    try:
        processes = []
        for name in ("library", *HOSTED):
            command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing"]
            command += ["-fsanitize=alignment,bounds,shift,signed-integer-overflow"]
            command += ["-fno-sanitize-recover=all", "-static-libubsan", "-w"]
            command += ["-isystem", str(headers), "-I", str(CSRC)]
            command += ["-include", str(HERE / "host_cuda.hpp")]
            command += ["-c", str(CSRC / f"{name}.cu"), "-o", str(folder / f"{name}.o")]
            processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        objects = [str(path) for path in sorted(folder.glob("*.o"))]
        file = folder / "libhost.so"
        link = [compiler, "-shared", "-static-libubsan", "-fsanitize=undefined", "-o", str(file)]
        subprocess.run([*link, *objects], check=True)
        library = ctypes.CDLL(str(file))
    finally:
        shutil.rmtree(folder)
    for name in HOSTED:
        function = getattr(library, f"offload_{name}")
        function.argtypes = [ctypes.POINTER(LAUNCHERS[function.__name__]), ctypes.c_void_p]
    library.offload_last_error.restype = ctypes.c_char_p
    library.offload_struct_size.restype = ctypes.c_int64
    for i, struct in enumerate(structs.ALL):
        assert library.offload_struct_size(i) == ctypes.sizeof(struct)
    return library


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).parents[1])]
    folders = [Path(root) / "include" for root in roots if root]
    return next((folder for folder in folders if (folder / "cuda_fp16.h").exists()), None)
