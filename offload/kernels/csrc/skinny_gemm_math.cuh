// How one warp multiplies its rows of the weight, which lie in shared memory, with the activations.
//
// Both forms read 16 bytes of a weight row at once and take the activations from registers, which
// were loaded a block of the depth earlier. `Fma` gives each lane a part of the depth and all rows:
// the SBI-GeMM form of the DeepSpeed Inference paper (arXiv 2207.00032, section III), good for up
// to 4 rows. `Mma` feeds the tensor cores with 16 weight rows as operand A and 8 activation rows as
// operand B. A dot product does not care for the order of its terms, so the 8 elements of one
// 16-byte read serve as a lane's elements of two products, though they are not the columns that
// the instruction calls them, and the activations are read alike.
#pragma once
#include "common.cuh"
#include "tensor_core.cuh"

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

template <typename Element, int kMostRows, int kWeightRows>
struct Fma {
    using T = Element;
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

template <typename Element, int kMostRows, int kWeightRows>
struct Mma {
    using T = Element;
    static_assert(sizeof(T) == 2 && kMostRows % 8 == 0 && kWeightRows % 16 == 0, "m16n8k16");
    static constexpr int kRows = kMostRows;
    static constexpr int kTile = kWeightRows;
    static constexpr int kGroups = kTile / 16;
    static constexpr int kColumns = kRows / 8;
    static constexpr int kBlock = 128 / kColumns;
    static constexpr int kSteps = kBlock / 32;
    static constexpr int kLoads = kColumns * kSteps;
    static constexpr int kValues = kGroups * kColumns * 4;
    static constexpr int kThreads = kTile > 16 ? 128 : 256;
    // Products that add to the same sums wait for each other: several sums, added at the end.
    static constexpr int kSets = kGroups * kColumns >= 4 ? 1 : 4 / (kGroups * kColumns);

    float sums[kSets][kGroups][kColumns][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kSets * kValues; ++i) (&sums[0][0][0][0])[i] = 0.f;
    }

    __device__ __forceinline__ static void load(uint4 (&x)[kLoads], const unsigned char* input,
                                                int64_t stride, int rows, int k, int depth,
                                                int lane) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int row = c * 8 + lane / 4;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                const int at = k + s * 32 + lane % 4 * 8;
                x[c * kSteps + s] =
                    load_or_zero(input + row * stride + at * static_cast<int64_t>(sizeof(T)),
                                 row < rows && at < depth);
            }
        }
    }

    // The tile's row (of the first 8) that stands as row lane / 4 of operand A. Rows 2q and 2q + 1
    // are read at the same time, 64 bytes each; 4 rows apart, at a pitch of 16 more than a multiple
    // of 128 bytes, they meet no bank twice.
    __device__ __forceinline__ static int weight_row(int lane) {
        const int g = lane / 4;
        return g / 2 + g % 2 * 4;
    }

    __device__ __forceinline__ void multiply(const unsigned char* stage, int pitch,
                                             const uint4 (&x)[kLoads], int lane) {
        const unsigned char* mine = stage + weight_row(lane) * pitch + lane % 4 * 16;
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
                const uint4 low = *reinterpret_cast<const uint4*>(mine + m * 16 * pitch + s * 64);
                const uint4 high =
                    *reinterpret_cast<const uint4*>(mine + (m * 16 + 8) * pitch + s * 64);
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const uint4 b = x[c * kSteps + s];
                    multiply_tile(sums[2 * s % kSets][m][c], low.x, high.x, low.y, high.y, b.x, b.y,
                                  T());
                    multiply_tile(sums[(2 * s + 1) % kSets][m][c], low.z, high.z, low.w, high.w,
                                  b.z, b.w, T());
                }
            }
    }

    __device__ __forceinline__ void totals(float (&v)[kValues], int) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            v[i] = (&sums[0][0][0][0])[i];
#pragma unroll
            for (int set = 1; set < kSets; ++set) v[i] += (&sums[set][0][0][0])[i];
        }
    }

    __device__ __forceinline__ static Place place(int i, int lane) {
        const int m = i / 4 / kColumns, c = i / 4 % kColumns, part = i % 4;
        return {c * 8 + lane % 4 * 2 + part % 2, m * 16 + part / 2 * 8 + weight_row(lane), true};
    }

    // Rows 8 to 15 of a group are the up rows of rows 0 to 7.
    __device__ __forceinline__ static float up(const float (&v)[kValues], int i) {
        return v[(i + 2) % kValues];
    }
};

}  // namespace offload
