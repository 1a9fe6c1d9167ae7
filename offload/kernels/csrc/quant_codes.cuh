// Codes of 4 and 8 bits as operand A of the tensor cores, as they lie in panels
// (offload/kernels/panels.py).
//
// What is masked out of a word is an operand as it is: the lowest 8 bits of a bfloat16, its
// mantissa and the last bit of its exponent, count in steps of 2^-133 from 0 on, through the
// subnormal numbers and into the normal ones; those of a half in steps of 2^-24. So a code is the
// number code * 2^-133, or 16 times that where it lies 4 bits higher, as int4 codes of the second
// row do: 5 instructions for 8 codes, 6 for 8 codes of int8, and nothing is subtracted. bfloat16
// activations are multiplied by 2^64 before, an exact product but for magnitudes from 2^63 on
// (infinite then), so that sums stay in the middle of float32's range. All is undone where a sum is
// complete.
//
// (code - zero) * scale summed up is scale * (sum of products with codes - zero * sum of
// activations), both in float32.
#pragma once
#include <string.h>

#include <type_traits>

#include "tensor_core.cuh"

namespace offload {

// The scale in the low half of a word, or in its high half.
__device__ __forceinline__ float scale_in(uint32_t word, bool high, __nv_bfloat16) {
    return __uint_as_float(high ? word & 0xffff0000u : word << 16);
}

__device__ __forceinline__ float scale_in(uint32_t word, bool high, __half) {
    const uint16_t bits = static_cast<uint16_t>(high ? word >> 16 : word);
    __half x;
    memcpy(&x, &bits, sizeof x);
    return __half2float(x);
}

template <typename T, int kBits>
struct Codes {
    static constexpr bool kEnlarged = std::is_same_v<T, __nv_bfloat16>;
    static constexpr int kMiddle = 1 << (kBits - 1);  // the zero of symmetric codes
    // What sums are multiplied by in the end, of a lane's first row and of its second, 8 below.
    static constexpr float kFirst = kEnlarged ? 0x1p69f : 0x1p24f;
    static constexpr float kSecond = kBits == 4 ? kFirst / 16 : kFirst;

    // -kMiddle as a code in a lane's first row and in its second, twice.
    static constexpr uint32_t kMinusFirst = kBits == 4 ? 0x80088008u : 0x80808080u;
    static constexpr uint32_t kMinusSecond = 0x80808080u;

    // Operand j of a lane's 16 bytes.
    __device__ __forceinline__ static void operand(const uint4& words, int j, uint32_t (&w)[4]) {
        if constexpr (kBits == 4) {
            const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
            w[0] = word & 0x000f000fu;
            w[1] = word & 0x00f000f0u;
            w[2] = word >> 8 & 0x000f000fu;
            w[3] = word >> 8 & 0x00f000f0u;
        } else {
            const uint32_t first = j ? words.z : words.x, second = j ? words.w : words.y;
            w[0] = first & 0x00ff00ffu;
            w[1] = second & 0x00ff00ffu;
            w[2] = first >> 8 & 0x00ff00ffu;
            w[3] = second >> 8 & 0x00ff00ffu;
        }
    }

    __device__ __forceinline__ static uint4 enlarge(const uint4& x) {
        if (!kEnlarged) return x;
        constexpr uint32_t kTimes = 0x5f805f80u, kMinusZero = 0x80008000u;  // 2^64
        return make_uint4(multiply_add_pair(x.x, kTimes, kMinusZero, T()),
                          multiply_add_pair(x.y, kTimes, kMinusZero, T()),
                          multiply_add_pair(x.z, kTimes, kMinusZero, T()),
                          multiply_add_pair(x.w, kTimes, kMinusZero, T()));
    }
};

}  // namespace offload
