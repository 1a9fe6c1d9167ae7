"""Where decode attention's tests run: the reference, the kernels on the host, or on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import host_build
import torch
from machines import guarded_workspace
from scored import scored

from offload.kernels import structs
from offload.kernels.attention import COUNTERS, DecodeAttention
from offload.kernels.call import current_stream
from offload.kernels.workspace import Workspace

H200, ADA = 232448, 101376  # bytes of shared memory that a block may have
# Multiprocessors, shared memory, whether blocks run last to first, whether copies come late.
HOSTS = itertools.cycle([(4, H200, 0, 1), (1, ADA, 1, 0), (23, H200, 1, 1), (7, ADA, 0, 0)])


def run(
    arguments: dict[str, Any], machine: str, host: tuple[int, int, int, int] | None = None
) -> DecodeAttention:
    """Make the call, issue it on `machine`, and check what it must leave behind.

    Partial results are NaN before, counters zero before and after. `host`: as of HOSTS, instead
    of the next of these.
    """
    if machine == "host":
        return _run_on_host(DecodeAttention(**scored(arguments)), host or next(HOSTS))
    workspace = Workspace(arguments["query"].device)
    call = DecodeAttention(**scored(arguments), workspace=workspace)
    workspace._partials.fill_(math.nan)
    call.launch(current_stream(workspace.device))
    if machine == "cuda":
        torch.cuda.synchronize()
    assert not workspace._counters.any(), "counters were left behind"
    return call


@contextlib.contextmanager
def written_late(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What contiguous `tensors` hold comes from the kernel ahead, on the host; NaN before."""
    library = host_library()
    rows = [row for x in tensors for row in x.reshape(-1, x.shape[-1]).unbind()]
    assert all(x.is_contiguous() for x in tensors), "views that reshape would copy"
    copies = [row.clone() for row in rows]
    table = (_Late * len(rows))(
        *(
            _Late(row.data_ptr(), copy.data_ptr(), row.nbytes)
            for row, copy in zip(rows, copies, strict=True)
        )
    )
    library.host_late(table, len(rows))
    try:
        yield
    finally:
        library.host_late(table, 0)


class _Late(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_void_p),
        ("from_", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    )


def workspace_bytes(multiprocessors: int, **fields: int) -> int:
    """What a call of these fields asks for on such an H200: its plan's CTAs, and their kind."""
    library = host_library()
    library.host_settings(multiprocessors, H200, 0, 1)
    a = structs.DecodeAttentionStruct(scale=1.0, **fields)
    nbytes = library.offload_decode_attention_workspace(ctypes.byref(a))
    assert nbytes >= 0, library.offload_last_error()
    return nbytes


def _run_on_host(call: DecodeAttention, host: tuple[int, int, int, int]) -> DecodeAttention:
    library, a = host_library(), call.arguments
    library.host_settings(*host)
    nbytes = library.offload_decode_attention_workspace(ctypes.byref(a))
    assert nbytes >= 0, library.offload_last_error()
    with guarded_workspace(a, nbytes, COUNTERS):
        status = library.offload_decode_attention(ctypes.byref(a), None)
        assert status == 0, library.offload_last_error()
    return call


@functools.cache
def host_library() -> ctypes.CDLL:
    """decode_attention*.cu compiled for this processor, with stand-ins for what only a GPU has."""
    instead = {"decode_attention_ptx.cuh": '#include "host_attention.hpp"\n'}
    # One file of all, as the stand-ins have one state.
    sources = sorted(path.name for path in host_build.CSRC.glob("decode_attention*.cu"))
    instead["attention.cu"] = "".join(f'#include "{name}"\n' for name in sources)
    library = host_build.kernels("attention", ["attention.cu"], "host_attention.hpp", instead, [])
    pointer = ctypes.POINTER(structs.DecodeAttentionStruct)
    library.offload_decode_attention.argtypes = [pointer, ctypes.c_void_p]
    library.offload_decode_attention_workspace.argtypes = [pointer]
    library.offload_decode_attention_workspace.restype = ctypes.c_int64
    library.offload_last_error.restype = ctypes.c_char_p
    return library
