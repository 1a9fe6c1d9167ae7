// How one warp multiplies its rows of a float32 weight, which lie in shared memory, with the
// activations, and how elements of 16 bits become float32.
//
// Each lane has a part of the depth and all rows: the SBI-GeMM form of the DeepSpeed Inference
// paper (arXiv 2207.00032, section III). It reads 16 bytes of a weight row at once and takes the
// activations from registers, which were loaded a block of the depth earlier.
#pragma once
#include "common.cuh"

namespace offload {

__device__ __forceinline__ void unpack(uint4 raw, float (&to)[8], __nv_bfloat16) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void unpack(uint4 raw, float (&to)[8], __half) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ void unpack(uint4 raw, float (&to)[4], float) {
    to[0] = __uint_as_float(raw.x);
    to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z);
    to[3] = __uint_as_float(raw.w);
}

// 16 bytes at p, in global or shared memory, or zeros.
__device__ __forceinline__ uint4 load_or_zero(const void* p, bool there) {
    return there ? *static_cast<const uint4*>(p) : make_uint4(0, 0, 0, 0);
}

// Sums kCount values over the warp's lanes. Lane l then holds value l / (32 / kCount) in `v[0]`;
// with more than 32 values v[i] is value 32 * i + l. Each step halves the values a lane is left
// with, so 32 of them cost 31 shuffles instead of 160. The order of additions is fixed.
template <int kCount>
__device__ __forceinline__ void sum_over_lanes(float (&v)[kCount], int lane) {
    constexpr int kGroup = kCount < 32 ? kCount : 32;
#pragma unroll
    for (int group = 0; group < kCount / kGroup; ++group) {
        float* w = v + group * kGroup;
#pragma unroll
        for (int step = 16, left = kGroup; step > 0; step >>= 1) {
            if (left > 1) {
                left >>= 1;
                const bool upper = lane & step;
#pragma unroll
                for (int i = 0; i < kGroup / 2; ++i) {
                    if (i >= left) break;
                    const float keep = upper ? w[i + left] : w[i];
                    const float send = upper ? w[i] : w[i + left];
                    w[i] = keep + __shfl_xor_sync(0xffffffffu, send, step);
                }
            } else {
                w[0] += __shfl_xor_sync(0xffffffffu, w[0], step);
            }
        }
        v[group] = w[0];
    }
}

// Where a value that a lane ends with belongs.
struct Place {
    int row;     // of the activations
    int weight;  // row of the warp's tile
    bool mine;   // false where another lane holds the same value
};

template <int kMostRows, int kWeightRows>
struct Fma {
    using T = float;
    static constexpr int kRows = kMostRows;
    static constexpr int kTile = kWeightRows;
    static constexpr int kWidth = 16 / sizeof(T);
    static constexpr int kBlock = 32 * kWidth;  // of the depth, at once
    static constexpr int kLoads = kRows;        // 16-byte loads of activations a block
    static constexpr int kTotals = kTile * kRows;
    static constexpr int kValues = kTotals < 32 ? 1 : kTotals / 32;
    static constexpr int kThreads = kTotals > 16 ? 128 : 256;  // at most: what registers allow

    float sums[kTotals];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kTotals; ++i) sums[i] = 0.f;
    }

    __device__ __forceinline__ static void load(uint4 (&x)[kLoads], const unsigned char* input,
                                                int64_t stride, int rows, int k, int depth,
                                                int lane) {
        const int at = k + lane * kWidth;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            x[r] = load_or_zero(input + r * stride + at * static_cast<int64_t>(sizeof(T)),
                                r < rows && at < depth);
    }

    __device__ __forceinline__ void multiply(const unsigned char* stage, int pitch,
                                             const uint4 (&x)[kLoads], int lane) {
        float in[kRows][kWidth];
#pragma unroll
        for (int r = 0; r < kRows; ++r) unpack(x[r], in[r], T());
#pragma unroll
        for (int n = 0; n < kTile; ++n) {
            float w[kWidth];
            unpack(*reinterpret_cast<const uint4*>(stage + n * pitch + lane * 16), w, T());
#pragma unroll
            for (int i = 0; i < kWidth; ++i)
#pragma unroll
                for (int r = 0; r < kRows; ++r)
                    sums[n * kRows + r] = fmaf(w[i], in[r][i], sums[n * kRows + r]);
        }
    }

    __device__ __forceinline__ void totals(float (&v)[kValues], int lane) {
        sum_over_lanes(sums, lane);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] = sums[i];
    }

    __device__ __forceinline__ static Place place(int i, int lane) {
        constexpr int kShare = kTotals < 32 ? 32 / kTotals : 1;  // lanes with the same value
        const int value = i * 32 + lane / kShare;
        return {value % kRows, value / kRows, lane % kShare == 0};
    }

    // The value of the up row that belongs to the gate row of v[i]; all lanes call it.
    __device__ __forceinline__ static float up(const float (&v)[kValues], int i) {
        if constexpr (kValues == 1)
            return __shfl_xor_sync(0xffffffffu, v[0], 16);
        else
            return v[(i + kValues / 2) % kValues];
    }
};

}  // namespace offload
