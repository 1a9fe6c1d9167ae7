// What quant_gemm.cuh makes of more than 8 rows of activations before they are multiplied: the
// tensor cores would be busy half as long again if each bundle summed them up by itself.
#pragma once
#include "quant_codes.cuh"
#include "quant_gemm_work.cuh"

namespace offload {

// Enlarges the activations that a block has in shared memory, and sums them up as the loop would:
// products with -kMiddle, of 8 rows and half a chunk (or a whole one) at a time. A lane has its
// part of a sum at `starts`.
template <typename T, int kBits, typename Shape>
__device__ __forceinline__ void sum_up(const OffloadQuantGemm& a, const QuantPlan& p, int chunks,
                                       unsigned char* shared) {
    using Code = Codes<T, kBits>;
    constexpr int kColumns = Shape::kColumns, kLoads = Shape::kLoads;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, quarter = lane % 4;
    float4* const starts = reinterpret_cast<float4*>(shared + p.starts_at) + quarter;
    constexpr int kAtOnce = 2;
    const int halves = chunks * Shape::kHalves;
#pragma unroll 1
    for (int first = warp; first < halves; first += kAtOnce * Shape::kWarps) {
        uint4 x[kAtOnce][kColumns][kLoads];
        auto each = [&](auto use) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int c = 0; c < kColumns; ++c) use(i, first + i * Shape::kWarps, c);
        };
        auto place = [&](int half, int c, int l) {
            return reinterpret_cast<uint4*>(shared + (c * 8 + row) * p.input_pitch) + quarter +
                   (half * kLoads + l) * 4;
        };
        auto there = [&](int half, int c) { return half < halves && c * 8 + row < a.rows; };
        each([&](int i, int half, int c) {
#pragma unroll
            for (int l = 0; l < kLoads; ++l)
                x[i][c][l] = there(half, c) ? *place(half, c, l) : make_uint4(0, 0, 0, 0);
        });
        if constexpr (Code::kEnlarged)
            each([&](int i, int half, int c) {
#pragma unroll
                for (int l = 0; l < kLoads; ++l) {
                    x[i][c][l] = Code::enlarge(x[i][c][l]);
                    if (there(half, c)) *place(half, c, l) = x[i][c][l];
                }
            });
        float sum[kAtOnce][kColumns][4] = {};
#pragma unroll
        for (int l = 0; l < kLoads; ++l)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                each([&](int i, int, int c) {
                    const uint4& at = x[i][c][l];
                    multiply_tile(sum[i][c], Code::kMinusFirst, Code::kMinusSecond,
                                  Code::kMinusFirst, Code::kMinusSecond, j ? at.z : at.x,
                                  j ? at.w : at.y, T());
                });
        each([&](int i, int half, int c) {
            if (row == 0 && half < halves)
                starts[(half * kColumns + c) * 4] =
                    make_float4(sum[i][c][0], sum[i][c][1], sum[i][c][2], sum[i][c][3]);
        });
    }
    __syncthreads();
}

}  // namespace offload
