// Vectors of sixteen floats: AVX-512 (F, BW, VL, DQ).
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define OFFLOAD_HOST_EXP2  // Simd::exp2_of is there

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
        __m512i pairs = _mm512_loadu_si512(p);
        hold(pairs);  // compilers would load it for each of the two
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
    typedef int16_t Shorts __attribute__((vector_size(64)));
    static Shorts shorts(V a, V b) {  // the nearest integers, four of each in turn
        return (Shorts)_mm512_packs_epi32(_mm512_cvtps_epi32((__m512)a),
                                          _mm512_cvtps_epi32((__m512)b));
    }
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
    static V join(const float* low, const float* high) {  // eight of each
        return (V)_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)),
                                     _mm256_loadu_ps(high), 1);
    }
    // Quarter j of vector i becomes quarter i of vector j.
    static void transpose_quarters(V (&v)[4]) {
        const __m512 even = _mm512_shuffle_f32x4((__m512)v[0], (__m512)v[1], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4((__m512)v[0], (__m512)v[1], 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4((__m512)v[2], (__m512)v[3], 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4((__m512)v[2], (__m512)v[3], 0xdd);
        v[0] = (V)_mm512_shuffle_f32x4(even, even2, 0x88);
        v[1] = (V)_mm512_shuffle_f32x4(odd, odd2, 0x88);
        v[2] = (V)_mm512_shuffle_f32x4(even, even2, 0xdd);
        v[3] = (V)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
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
            V some[4] = {rows[c], rows[4 + c], rows[8 + c], rows[12 + c]};
            transpose_quarters(some);
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) rows[4 * l + c] = some[l];
        }
    }
    // The nearest integers, of 16 bits, as 256 * high + low.
    static void store_codes(const V (&v)[4], int8_t* high, int8_t* low) {
        const Shorts ab = shorts(v[0], v[1]), cd = shorts(v[2], v[3]);
        const __m512i highs =
            _mm512_packs_epi16((__m512i)((ab + 128) >> 8), (__m512i)((cd + 128) >> 8));
        const __m512i lows = _mm512_packus_epi16((__m512i)(ab & 255), (__m512i)(cd & 255));
        // Quarters have four of each vector: word 4 l + i of them is word 4 i + l.
        const I order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
        store_bytes(reinterpret_cast<char*>(high), _mm512_permutexvar_epi32((__m512i)order, highs));
        store_bytes(reinterpret_cast<char*>(low), _mm512_permutexvar_epi32((__m512i)order, lows));
    }
    // As two bf16, what is cut off the first and then of that, `apart` bytes behind it: in words of
    // which they are the first half, and in others of which they are the second. Zeros beside them.
    static void store_pieces(V v, char* first, char* second, int64_t apart) {
        const __m512i top = _mm512_and_si512((__m512i)v, _mm512_set1_epi32(int(0xffff0000)));
        const __m512i rest = (__m512i)(v - (V)top);
        store_bytes(first, _mm512_srli_epi32((__m512i)v, 16));
        store_bytes(first + apart, _mm512_srli_epi32(rest, 16));
        store_bytes(second, top);
        store_bytes(second + apart, _mm512_and_si512(rest, _mm512_set1_epi32(int(0xffff0000))));
    }
#endif
    // 2^x to about 2^-22 of it, zero below -100; NaN stays NaN. The polynomial is 2^x on [-1/2,
    // 1/2] at Chebyshev's points. Numbers too small to be normal, which no sum beside 1 has digits
    // for, would take processors a hundred cycles each.
    static V exp2_of(V x) {
        const __m512 inside = _mm512_max_ps(_mm512_set1_ps(-101.0f), (__m512)x);
        const V n = (V)_mm512_roundscale_ps(inside, 0), r = (V)inside - n;
        V y = r * 1.339086336e-03f + 9.676031918e-03f;
        y = y * r + 5.550357114e-02f;
        y = y * r + 2.402210749e-01f;
        y = y * r + 6.931471880e-01f;
        y = y * r + 1.000000075e+00f;
        const V power = (V)_mm512_scalef_ps((__m512)y, (__m512)n);
        return x < -100.0f ? V{} : power;
    }
    // Vectors i and 4 + i, below 4, have rows i, 4 + i and 8 + i, 12 + i, of eight; then each has a
    // column of sixteen.
    static void transpose_halves(V (&rows)[8]) {
        V pairs[8];
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            pairs[i] = low(rows[i], rows[i + 1]);
            pairs[i + 1] = high(rows[i], rows[i + 1]);
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const V a[] = {low_two(pairs[j], pairs[2 + j]), high_two(pairs[j], pairs[2 + j])};
            const V b[] = {low_two(pairs[4 + j], pairs[6 + j]),
                           high_two(pairs[4 + j], pairs[6 + j])};
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                rows[2 * j + i] = (V)_mm512_shuffle_f32x4((__m512)a[i], (__m512)b[i], 0x88);
                rows[4 + 2 * j + i] = (V)_mm512_shuffle_f32x4((__m512)a[i], (__m512)b[i], 0xdd);
            }
        }
    }
    // Vector i has rows 2 i and 2 i + 1, of eight; then each has a column of sixteen.
    static void transpose_pairs(V (&rows)[8]) {
        transpose_halves(rows);
        const I order = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            rows[i] = (V)_mm512_permutexvar_epi32((__m512i)order, (__m512i)rows[i]);
    }
    // The lower eight lanes, and a number in the others.
    static V lower(V v, float other) {
        return (V)_mm512_insertf32x8((__m512)v, _mm256_set1_ps(other), 1);
    }
    static V other_half(V v) { return (V)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e); }
    static bool any(I mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
    // Of even and odd elements, all in their order.
    static void merge(V (&v)[2]) {
        const __m512 a = (__m512)low(v[0], v[1]), b = (__m512)high(v[0], v[1]);
        const __m512 front = _mm512_shuffle_f32x4(a, b, 0x44);
        const __m512 back = _mm512_shuffle_f32x4(a, b, 0xee);
        v[0] = (V)_mm512_shuffle_f32x4(front, front, 0xd8);
        v[1] = (V)_mm512_shuffle_f32x4(back, back, 0xd8);
    }
    template <class Vector>
    static void hold(Vector& v) {  // in a register
        __asm__("" : "+v"(v));
    }
    static float sum(V v) {
        const __m256 eight =
            _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    // Lane i: the sum of a[i]. Each step adds halves and leaves half as many vectors.
    static V sums_of(const V* a) {
        V b[8], c[4];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            b[i] = low(a[2 * i], a[2 * i + 1]) + high(a[2 * i], a[2 * i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            c[i] = low_two(b[2 * i], b[2 * i + 1]) + high_two(b[2 * i], b[2 * i + 1]);
        return quarters(quarters(c[0], c[1]), quarters(c[2], c[3]));
    }
    static void store_sums(const V* a, float* p) {  // p[i]: the sum of a[i]
        const V sums = sums_of(a);
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
