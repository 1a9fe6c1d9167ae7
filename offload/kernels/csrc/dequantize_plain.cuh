// Any order, depth, stride and address: one weight after another.
#pragma once
#include "dequantize_panels.cuh"

namespace offload {

// The code of one weight in panels.
__device__ __forceinline__ uint32_t panel_code(const OffloadDequantize& a, int row, int k) {
    const int g = row % 8, p = row / 8 % 2;
    const bool narrow = a.code == OFFLOAD_UINT4;
    const int columns = narrow ? 64 : 32, c = k % columns;
    const int64_t panel =
        static_cast<int64_t>(row / kPanelRows) * (a.depth / columns) + k / columns;
    const int word = narrow ? c / 32 * 2 + c % 8 / 4 : c % 8 / 4 * 2 + p;
    const uint8_t code = static_cast<const uint8_t*>(
        a.codes)[panel * kPanelBytes + (g * 4 + c % 32 / 8) * 16 + word * 4 + panel_byte(c % 4)];
    return narrow ? code >> 4 * p & 15u : code;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_plain_kernel(const OffloadDequantize a, const Divisors d) {
    let_next_kernel_begin();
    wait_for_previous_kernel();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int row = static_cast<int>(at / a.depth), k = static_cast<int>(at % a.depth);
    if (row >= a.rows) return;
    const int bits = bits_of(a.code), per_word = 32 / bits;
    const unsigned char* codes = static_cast<const unsigned char*>(a.codes);
    float x[kUnit];
    T* output = static_cast<T*>(a.output);
    if (a.order == OFFLOAD_PANELS) {
        const int64_t pair = pair_at(a, d, row / kPanelRows, row % 8, k);
        const int p = row / 8 % 2;
        const uint32_t zeros = pair_zeros(a, pair);
        const Affine affine{scale_at(a, pair * 2 + p),
                            bits == 4 ? zero_of<4>(zeros, p) : zero_of<8>(zeros, p)};
        decode_unit(make_uint2(panel_code(a, row, k), 0u), a.code, affine, x);
        output[row * a.output_stride + k] = from_float<T>(x[0]);
        return;
    }
    uint32_t code;
    if (a.order == OFFLOAD_ALONG_DEPTH) {
        code = codes[row * a.code_stride + (bits == 4 ? k / 2 : k)];
        if (bits == 4) code >>= k % 2 * 4;
    } else if (a.order == OFFLOAD_DEPTH_WORDS) {
        code = *reinterpret_cast<const uint32_t*>(codes + k / per_word * a.code_stride + row * 4ll);
        code >>= k % per_word * bits;
    } else {
        code = *reinterpret_cast<const uint32_t*>(codes + k * a.code_stride + row / 8 * 4ll);
        code >>= row_word_shift(row);
    }
    const Affine affine = affine_at(a, d, row, k);
    decode_unit(make_uint2(bits == 4 ? code & 15u : code & 255u, 0u), a.code, affine, x);
    output[row * a.output_stride + k] = from_float<T>(x[0]);
}

}  // namespace offload
