// Vectors of sixteen floats: AVX-512 (F, BW, VL, DQ).
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct Simd {
    static constexpr int lanes = 16;
    static constexpr int sums = 16;
    typedef float V __attribute__((vector_size(64)));
    typedef int32_t I __attribute__((vector_size(64)));
    typedef uint64_t W __attribute__((vector_size(64)));

    static V load(const float* p) { return (V)_mm512_loadu_ps(p); }
    static V load_f16(const uint16_t* p) {
        return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static V load_bf16(const uint16_t* p) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    }
    static V load_i8(const int8_t* p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
#if defined(OFFLOAD_HOST_PAIRS)
    typedef __m512i P;  // 32 bf16
    static P load_pairs(const uint16_t* p, int count) {
        return count == 32 ? _mm512_loadu_si512(p)
                           : _mm512_maskz_loadu_epi16(uint32_t((uint64_t(1) << count) - 1), p);
    }
    // sums[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
    static V add_pairs(V sums, P a, P b) {
        return (V)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
    }
#endif
    static __m256 halves(V v) {
        return _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                             _mm512_extractf32x8_ps((__m512)v, 1));
    }
    static void hold(V& v) { __asm__("" : "+v"(v)); }  // in a register
    static float sum(V v) {
        const __m256 eight = halves(v);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    static void store_sums(V a, V b, V c, V d, float* p) {
        const __m256 ab = _mm256_hadd_ps(halves(a), halves(b));
        const __m256 cd = _mm256_hadd_ps(halves(c), halves(d));
        const __m256 abcd = _mm256_hadd_ps(ab, cd);
        _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
    }
};

}  // namespace
