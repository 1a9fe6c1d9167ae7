// The tensor cores' product of 16 x 16 with 16 x 8 elements, in the form that every GPU since sm_80
// has.
//
// With g = lane / 4 and t = lane % 4 a lane holds of A (16 x 16) a0: row g, columns 2t and 2t + 1,
// a1: row g + 8, the same, a2 and a3: the same rows, columns 8 more; of B (16 x 8) b0: column g,
// rows 2t and 2t + 1, b1: rows 8 more; of C (16 x 8) c0 and c1: row g, columns 2t and 2t + 1, c2
// and c3: row g + 8.
#pragma once
#include "common.cuh"

namespace offload {

// c += a * b
__device__ __forceinline__ void multiply_tile(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1,
                                              __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_tile(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1, __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The element in the low half of a word, or in its high half, in both: multiply_add_pair can take
// it from there, without an instruction.
__device__ __forceinline__ uint32_t low_twice(uint32_t x) {
    uint32_t y;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
        : "=r"(y)
        : "r"(x));
    return y;
}

__device__ __forceinline__ uint32_t high_twice(uint32_t x) {
    uint32_t y;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
        : "=r"(y)
        : "r"(x));
    return y;
}

// a * b + c of two elements each, rounded once.
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c,
                                                      __nv_bfloat16) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c, __half) {
    uint32_t y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

}  // namespace offload
