// Four neighbouring outputs of a lane of quant_gemm_wide.cuh, from their sums on.
#pragma once
#include "quant_gemm_work.cuh"

namespace offload {

// In turn: the code of an activation is long.
__device__ __forceinline__ void activate_four(float (&y)[4], int activation) {
    if (activation != OFFLOAD_IDENTITY)
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
            const float z = activate(y[0], activation);
            y[0] = y[1];
            y[1] = y[2];
            y[2] = y[3];
            y[3] = z;
        }
}

// Whether four outputs may be written at once.
__device__ __forceinline__ bool takes_fours(const OffloadQuantGemm& a) {
    return reinterpret_cast<uintptr_t>(a.output) % 8 == 0 && a.output_stride % 4 == 0;
}

template <typename T>
__device__ __forceinline__ void write_four(T* to, const T (&out)[4], bool at_once) {
    if (at_once) {
        uint2 all;
        memcpy(&all, out, sizeof all);
        *reinterpret_cast<uint2*>(to) = all;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = out[j];
    }
}

}  // namespace offload
