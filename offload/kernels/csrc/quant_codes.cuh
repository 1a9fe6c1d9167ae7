// Codes of 4 and 8 bits as operand A of the tensor cores.
//
// A lane reads 16 bytes of a row at once and uses them as its elements of 2 to 4 products of 16 x
// 16: which columns of the weight these are does not matter, as long as the activations beside
// them are the same. All of a lane's codes lie within 32 columns, so they share a scale.
//
// A weight is (code - zero) * scale, rounded once to T: what `dequantize` writes and torch
// multiplies with. int4, in pairs: `0x4300 | code` is the bfloat16 128 + code, `0x6400 | code` the
// half 1024 + code (and 0x6400 | code << 4 is 1024 + 16 code, which saves a shift); subtracting the
// zero is exact. 13 to 15 instructions for 8 weights. int8 by way of float32, since a bfloat16 has
// no room for 8 bits beside their offset: 14 for 4.
#pragma once
#include <string.h>

#include <type_traits>

#include "tensor_core.cuh"

namespace offload {

// The scale and zero of the 16 bytes of a row that a lane holds, as instructions want them.
struct CodeAffine {
    uint32_t scale, zero, zero_high;
};

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

// Byte i of `word` as the float 2^23 + byte.
__device__ __forceinline__ float magic_byte(uint32_t word, int i) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + i));
#else
    return __uint_as_float(0x4b000000u | (word >> 8 * i & 255u));
#endif
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
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

template <typename T, int kBits>
struct Codes;

template <typename T>
struct Codes<T, 4> {
    static constexpr int kPieces = 4;  // of 8 codes, in 16 bytes
    static constexpr bool kBrain = std::is_same_v<T, __nv_bfloat16>;

    __device__ __forceinline__ static CodeAffine affine(uint32_t scale, uint32_t zero) {
        const uint32_t pair = low_halves(scale, scale);
        const uint32_t low = (kBrain ? 0xc300u : 0xe400u) | zero, high = 0xd400u | zero << 4;
        return {pair, low_halves(low, low), kBrain ? 0u : low_halves(high, high)};
    }

    // Weights (0, 4), (1, 5), (2, 6), (3, 7) of piece `piece`.
    __device__ __forceinline__ static void expand(const uint4& raw, int piece,
                                                  const CodeAffine& affine, uint32_t (&w)[4]) {
        uint32_t word = piece == 0 ? raw.x : piece == 1 ? raw.y : piece == 2 ? raw.z : raw.w;
        constexpr uint32_t kMinusZero = 0x80008000u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t x;
            if (kBrain) {
                x = multiply_add_pair(mask_and_set<0x000f000fu, 0x43004300u>(word >> 4 * i),
                                      0x3f803f80u, affine.zero, T());
            } else {
                if (i == 2) word >>= 8;
                x = i % 2 == 0 ? multiply_add_pair(mask_and_set<0x000f000fu, 0x64006400u>(word),
                                                   0x3c003c00u, affine.zero, T())
                               : multiply_add_pair(mask_and_set<0x00f000f0u, 0x64006400u>(word),
                                                   0x2c002c00u, affine.zero_high, T());
            }
            w[i] = multiply_add_pair(x, affine.scale, kMinusZero, T());
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
    static constexpr int kPieces = 2;

    __device__ __forceinline__ static CodeAffine affine(uint32_t scale, uint32_t zero) {
        return {__float_as_uint(bits_to_float(scale, T())), 0x4b000000u | zero, 0u};
    }

    __device__ __forceinline__ static void expand(const uint4& raw, int piece,
                                                  const CodeAffine& affine, uint32_t (&w)[4]) {
        const float scale = __uint_as_float(affine.scale), zero = __uint_as_float(affine.zero);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = piece == 0 ? (i < 2 ? raw.x : raw.y) : (i < 2 ? raw.z : raw.w);
            const float low = (magic_byte(word, i % 2 * 2) - zero) * scale;
            const float high = (magic_byte(word, i % 2 * 2 + 1) - zero) * scale;
            w[i] = pack_pair(low, high, T());
        }
    }

    __device__ __forceinline__ static uint4 arrange(const uint4& x) { return x; }
};

}  // namespace offload
