// AVX-512 as the host library uses it, over AVX2: one function an instruction, by its definition.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef float emulated_m512 __attribute__((vector_size(64)));
typedef long long emulated_m512i __attribute__((vector_size(64)));
typedef double emulated_m512d __attribute__((vector_size(64)));
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

inline emulated_m512i srli_epi32(emulated_m512i v, int by) {
    Array<uint32_t, 16> lanes = as<Array<uint32_t, 16>>(v);
    for (uint32_t& lane : lanes.at) lane >>= by;
    return as<emulated_m512i>(lanes);
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

inline emulated_m512 castps256_ps512(__m256 low) {
    return join<emulated_m512>(low, _mm256_setzero_ps());
}

inline emulated_m512 insertf32x8(emulated_m512 v, __m256 half, int) {
    return join<emulated_m512>(castps512_ps256(v), half);
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

inline emulated_m512i maskz_loadu_epi8(uint64_t mask, const void* p) {
    Array<uint8_t, 64> v = {};
    for (int i = 0; i < 64; i++)
        if (mask >> i & 1) v.at[i] = static_cast<const uint8_t*>(p)[i];
    return as<emulated_m512i>(v);
}

// A bit a lane: its uppermost one.
inline uint16_t movepi32_mask(emulated_m512i v) {
    const auto lanes = as<Array<int32_t, 16>>(v);
    uint16_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= uint16_t((lanes.at[i] < 0) << i);
    return mask;
}

inline emulated_m512i and_si512(emulated_m512i a, emulated_m512i b) { return a & b; }
inline emulated_m512i xor_si512(emulated_m512i a, emulated_m512i b) { return a ^ b; }

template <class T>
emulated_m512i set1(T value) {
    Array<T, 64 / sizeof(T)> lanes;
    for (T& lane : lanes.at) lane = value;
    return as<emulated_m512i>(lanes);
}
inline emulated_m512i set1_epi8(char value) { return set1(value); }
inline emulated_m512i set1_epi32(int32_t value) { return set1(value); }

// Of each 128 bits the lower or the upper half's elements, of a and b in turn.
template <class T, class Whole>
Whole unpack(Whole a, Whole b, bool upper) {
    constexpr int count = 16 / sizeof(T);
    const auto from_a = as<Array<T, 64 / sizeof(T)>>(a), from_b = as<Array<T, 64 / sizeof(T)>>(b);
    Array<T, 64 / sizeof(T)> result;
    for (int i = 0; i < 64 / int(sizeof(T)); i++) {
        const int from = i / count * count + (upper ? count / 2 : 0) + i % count / 2;
        result.at[i] = i % 2 == 0 ? from_a.at[from] : from_b.at[from];
    }
    return as<Whole>(result);
}
inline emulated_m512 unpacklo_ps(emulated_m512 a, emulated_m512 b) {
    return unpack<float>(a, b, false);
}
inline emulated_m512 unpackhi_ps(emulated_m512 a, emulated_m512 b) {
    return unpack<float>(a, b, true);
}
inline emulated_m512d unpacklo_pd(emulated_m512d a, emulated_m512d b) {
    return unpack<double>(a, b, false);
}
inline emulated_m512d unpackhi_pd(emulated_m512d a, emulated_m512d b) {
    return unpack<double>(a, b, true);
}
inline emulated_m512i unpacklo_epi8(emulated_m512i a, emulated_m512i b) {
    return unpack<uint8_t>(a, b, false);
}
inline emulated_m512i unpackhi_epi8(emulated_m512i a, emulated_m512i b) {
    return unpack<uint8_t>(a, b, true);
}
inline emulated_m512i unpacklo_epi16(emulated_m512i a, emulated_m512i b) {
    return unpack<uint16_t>(a, b, false);
}
inline emulated_m512i unpackhi_epi16(emulated_m512i a, emulated_m512i b) {
    return unpack<uint16_t>(a, b, true);
}

// Two quarters of a, then two of b.
inline emulated_m512 shuffle_f32x4(emulated_m512 a, emulated_m512 b, int which) {
    const auto from_a = as<Array<__m128, 4>>(a), from_b = as<Array<__m128, 4>>(b);
    return as<emulated_m512>(
        Array<__m128, 4>{{from_a.at[which & 3], from_a.at[which >> 2 & 3],
                          from_b.at[which >> 4 & 3], from_b.at[which >> 6 & 3]}});
}

// Bytes of a have no sign.
inline emulated_m512i dpbusd_epi32(emulated_m512i sums, emulated_m512i a, emulated_m512i b) {
    const auto left = as<Array<uint8_t, 64>>(a);
    const auto right = as<Array<int8_t, 64>>(b);
    auto lanes = as<Array<uint32_t, 16>>(sums);
    for (int i = 0; i < 64; i++) lanes.at[i / 4] += uint32_t(int32_t(left.at[i]) * right.at[i]);
    return as<emulated_m512i>(lanes);
}

inline emulated_m512i cvtps_epi32(emulated_m512 v) {
    return join<emulated_m512i>(_mm256_cvtps_epi32(castps512_ps256(v)),
                                _mm256_cvtps_epi32(extractf32x8_ps(v, 1)));
}

// Each 128 bits of the result: those of a, then of b, at the nearest value that there is room for.
template <class From, class To>
emulated_m512i pack(emulated_m512i a, emulated_m512i b, From least, From most) {
    constexpr int count = 16 / sizeof(From);
    const auto from_a = as<Array<From, 64 / sizeof(From)>>(a);
    const auto from_b = as<Array<From, 64 / sizeof(From)>>(b);
    Array<To, 64 / sizeof(To)> result;
    for (int i = 0; i < 64 / int(sizeof(To)); i++) {
        const int from = i / (2 * count) * count + i % count;
        const From x = i / count % 2 == 0 ? from_a.at[from] : from_b.at[from];
        result.at[i] = To(x < least ? least : x > most ? most : x);
    }
    return as<emulated_m512i>(result);
}
inline emulated_m512i packs_epi32(emulated_m512i a, emulated_m512i b) {
    return pack<int32_t, int16_t>(a, b, -32768, 32767);
}
inline emulated_m512i packs_epi16(emulated_m512i a, emulated_m512i b) {
    return pack<int16_t, int8_t>(a, b, -128, 127);
}
inline emulated_m512i packus_epi16(emulated_m512i a, emulated_m512i b) {
    return pack<int16_t, uint8_t>(a, b, 0, 255);
}

inline emulated_m512i permutexvar_epi32(emulated_m512i order, emulated_m512i v) {
    const auto from = as<Array<int32_t, 16>>(order), lanes = as<Array<int32_t, 16>>(v);
    Array<int32_t, 16> result;
    for (int i = 0; i < 16; i++) result.at[i] = lanes.at[from.at[i] & 15];
    return as<emulated_m512i>(result);
}

inline emulated_m512 set1_ps(float value) { return emulated_m512{} + value; }

inline emulated_m512 max_ps(emulated_m512 a, emulated_m512 b) { return a > b ? a : b; }

inline emulated_m512 roundscale_ps(emulated_m512 v, int) {
    for (int i = 0; i < 16; i++) v[i] = __builtin_nearbyintf(v[i]);
    return v;
}

inline emulated_m512 scalef_ps(emulated_m512 v, emulated_m512 exponents) {
    for (int i = 0; i < 16; i++)
        v[i] = exponents[i] == exponents[i]
                   ? __builtin_scalbnf(v[i], int(__builtin_floorf(exponents[i])))
                   : exponents[i];
    return v;
}

}  // namespace emulated
