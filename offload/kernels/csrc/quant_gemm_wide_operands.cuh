// Codes of a panel as operand A of a product by warpgroups, scaled and rounded.
#pragma once
#include "tensor_core.cuh"
#include "warpgroup.cuh"

namespace offload {

// A lane's scales and zero points of the two rows that it has of a tile, as operands.
template <typename T, int kBits, bool kZeros>
struct Rescale;

// Codes are operands as they are: numbers in steps of 2^-133, see quant_codes.cuh, those of int4's
// second row 16 times as large. The scale brings them to 2^-33 of what they stand for, which sums
// make good in the end: room for scales up to 2^27.
template <int kBits, bool kZeros>
struct Rescale<__nv_bfloat16, kBits, kZeros> {
    static constexpr float kUndo = 0x1p33f;
    uint32_t scale, offset;  // of the first row, and above it of the second
    Rescale() = default;

    __device__ __forceinline__ Rescale(uint32_t scales, uint32_t zeros) {
        constexpr uint32_t kTimes = kBits == 4 ? 0x6f807180u : 0x71807180u;   // 2^100; 2^96
        constexpr uint32_t kMiddle = kBits == 4 ? 0xb080b080u : 0xb280b280u;  // -8, -128 * 2^-33
        scale = multiply_add_pair(scales, kTimes, 0x80008000u, __nv_bfloat16());
        if (kZeros) {
            const uint32_t first = zeros & ((1u << kBits) - 1);
            const uint32_t second = kBits == 4 ? zeros & 0xf0u : zeros >> 8;
            offset = first | second << 16 | 0x80008000u;
        } else {
            offset = multiply_add_pair(scales, kMiddle, 0x80008000u, __nv_bfloat16());
        }
    }

    __device__ __forceinline__ uint32_t apply(uint32_t codes, bool second) const {
        const uint32_t s = second ? high_twice(scale) : low_twice(scale);
        const uint32_t o = second ? high_twice(offset) : low_twice(offset);
        if (!kZeros) return multiply_add_pair(codes, s, o, __nv_bfloat16());
        const uint32_t x = multiply_add_pair(codes, 0x3f803f80u, o, __nv_bfloat16());
        return multiply_add_pair(x, s, 0x80008000u, __nv_bfloat16());
    }

    __device__ __forceinline__ static uint32_t number(uint32_t codes) { return codes; }
};

// Codes are made the last bits of 1024 and more.
template <int kBits, bool kZeros>
struct Rescale<__half, kBits, kZeros> {
    static constexpr float kUndo = 1.f;
    uint32_t scale, offset;
    Rescale() = default;

    __device__ __forceinline__ Rescale(uint32_t scales, uint32_t zeros) : scale(scales) {
        constexpr uint32_t kMiddle = 1u << (kBits - 1);
        const uint32_t first = kZeros ? zeros & ((1u << kBits) - 1) : kMiddle;
        const uint32_t second = kZeros ? zeros >> kBits & ((1u << kBits) - 1) : kMiddle;
        // -(1024 + first); -(64 + second) or -(1024 + second)
        offset = (first | 0xe400u) | (kBits == 4 ? second << 4 | 0xd400u : second | 0xe400u) << 16;
    }

    __device__ __forceinline__ uint32_t apply(uint32_t codes, bool second) const {
        constexpr uint32_t kOne = 0x3c003c00u, kSixteenth = 0x2c002c00u;
        const uint32_t s = second ? high_twice(scale) : low_twice(scale);
        const uint32_t o = second ? high_twice(offset) : low_twice(offset);
        const uint32_t x =
            multiply_add_pair(codes, kBits == 4 && second ? kSixteenth : kOne, o, __half());
        return multiply_add_pair(x, s, 0x80008000u, __half());
    }

    __device__ __forceinline__ static uint32_t number(uint32_t codes) {
        return codes | 0x64006400u;
    }
};

// Operand A of step j of a lane's 16 bytes.
template <int kBits, typename Rescaled>
__device__ __forceinline__ void make_operand(const uint4& words, int j, const Rescaled& rescale,
                                             uint32_t (&w)[4]) {
    if constexpr (kBits == 4) {
        const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
        const uint32_t later = word >> 8;
        w[0] = rescale.apply(Rescaled::number(word & 0x000f000fu), 0);
        w[1] = rescale.apply(Rescaled::number(word & 0x00f000f0u), 1);
        w[2] = rescale.apply(Rescaled::number(later & 0x000f000fu), 0);
        w[3] = rescale.apply(Rescaled::number(later & 0x00f000f0u), 1);
    } else {
        const uint32_t first = j ? words.z : words.x, second = j ? words.w : words.y;
        w[0] = rescale.apply(Rescaled::number(first & 0x00ff00ffu), 0);
        w[1] = rescale.apply(Rescaled::number(second & 0x00ff00ffu), 1);
        w[2] = rescale.apply(Rescaled::number(first >> 8 & 0x00ff00ffu), 0);
        w[3] = rescale.apply(Rescaled::number(second >> 8 & 0x00ff00ffu), 1);
    }
}

}  // namespace offload
