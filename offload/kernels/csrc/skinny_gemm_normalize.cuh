// A norm that the product cannot take along (skinny_gemm_norm.cuh), as a kernel before it.
#pragma once
#include "common.cuh"

namespace offload {

constexpr int kNormThreads = 1024;

// Normalises rows into `to`, at a pitch of `pitch` elements: one block a row.
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    normalize_rows_kernel(const OffloadSkinnyGemm a, T* to, int64_t pitch) {
    __shared__ float scratch[33];
    let_next_kernel_begin();
    wait_for_previous_kernel();
    const T* x = static_cast<const T*>(a.input) + blockIdx.x * a.input_stride;
    const T* weight = static_cast<const T*>(a.norm.weight);
    const T* bias = static_cast<const T*>(a.norm.bias);
    auto total = [&](float v) {
        v = warp_sum(v);
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x < 32) {
            v = warp_sum(threadIdx.x < blockDim.x / 32 ? scratch[threadIdx.x] : 0.f);
            if (threadIdx.x == 0) scratch[32] = v;
        }
        __syncthreads();
        v = scratch[32];
        __syncthreads();
        return v;
    };
    float mean = 0.f, square = 0.f;
    if (a.norm.kind == OFFLOAD_NORM_LAYER) {
        for (int i = threadIdx.x; i < a.depth; i += blockDim.x) mean += to_float(x[i]);
        mean = total(mean) / a.depth;
    }
    for (int i = threadIdx.x; i < a.depth; i += blockDim.x) {
        const float y = to_float(x[i]) - mean;
        square += y * y;
    }
    const float scale = 1.f / sqrtf(total(square) / a.depth + a.norm.eps);
    for (int i = threadIdx.x; i < a.depth; i += blockDim.x) {
        float y = (to_float(x[i]) - mean) * scale;
        if (weight) y *= to_float(weight[i]) + a.norm.weight_offset;
        if (bias) y += to_float(bias[i]);
        to[blockIdx.x * pitch + i] = from_float<T>(y);
    }
}

}  // namespace offload
