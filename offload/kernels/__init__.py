"""Fused transformer kernels: math on tensors, which knows nothing of files or tiers.

Every op is a class whose object is one call, checked and filled in once and launched many times; on
a CPU it runs its reference. `offload.kernels.ops` has the same ops as `torch.ops.offload`.
"""

from offload.kernels.activation import Activation
from offload.kernels.attention import DecodeAttention
from offload.kernels.host_attention import HostAttention
from offload.kernels.host_library import why_not_host
from offload.kernels.host_pool import HostPool
from offload.kernels.library import KernelError, why_not
from offload.kernels.norm import Norm
from offload.kernels.residual_norm import ResidualNorm
from offload.kernels.rotary import QkvLayout, RotaryAppend
from offload.kernels.rotation import Rotation
from offload.kernels.scores import Scores

__all__ = [
    "Activation",
    "DecodeAttention",
    "HostAttention",
    "HostPool",
    "KernelError",
    "Norm",
    "QkvLayout",
    "ResidualNorm",
    "RotaryAppend",
    "Rotation",
    "Scores",
    "why_not",
    "why_not_host",
]
