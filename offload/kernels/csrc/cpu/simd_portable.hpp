// Vectors of four floats by the compiler's own vector types: any CPU.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

// What attend.hpp wants of a set of instructions. A load reads exactly `lanes` elements.
struct Simd {
    static constexpr int lanes = 4;
    static constexpr int sums =
        8;  // accumulators that registers hold beside what they are fed with
    typedef float V __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef uint64_t W __attribute__((vector_size(16)));

    static V load(const float* p) {
        V v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    static V load_f16(const uint16_t* p) {
        const I half = {p[0], p[1], p[2], p[3]};
        const I magnitude = half & 0x7fff;
        V scaled = (V)(magnitude << 13) * 0x1p112f;
        const I special = magnitude >= 0x7c00;
        return (V)((I)scaled | (special & 0x7f800000) | (half & 0x8000) << 16);
    }
    static V load_bf16(const uint16_t* p) {
        const I half = {p[0], p[1], p[2], p[3]};
        return (V)(half << 16);
    }
    // Twice as many, the even ones and the odd ones: what takes least where a pair is a word.
    static void load_two_bf16(const uint16_t* p, V& even, V& odd) {
        I pairs;
        memcpy(&pairs, p, sizeof pairs);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        even = (V)(pairs << 16);
        odd = (V)(pairs & int32_t(0xffff0000));
#else
        odd = (V)(pairs << 16);
        even = (V)(pairs & int32_t(0xffff0000));
#endif
    }
    static V load_i8(const int8_t* p) {
        const V v = {float(p[0]), float(p[1]), float(p[2]), float(p[3])};
        return v;
    }
    static void hold(V&) {}  // in a register, where the compiler would not
    static float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
    // p[i]: the sum of a[i], of sixteen.
    static void store_sums(const V* a, float* p) {
        for (int i = 0; i < 16; i++) p[i] = sum(a[i]);
    }
};

}  // namespace
