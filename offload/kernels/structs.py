"""The argument structs of the kernels library, field by field as in csrc/offload_kernels.h."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

ABI = 1

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NORMS = {None: 0, "layer": 1, "rms": 2}
SCALES = {**DTYPES, torch.uint8: 3, torch.float8_e8m0fnu: 3}
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


class Code(IntEnum):
    """How a code becomes a number: OffloadCode."""

    UINT4 = 0
    UINT8 = 1
    INT8 = 2
    E4M3 = 3
    E2M1 = 4


class CodeOrder(IntEnum):
    """How codes lie: OffloadCodeOrder."""

    ALONG_DEPTH = 0
    DEPTH_WORDS = 1
    ROW_WORDS = 2
    PANELS = 3


class ZeroKind(IntEnum):
    """How zero points lie: OffloadZeroKind."""

    ZERO_VALUE = 0
    ZERO_WORDS = 1
    ZERO_ROW_WORDS = 2
    ZERO_BYTES = 3
    ZERO_PANELS = 4


# By a weight's layout.
CODE_ORDERS = {
    "plain": CodeOrder.ALONG_DEPTH,
    "packed": CodeOrder.ALONG_DEPTH,
    "fp8_block": CodeOrder.ALONG_DEPTH,
    "mxfp4": CodeOrder.ALONG_DEPTH,
    "gpt_oss": CodeOrder.ALONG_DEPTH,
    "gptq": CodeOrder.DEPTH_WORDS,
    "gptq_v2": CodeOrder.DEPTH_WORDS,
    "awq": CodeOrder.ROW_WORDS,
    "panels": CodeOrder.PANELS,
}


class NormStruct(Structure):
    """How a row is normalised."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("weight_offset", c_float),
        ("kind", c_int32),
        ("reserved", c_int32),
    )


class ResidualNormStruct(Structure):
    """Arguments of offload_residual_norm."""

    _fields_ = (
        ("residual", c_void_p),
        ("branch", c_void_p * 2),
        ("bias", c_void_p * 2),
        ("sum", c_void_p),
        ("output", c_void_p),
        ("output2", c_void_p),
        ("branch_norm", NormStruct),
        ("norm", NormStruct),
        ("norm2", NormStruct),
        ("rows", c_int64),
        ("width", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("packs_per_thread", c_int32),
    )


class RotaryAppendStruct(Structure):
    """Arguments of offload_rotary_append."""

    _fields_ = (
        ("qkv", c_void_p),
        ("bias", c_void_p),
        ("query", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("column", c_void_p),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("row_stride", c_int64),
        ("q_offset", c_int64),
        ("k_offset", c_int64),
        ("v_offset", c_int64),
        ("q_group_stride", c_int64),
        ("kv_group_stride", c_int64),
        ("query_batch_stride", c_int64),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("cache_batch_stride", c_int64),
        ("cache_head_stride", c_int64),
        ("rotary_batch_stride", c_int64),
        ("column_stride", c_int32),
        ("cache_capacity", c_int32),
        ("batch", c_int32),
        ("tokens", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("interleaved", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("variant", c_int32),
    )


class ActivationStruct(Structure):
    """Arguments of offload_activation."""

    _fields_ = (
        ("input", c_void_p),
        ("bias", c_void_p),
        ("output", c_void_p),
        ("rows", c_int64),
        ("input_stride", c_int64),
        ("width", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("reserved", c_int32),
    )


class DecodeAttentionStruct(Structure):
    """Arguments of offload_decode_attention."""

    _fields_ = (
        ("query", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("output", c_void_p),
        ("start", c_void_p),
        ("length", c_void_p),
        ("slopes", c_void_p),
        ("sinks", c_void_p),
        ("workspace", c_void_p),
        ("counters", c_void_p),
        ("workspace_bytes", c_int64),
        ("query_batch_stride", c_int64),
        ("query_head_stride", c_int64),
        ("cache_batch_stride", c_int64),
        ("cache_head_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("batch", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("max_length", c_int32),
        ("window", c_int32),
        ("splits", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("variant", c_int32),
        ("even", c_int32),
        ("reserved", c_int32),
    )


class SkinnyGemmStruct(Structure):
    """Arguments of offload_skinny_gemm."""

    _fields_ = (
        ("input", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("output", c_void_p),
        ("workspace", c_void_p),
        ("counters", c_void_p),
        ("workspace_bytes", c_int64),
        ("input_stride", c_int64),
        ("weight_stride", c_int64),
        ("residual_stride", c_int64),
        ("output_stride", c_int64),
        ("norm", NormStruct),
        ("rows", c_int32),
        ("outputs", c_int32),
        ("depth", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("variant", c_int32),
        ("splits", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("reserved", c_int32),
    )


class DequantizeStruct(Structure):
    """Arguments of offload_dequantize."""

    _fields_ = (
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("group_index", c_void_p),
        ("output", c_void_p),
        ("code_stride", c_int64),
        ("scale_row_stride", c_int64),
        ("scale_group_stride", c_int64),
        ("zero_row_stride", c_int64),
        ("zero_group_stride", c_int64),
        ("output_stride", c_int64),
        ("rows", c_int32),
        ("depth", c_int32),
        ("scale_rows", c_int32),
        ("group", c_int32),
        ("code", c_int32),
        ("order", c_int32),
        ("zero_kind", c_int32),
        ("zero_value", c_int32),
        ("scale_dtype", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("variant", c_int32),
    )


class QuantGemmStruct(Structure):
    """Arguments of offload_quant_gemm."""

    _fields_ = (
        ("input", c_void_p),
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("output", c_void_p),
        ("input_stride", c_int64),
        ("residual_stride", c_int64),
        ("output_stride", c_int64),
        ("rows", c_int32),
        ("outputs", c_int32),
        ("depth", c_int32),
        ("group", c_int32),
        ("bits", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("reserved", c_int32),
    )


class StepInputsStruct(Structure):
    """Arguments of offload_step_inputs."""

    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("mask", c_void_p),
        ("start", c_void_p),
        ("ids_out", c_void_p),
        ("positions_out", c_void_p),
        ("as_expected", c_void_p),
        ("past", c_int64),
        ("ids_stride", c_int64),
        ("positions_stride", c_int64),
        ("mask_row_stride", c_int64),
        ("mask_column_stride", c_int64),
        ("batch", c_int32),
        ("columns", c_int32),
        ("mask_bytes", c_int32),
        ("mask_floating", c_int32),
    )


class QuantizeRowsStruct(Structure):
    """Arguments of offload_quantize_rows."""

    _fields_ = (
        ("residual", c_void_p),
        ("branch", c_void_p),
        ("bias", c_void_p),
        ("sum", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("branch_norm", NormStruct),
        ("norm", NormStruct),
        ("rows", c_int64),
        ("width", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("reserved", c_int32),
    )


class ScaleSumsStruct(Structure):
    """Arguments of offload_scale_sums."""

    _fields_ = (
        ("sums", c_void_p),
        ("row_scales", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("output", c_void_p),
        ("rows", c_int64),
        ("width", c_int32),
        ("one_scale", c_int32),
        ("scale_dtype", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("dtype", c_int32),
        ("launch_early", c_int32),
        ("reserved", c_int32),
    )


class ArrangeStruct(Structure):
    """Arguments of offload_arrange."""

    _fields_ = (
        ("codes", c_void_p),
        ("panels", c_void_p),
        ("rows", c_int32),
        ("depth", c_int32),
        ("bits", c_int32),
        ("order", c_int32),
    )


# In the order of offload_struct_size().
ALL = (
    NormStruct,
    ResidualNormStruct,
    RotaryAppendStruct,
    ActivationStruct,
    DecodeAttentionStruct,
    SkinnyGemmStruct,
    DequantizeStruct,
    QuantGemmStruct,
    StepInputsStruct,
    QuantizeRowsStruct,
    ScaleSumsStruct,
    ArrangeStruct,
)
