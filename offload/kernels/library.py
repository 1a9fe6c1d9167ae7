"""The compiled kernels library, loaded once by ctypes; without it every op runs its reference."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from offload.kernels import structs

FILE = Path(__file__).with_name("_kernels.so")

LAUNCHERS = {
    "offload_residual_norm": structs.ResidualNormStruct,
    "offload_rotary_append": structs.RotaryAppendStruct,
    "offload_activation": structs.ActivationStruct,
    "offload_decode_attention": structs.DecodeAttentionStruct,
    "offload_skinny_gemm": structs.SkinnyGemmStruct,
    "offload_dequantize": structs.DequantizeStruct,
    "offload_quant_gemm": structs.QuantGemmStruct,
    "offload_step_inputs": structs.StepInputsStruct,
    "offload_quantize_rows": structs.QuantizeRowsStruct,
    "offload_scale_sums": structs.ScaleSumsStruct,
    "offload_arrange": structs.ArrangeStruct,
}
# Questions about a call: its arguments -> a number, below zero where they are refused.
QUERIES = {
    "offload_decode_attention_workspace": (structs.DecodeAttentionStruct, c_int64),
    "offload_skinny_gemm_workspace": (structs.SkinnyGemmStruct, c_int64),
    "offload_skinny_gemm_counters": (structs.SkinnyGemmStruct, c_int64),
    "offload_skinny_gemm_variants": (structs.SkinnyGemmStruct, c_int32),
}


class KernelError(RuntimeError):
    """A kernel was refused or failed to launch; the message is the library's own."""


class Library:
    """The loaded library. Its launchers return 0, or a status that `check` turns into an error."""

    def __init__(self, file: Path = FILE) -> None:
        """Load `file`; raises OSError where it cannot be used, saying why."""
        self._c = ctypes.CDLL(str(file))
        for name, struct in LAUNCHERS.items():
            self._declare(name, c_int, POINTER(struct), c_void_p)
        for name, (struct, result) in QUERIES.items():
            self._declare(name, result, POINTER(struct))
        self._declare("offload_last_error", c_char_p)
        self._declare("offload_kernels_abi", c_int32)
        self._declare("offload_struct_size", c_int64, c_int32)
        self._declare("offload_device_supported", c_int, c_int32)
        abi = self._c.offload_kernels_abi()
        sizes = [self._c.offload_struct_size(i) for i in range(len(structs.ALL) + 1)]
        if abi != structs.ABI or sizes != [*map(ctypes.sizeof, structs.ALL), 0]:
            raise OSError(
                f"{file} was built from other sources than this package (interface {abi}, wanted "
                f"{structs.ABI}); install offload again"
            )

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        try:
            function = getattr(self._c, name)
        except AttributeError:
            raise OSError(f"{FILE} has no {name}; install offload again") from None
        function.restype = result
        function.argtypes = arguments

    def launcher(self, name: str) -> Any:
        """The C function `name(struct pointer, stream) -> status`."""
        return getattr(self._c, name)

    def ask(self, name: str, arguments: Structure) -> int:
        """The answer to one of QUERIES about `arguments`."""
        answer = getattr(self._c, name)(ctypes.byref(arguments))
        if answer < 0:
            raise KernelError(self.last_error())
        return answer

    def check(self, status: int) -> None:
        """Raise KernelError for a status other than 0."""
        if status:
            raise KernelError(self.last_error())

    def last_error(self) -> str:
        """The words for this thread's latest failure."""
        return self._c.offload_last_error().decode(errors="replace")

    def device_problem(self, index: int) -> str | None:
        """Why GPU `index` cannot run the library; None where it can."""
        return self.last_error() if self._c.offload_device_supported(index) else None


@functools.cache
def _loaded() -> tuple[Library | None, str]:
    if not FILE.exists():
        # Beside the package's sources Python takes those, `python -m offload` too, but the program
        # `offload` what is installed, where all may be well.
        why = "`python -m offload info` says why"
        return None, f"the kernels library was not built in {FILE.parent} ({why})"
    try:
        return Library(), ""
    except OSError as error:
        return None, str(error)


def library() -> Library:
    """The library; raises KernelError where there is none, saying why."""
    loaded, reason = _loaded()
    if loaded is None:
        raise KernelError(reason)
    return loaded


def why_not(index: int | None = None) -> str | None:
    """Why the kernels cannot run on GPU `index` (default: the current one); None where they can."""
    loaded, reason = _loaded()
    if loaded is None:
        return reason
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return loaded.device_problem(torch.cuda.current_device() if index is None else index)
