// Any depth, stride and address: a warp an output.
#pragma once
#include "common.cuh"
#include "skinny_gemm_plan.cuh"

namespace offload {

template <typename T>
__global__ void __launch_bounds__(256) plain_gemm_kernel(const OffloadSkinnyGemm a) {
    const int lane = threadIdx.x % 32;
    const int64_t n = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    let_next_kernel_begin();
    wait_for_previous_kernel();
    if (n >= a.outputs) return;
    const T* input = static_cast<const T*>(a.input);
    const T* bias = static_cast<const T*>(a.bias);
    float sums[2][kMostRows] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half && !a.gated) break;
        const T* weight =
            static_cast<const T*>(a.weight) + (n + (half ? a.outputs : 0)) * a.weight_stride;
        for (int k = lane; k < a.depth; k += 32) {
            const float w = to_float(weight[k]);
#pragma unroll
            for (int r = 0; r < kMostRows; ++r)
                if (r < a.rows)
                    sums[half][r] = fmaf(w, to_float(input[r * a.input_stride + k]), sums[half][r]);
        }
    }
#pragma unroll
    for (int r = 0; r < kMostRows; ++r) {
        if (r >= a.rows) break;
        float y = warp_sum(sums[0][r]), up = a.gated ? warp_sum(sums[1][r]) : 0.f;
        if (lane) continue;
        y = activate(y + (bias ? to_float(bias[n]) : 0.f), a.activation);
        if (a.gated) y *= up + (bias ? to_float(bias[n + a.outputs]) : 0.f);
        if (a.residual) y += to_float(static_cast<const T*>(a.residual)[r * a.residual_stride + n]);
        static_cast<T*>(a.output)[r * a.output_stride + n] = from_float<T>(y);
    }
}

}  // namespace offload
