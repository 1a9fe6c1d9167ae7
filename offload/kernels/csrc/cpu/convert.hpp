// Single values between float and what caches hold, rounded to nearest, ties to even. For any CPU.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of_bf16(uint16_t half) { return float_of_bits(uint32_t(half) << 16); }

inline uint16_t bf16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays one
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The exponent is moved by a product, which is exact and right for subnormal numbers too.
inline float float_of_f16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, sign = uint32_t(half & 0x8000) << 16;
    if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | magnitude << 13);
    return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

inline uint16_t f16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // from 65520 on: infinity
    if (magnitude < 0x38800000) {  // below the least normal: a sum whose last bit is 2^-24 rounds
        const float sum = float_of_bits(magnitude) + 0.5f;
        return uint16_t(sign | (bits_of_float(sum) - 0x3f000000));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}

}  // namespace
