"""The ops as `torch.ops.offload.*`: functions of tensors that torch.compile and CUDA graphs take.

They return new tensors (`rotary_append` also writes into the caches it is given); on a CPU they run
the reference, on a GPU the kernels library, on torch's current stream. The functions here have the
same names and take a `Norm` where an op takes its fields. A loop that runs one call many times is
better off with the ops' classes, which check and fill in their arguments once. No op has a
gradient.
"""

from offload.kernels.ops.activations import activation
from offload.kernels.ops.attention import decode_attention
from offload.kernels.ops.int8 import int8_linear
from offload.kernels.ops.products import linear, skinny_gemm
from offload.kernels.ops.residual_norms import residual_norm
from offload.kernels.ops.rotary import rotary_append
from offload.kernels.ops.stored import dequantize, quant_linear

__all__ = [
    "activation",
    "decode_attention",
    "dequantize",
    "int8_linear",
    "linear",
    "quant_linear",
    "residual_norm",
    "rotary_append",
    "skinny_gemm",
]
