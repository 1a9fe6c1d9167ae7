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
    static void load_two_bf16(const uint16_t* p, V& even, V& odd) {
        const __m512i pairs = _mm512_loadu_si512(p);
        even = (V)_mm512_slli_epi32(pairs, 16);
        odd = (V)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)));
    }
    static V load_i8(const int8_t* p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
#if defined(OFFLOAD_HOST_PAIRS)
    typedef __m512i P;  // 32 bf16, or 64 bytes
    static P load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
    static P load_pairs(const uint16_t* p, int count) {  // zeros behind them
        return _mm512_maskz_loadu_epi16(uint32_t((uint64_t(1) << count) - 1), p);
    }
    // sums[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
    static V add_pairs(V sums, P a, P b) {
        return (V)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
    }
    static P load_bytes(const int8_t* p) { return _mm512_loadu_si512(p); }
    static P load_bytes(const int8_t* p, int count) {  // zeros behind them
        return count >= 64 ? load_bytes(p) : _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, p);
    }
    static void store_bytes(char* p, P v) { __builtin_memcpy(p, &v, sizeof v); }
    static P all_bytes(int value) { return _mm512_set1_epi8(char(value)); }
    static P same_four(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return _mm512_set1_epi32(four);
    }
    static P flip(P bytes, P bits) { return _mm512_xor_si512(bytes, bits); }
    // sums[i] += the four products of a[4i] to a[4i + 3], without a sign, and those of b.
    static I add_fours(I sums, P a, P b) { return (I)_mm512_dpbusd_epi32((__m512i)sums, a, b); }
    static V to_float(I v) { return (V)_mm512_cvtepi32_ps((__m512i)v); }
    // Four rows of bytes, column by column: word 4 l + i of rows[j] is column 16 l + 4 j + i.
    static void interleave(P (&rows)[4]) {
        const P a = _mm512_unpacklo_epi8(rows[0], rows[1]);
        const P b = _mm512_unpackhi_epi8(rows[0], rows[1]);
        const P c = _mm512_unpacklo_epi8(rows[2], rows[3]);
        const P d = _mm512_unpackhi_epi8(rows[2], rows[3]);
        rows[0] = _mm512_unpacklo_epi16(a, c);
        rows[1] = _mm512_unpackhi_epi16(a, c);
        rows[2] = _mm512_unpacklo_epi16(b, d);
        rows[3] = _mm512_unpackhi_epi16(b, d);
    }
    // Of each 128 bits of two rows of sixteen-bit elements, the first or the last four and four.
    static P low_halves(P a, P b) { return _mm512_unpacklo_epi16(a, b); }
    static P high_halves(P a, P b) { return _mm512_unpackhi_epi16(a, b); }
    // As two bf16: the nearest, and what is left.
    static void store_pieces(V v, char* high, char* low) {
        const __m256bh top = _mm512_cvtneps_pbh((__m512)v);
        __builtin_memcpy(high, &top, sizeof top);
        uint16_t halves[lanes];
        __builtin_memcpy(halves, &top, sizeof top);
        const __m256bh rest = _mm512_cvtneps_pbh((__m512)(v - load_bf16(halves)));
        __builtin_memcpy(low, &rest, sizeof rest);
    }
    static void transpose(V (&rows)[16]) {
        V pairs[16];
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) {
            pairs[i] = low(rows[i], rows[i + 1]);
            pairs[i + 1] = high(rows[i], rows[i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                rows[i + 2 * j] = low_two(pairs[i + j], pairs[i + 2 + j]);
                rows[i + 2 * j + 1] = high_two(pairs[i + j], pairs[i + 2 + j]);
            }
        // rows[4 a + c] has of rows 4 a to 4 a + 3 column 4 l + c, in quarter l.
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512 a = (__m512)rows[c], b = (__m512)rows[4 + c];
            const __m512 d = (__m512)rows[8 + c], e = (__m512)rows[12 + c];
            const __m512 even = _mm512_shuffle_f32x4(a, b, 0x88);
            const __m512 odd = _mm512_shuffle_f32x4(a, b, 0xdd);
            const __m512 even2 = _mm512_shuffle_f32x4(d, e, 0x88);
            const __m512 odd2 = _mm512_shuffle_f32x4(d, e, 0xdd);
            rows[c] = (V)_mm512_shuffle_f32x4(even, even2, 0x88);
            rows[4 + c] = (V)_mm512_shuffle_f32x4(odd, odd2, 0x88);
            rows[8 + c] = (V)_mm512_shuffle_f32x4(even, even2, 0xdd);
            rows[12 + c] = (V)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
        }
    }
    // The nearest integers as 256 * high + low.
    static void store_codes(V v, int8_t* high, int8_t* low) {
        const I code = (I)_mm512_cvtps_epi32((__m512)v), top = (code + 128) >> 8;
        const __m128i tops = _mm512_cvtepi32_epi8((__m512i)top);
        const __m128i rests = _mm512_cvtepi32_epi8((__m512i)(code - (top << 8)));
        __builtin_memcpy(high, &tops, sizeof tops);
        __builtin_memcpy(low, &rests, sizeof rests);
    }
#endif
    static void hold(V& v) { __asm__("" : "+v"(v)); }  // in a register
    static float sum(V v) {
        const __m256 eight =
            _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    // p[i]: the sum of a[i]. Each step adds halves and leaves half as many vectors.
    static void store_sums(const V* a, float* p) {
        V b[8], c[4];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            b[i] = low(a[2 * i], a[2 * i + 1]) + high(a[2 * i], a[2 * i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            c[i] = low_two(b[2 * i], b[2 * i + 1]) + high_two(b[2 * i], b[2 * i + 1]);
        const V sums = quarters(quarters(c[0], c[1]), quarters(c[2], c[3]));
        __builtin_memcpy(p, &sums, sizeof sums);
    }

    // Of each 128 bits: a0 b0 a1 b1; a2 b2 a3 b3; a0 a1 b0 b1; a2 a3 b2 b3.
    static V low(V a, V b) { return (V)_mm512_unpacklo_ps((__m512)a, (__m512)b); }
    static V high(V a, V b) { return (V)_mm512_unpackhi_ps((__m512)a, (__m512)b); }
    static V low_two(V a, V b) { return (V)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
    static V high_two(V a, V b) { return (V)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }

  private:
    // Quarters a0 + a1, a2 + a3, b0 + b1, b2 + b3.
    static V quarters(V a, V b) {
        return (V)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) +
               (V)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd);
    }
};

}  // namespace
