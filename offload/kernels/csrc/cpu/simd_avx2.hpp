// Vectors of eight floats: AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct Simd {
    static constexpr int lanes = 8;
    static constexpr int sums = 8;
    typedef float V __attribute__((vector_size(32)));
    typedef int32_t I __attribute__((vector_size(32)));
    typedef uint64_t W __attribute__((vector_size(32)));

    static V load(const float* p) { return (V)_mm256_loadu_ps(p); }
    static V load_f16(const uint16_t* p) {
        return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static V load_bf16(const uint16_t* p) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
    }
    static void load_two_bf16(const uint16_t* p, V& even, V& odd) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        even = (V)_mm256_slli_epi32(pairs, 16);
        odd = (V)_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)));
    }
    static V load_i8(const int8_t* p) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    static void hold(V& v) { __asm__("" : "+x"(v)); }  // in a register
    static float sum(V v) {
        __m128 half =
            _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    // p[i]: the sum of a[i], of sixteen.
    static void store_sums(const V* a, float* p) {
        for (int i = 0; i < 16; i += 4)
            _mm_storeu_ps(p + i, four(a[i], a[i + 1], a[i + 2], a[i + 3]));
    }

  private:
    static __m128 four(V a, V b, V c, V d) {
        const __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b);
        const __m256 cd = _mm256_hadd_ps((__m256)c, (__m256)d);
        const __m256 abcd = _mm256_hadd_ps(ab, cd);
        return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
    }
};

}  // namespace
