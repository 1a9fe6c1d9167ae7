// Codes of 4 and 8 bits as operand A of the tensor cores.
//
// A lane's codes are neighbours of one row; which columns of the weight they are does not matter to
// a product, as long as the activations beside them are the same: `arrange` puts these in order. A
// code becomes an exact number, code + kOffset, in pairs: `0x4300 | code` is the bfloat16 128 +
// code, `0x5400 | code << 4` the half 64 + code: 7 instructions for 8 codes. A bfloat16 has no room
// for 8 bits beside their offset, so the lower 7 and the highest are put together: 7 instructions
// for 4 codes; halves take 4.
//
// Either sums of such products are scaled, in float32: (code - zero) * scale summed up is scale *
// (sum of products - (kOffset + zero) * sum of activations). Or, where a scale has too few columns
// for that, the weight is scaled before and rounded once to T.
#pragma once
#include <string.h>

#include <type_traits>

#include "tensor_core.cuh"

namespace offload {

// (word & mask) | bits, in one instruction: the compiler makes two of it, since it keeps both
// constants out of registers.
template <uint32_t kMask, uint32_t kBitsSet>
__device__ __forceinline__ uint32_t mask_and_set(uint32_t word) {
#ifdef __CUDA_ARCH__
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(word), "n"(kMask), "n"(kBitsSet));
    return y;
#else
    return (word & kMask) | kBitsSet;
#endif
}

// (~word & mask) | bits
template <uint32_t kMask, uint32_t kBitsSet>
__device__ __forceinline__ uint32_t mask_inverse_and_set(uint32_t word) {
#ifdef __CUDA_ARCH__
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(y) : "r"(word), "n"(kMask), "n"(kBitsSet));
    return y;
#else
    return (~word & kMask) | kBitsSet;
#endif
}

// The low or the high halves of two words.
__device__ __forceinline__ uint32_t low_halves(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, 0x5410u);
#else
    return (x & 0xffffu) | y << 16;
#endif
}

__device__ __forceinline__ uint32_t high_halves(uint32_t x, uint32_t y) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, 0x7632u);
#else
    return x >> 16 | (y & 0xffff0000u);
#endif
}

// The bytes i and i + 2 of `word` as the halves 1024 + byte.
__device__ __forceinline__ uint32_t magic_bytes(uint32_t word, int i) {
#ifdef __CUDA_ARCH__
    return __byte_perm(word, 0x64646464u, i ? 0x4341u : 0x4240u);
#else
    return (word >> 8 * i & 0x00ff00ffu) | 0x64006400u;
#endif
}

__device__ __forceinline__ float bits_to_float(uint32_t bits, __nv_bfloat16) {
    return __uint_as_float(bits << 16);
}

__device__ __forceinline__ float bits_to_float(uint32_t bits, __half) {
    const uint16_t half_bits = static_cast<uint16_t>(bits);
    __half x;
    memcpy(&x, &half_bits, sizeof x);
    return __half2float(x);
}

template <typename T>
__device__ __forceinline__ uint32_t float_to_bits(float x) {
    const T y = from_float<T>(x);
    uint16_t bits;
    memcpy(&bits, &y, sizeof bits);
    return bits;
}

// Two of the same number, exact in T.
template <typename T>
__device__ __forceinline__ uint32_t pair_of(float x) {
    const uint32_t bits = float_to_bits<T>(x);
    return low_halves(bits, bits);
}

template <typename T>
constexpr uint32_t kOnes = std::is_same_v<T, __nv_bfloat16> ? 0x3f803f80u : 0x3c003c00u;

template <typename T, int kBits>
struct Codes;

template <typename T>
struct Codes<T, 4> {
    static constexpr bool kBrain = std::is_same_v<T, __nv_bfloat16>;
    static constexpr int kMiddle = 8;  // the zero of symmetric codes
    static constexpr int kOffset = kBrain ? 128 : 64;

    // Codes (0, 4), (1, 5), (2, 6), (3, 7) of a word.
    __device__ __forceinline__ static void expand(uint32_t word, uint32_t (&w)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (kBrain)
                w[i] = mask_and_set<0x000f000fu, 0x43004300u>(word >> 4 * i);
            else
                w[i] = mask_and_set<0x00f000f0u, 0x54005400u>(i == 0 ? word << 4
                                                                     : word >> 4 * (i - 1));
        }
    }

    // 8 activations in the order of `expand`.
    __device__ __forceinline__ static uint4 arrange(const uint4& x) {
        return make_uint4(low_halves(x.x, x.z), high_halves(x.x, x.z), low_halves(x.y, x.w),
                          high_halves(x.y, x.w));
    }
};

template <typename T>
struct Codes<T, 8> {
    static constexpr bool kBrain = std::is_same_v<T, __nv_bfloat16>;
    static constexpr int kMiddle = 128;
    static constexpr int kOffset = -128;

    // Codes (0, 2), (1, 3) of a word.
    __device__ __forceinline__ static void expand(uint32_t word, uint32_t (&w)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (kBrain) {
                const uint32_t low = mask_and_set<0x007f007fu, 0x43004300u>(word >> 8 * i);
                // -128, or -256 where the highest bit is 0.
                const uint32_t high = mask_inverse_and_set<0x00800080u, 0xc300c300u>(word >> 8 * i);
                w[i] = multiply_add_pair(low, kOnes<T>, high, T());
            } else {
                w[i] = multiply_add_pair(magic_bytes(word, i), kOnes<T>, 0xe480e480u, T());
            }
        }
    }

    __device__ __forceinline__ static uint4 arrange(const uint4& x) {
        return make_uint4(low_halves(x.x, x.y), high_halves(x.x, x.y), low_halves(x.z, x.w),
                          high_halves(x.z, x.w));
    }
};

}  // namespace offload
