// Stands for tensor_core.cuh where kernels run on the host: a warp's lanes put their operands on a
// table, and each takes from it what its part of the product needs.
#pragma once
#include "common.cuh"

namespace offload {

struct Operands {
    uint32_t a[4], b[2];
};
inline Operands operand_table[2][8192];

inline float element(uint32_t pair, int which, __nv_bfloat16) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
}
inline float element(uint32_t pair, int which, __half) {
    const uint16_t bits = static_cast<uint16_t>(which ? pair >> 16 : pair);
    __half x;
    memcpy(&x, &bits, sizeof x);
    return __half2float(x);
}

template <typename T>
void multiply_tile(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                   uint32_t b1, T type) {
    const int thread = host_cuda::current, first = thread / 32 * 32;
    const int g = thread % 32 / 4, t = thread % 4;
    Operands* table = operand_table[host_cuda::self().warp_barriers % 2];
    table[thread] = {{a0, a1, a2, a3}, {b0, b1}};
    host_cuda::warp_barrier();
    for (int i = 0; i < 4; ++i)
        for (int quad = 0; quad < 4; ++quad)
            for (int half = 0; half < 2; ++half)
                for (int which = 0; which < 2; ++which) {
                    const uint32_t a = table[first + g * 4 + quad].a[half * 2 + i / 2];
                    const uint32_t b = table[first + (2 * t + i % 2) * 4 + quad].b[half];
                    c[i] += element(a, which, type) * element(b, which, type);
                }
}

inline uint32_t low_twice(uint32_t x) { return (x & 0xffffu) * 0x10001u; }
inline uint32_t high_twice(uint32_t x) { return (x >> 16) * 0x10001u; }

template <typename T>
uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c, T type) {
    uint16_t halves[2];
    for (int i = 0; i < 2; ++i) {
        // Exact in double, but for tails that a rounding to 11 bits does not see.
        const T y = from_float<T>(static_cast<float>(
            static_cast<double>(element(a, i, type)) * element(b, i, type) + element(c, i, type)));
        memcpy(&halves[i], &y, sizeof y);
    }
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}

}  // namespace offload
