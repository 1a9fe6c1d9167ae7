// AVX-512 as the host library uses it, over AVX2: one function an instruction, by its definition.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef float emulated_m512 __attribute__((vector_size(64)));
typedef long long emulated_m512i __attribute__((vector_size(64)));
typedef unsigned short emulated_m512bh __attribute__((vector_size(64)));

namespace emulated {

template <class To, class From>
To as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

template <class Whole, class Half>
Whole join(Half low, Half high) {
    Half both[2] = {low, high};
    return as<Whole>(both);
}

template <class T, int N>
struct Array {
    T at[N];
};

inline emulated_m512 loadu_ps(const void* p) {
    emulated_m512 v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline emulated_m512i loadu_si512(const void* p) {
    emulated_m512i v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline emulated_m512i maskz_loadu_epi16(uint32_t mask, const void* p) {
    Array<uint16_t, 32> v = {};
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(&v.at[i], static_cast<const uint16_t*>(p) + i, 2);
    return as<emulated_m512i>(v);
}

inline emulated_m512 cvtph_ps(__m256i half) {
    return join<emulated_m512>(_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                               _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)));
}

inline emulated_m512i cvtepu16_epi32(__m256i half) {
    return join<emulated_m512i>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(half)),
                                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(half, 1)));
}

inline emulated_m512i cvtepi8_epi32(__m128i bytes) {
    return join<emulated_m512i>(_mm256_cvtepi8_epi32(bytes),
                                _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
}

inline emulated_m512i slli_epi32(emulated_m512i v, int by) {
    Array<uint32_t, 16> lanes = as<Array<uint32_t, 16>>(v);
    for (uint32_t& lane : lanes.at) lane <<= by;
    return as<emulated_m512i>(lanes);
}

inline emulated_m512 cvtepi32_ps(emulated_m512i v) {
    const Array<int32_t, 16> lanes = as<Array<int32_t, 16>>(v);
    emulated_m512 result;
    for (int i = 0; i < 16; i++) result[i] = static_cast<float>(lanes.at[i]);
    return result;
}

inline __m256 castps512_ps256(emulated_m512 v) {
    __m256 low;
    memcpy(&low, &v, sizeof low);
    return low;
}

inline __m256 extractf32x8_ps(emulated_m512 v, int half) {
    return as<Array<__m256, 2>>(v).at[half];
}

// The odd element of a pair first, each product added without rounding in between; subnormal
// numbers count as zero.
inline emulated_m512 dpbf16_ps(emulated_m512 sums, emulated_m512bh a, emulated_m512bh b) {
    const auto value = [](unsigned short half) {
        const float x = as<float>(uint32_t(half) << 16);
        return __builtin_fabsf(x) < 0x1p-126f ? 0 * x : x;
    };
    for (int i = 0; i < 16; i++) {
        sums[i] = __builtin_fmaf(value(a[2 * i + 1]), value(b[2 * i + 1]), sums[i]);
        sums[i] = __builtin_fmaf(value(a[2 * i]), value(b[2 * i]), sums[i]);
    }
    return sums;
}

}  // namespace emulated
