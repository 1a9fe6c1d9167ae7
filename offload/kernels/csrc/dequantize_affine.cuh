// The scale and the zero of a weight, in every layout but panels: it is (code - zero) * scale.
#pragma once
#include "dequantize_codes.cuh"
#include "panels.cuh"

namespace offload {

struct Divisors {
    Divisor units;       // in a row
    Divisor scale_rows;  // that share a scale
    Divisor group;
    int whole_groups;  // a unit has one scale
};

__device__ __forceinline__ float scale_at(const OffloadDequantize& a, int64_t at) {
    switch (a.scale_dtype) {
        case OFFLOAD_F16:
            return to_float(static_cast<const __half*>(a.scale)[at]);
        case OFFLOAD_BF16:
            return to_float(static_cast<const __nv_bfloat16*>(a.scale)[at]);
        case OFFLOAD_E8M0: {
            const uint32_t e = static_cast<const uint8_t*>(a.scale)[at];
            if (e == 255u) return __uint_as_float(0x7fffffffu);
            return __uint_as_float(e ? e << 23 : 0x00400000u);
        }
        default:
            return static_cast<const float*>(a.scale)[at];
    }
}

__device__ __forceinline__ float word_zero_at(const OffloadDequantize& a, int row, int64_t g) {
    const int bits = bits_of(a.code), log2 = bits == 4 ? 3 : 2;
    const uint32_t word = static_cast<const uint32_t*>(
        a.zero)[(row >> log2) * a.zero_row_stride + g * a.zero_group_stride];
    const int shift = a.zero_kind == OFFLOAD_ZERO_ROW_WORDS ? row_word_shift(row)
                                                            : (row & ((1 << log2) - 1)) * bits;
    const uint32_t zero = (word >> shift) + static_cast<uint32_t>(a.zero_value);
    return static_cast<float>(static_cast<int>(zero & ((1u << bits) - 1)));
}

__device__ __forceinline__ float zero_at(const OffloadDequantize& a, int row, int scale_row,
                                         int64_t g) {
    if (a.zero_kind == OFFLOAD_ZERO_VALUE) return static_cast<float>(a.zero_value);
    if (a.zero_kind == OFFLOAD_ZERO_BYTES)
        return static_cast<float>(static_cast<const int8_t*>(
            a.zero)[scale_row * a.zero_row_stride + g * a.zero_group_stride]);
    return word_zero_at(a, row, g);
}

__device__ __forceinline__ int group_of(const OffloadDequantize& a, const Divisors& d, int k) {
    return a.group_index ? a.group_index[k] : d.group(k);
}

struct Affine {
    float scale, zero;
};

__device__ __forceinline__ Affine affine_at(const OffloadDequantize& a, const Divisors& d, int row,
                                            int k) {
    const int64_t g = group_of(a, d, k);
    const int scale_row = d.scale_rows(row);
    return {scale_at(a, scale_row * a.scale_row_stride + g * a.scale_group_stride),
            zero_at(a, row, scale_row, g)};
}

__device__ __forceinline__ void decode_unit(uint2 raw, int code, Affine affine, float (&x)[kUnit]) {
    decode_unit(raw, code, affine.zero, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] *= affine.scale;
}

}  // namespace offload
