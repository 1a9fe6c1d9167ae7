// Codes -> float32, by units of 8 neighbours along the depth.
//
// An integer becomes a float by its bits: 0x4b000000 | code is 2^23 + code, and a subtraction is
// exact. That takes some 5 instructions a weight; at 4.3 TB/s, int4 to 16 bits, an H200 has about
// 18.
#pragma once
#include "elementwise.cuh"

namespace offload {

constexpr int kThreads = 256;        // of a block
constexpr int kUnit = 8;             // weights
constexpr float kMagic = 8388608.f;  // 2^23

__device__ __forceinline__ float magic(uint32_t code) {
    return __uint_as_float(0x4b000000u | code);
}

__device__ __forceinline__ int bits_of(int code) {
    return code == OFFLOAD_UINT4 || code == OFFLOAD_E2M1 ? 4 : 8;
}

// The 8 codes of `raw` as numbers, above `zero`, an integer.
__device__ __forceinline__ void decode_unit(uint2 raw, int code, float zero, float (&x)[kUnit]) {
    switch (code) {
        case OFFLOAD_UINT4: {
            const float origin = kMagic + zero;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) x[i] = magic(raw.x >> 4 * i & 15u) - origin;
            break;
        }
        case OFFLOAD_E2M1:
            // Exponent and mantissa as a float32 that is too small by 2^126, subnormal or not.
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const uint32_t nibble = raw.x >> 4 * i;
                x[i] =
                    __uint_as_float((nibble & 7u) << 22 | (nibble & 8u) << 28) * 8.507059173e37f -
                    zero;
            }
            break;
        case OFFLOAD_E4M3:
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const uint32_t byte = (i < 4 ? raw.x : raw.y) >> 8 * (i % 4);
                const float small = __uint_as_float((byte & 127u) << 20 | (byte & 128u) << 24);
                x[i] = (byte & 127u) == 127u ? __uint_as_float(0x7fffffffu)
                                             : small * 1.329227996e36f - zero;  // 2^120
            }
            break;
        default: {
            const uint32_t flip = code == OFFLOAD_INT8 ? 128u : 0u;
            const float origin = kMagic + static_cast<float>(flip) + zero;
#pragma unroll
            for (int i = 0; i < kUnit; ++i) {
                const uint32_t byte = (i < 4 ? raw.x : raw.y) >> 8 * (i % 4) & 255u;
                x[i] = magic(byte ^ flip) - origin;
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_unit(T* to, const float (&x)[kUnit]) {
    constexpr int kWidth = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kUnit; i += kWidth)
        store_once<T, kWidth>(to + i, from_floats<T, kWidth>(x + i));
}

}  // namespace offload
