// What the warps of quant_gemm.cuh have summed up of their bundles: each has a place in shared
// memory for each of its bundles, and at the end the places of a bundle are added in order, across
// the blocks of a cluster too, and written out as outputs.
//
// Two forms, each where it was quicker on an H200: RowSums, one output a thread, for up to 8 rows
// (1 us a launch at 1 row), and LaneSums, 8 outputs a lane as it holds them, for more (3 us at 16).
#pragma once
#include <type_traits>

#include "cluster.cuh"
#include "quant_codes.cuh"
#include "quant_gemm_work.cuh"

namespace offload {

template <typename T>
__device__ __forceinline__ void finish_output(const OffloadQuantGemm& a, int n, int r, float gate,
                                              float up) {
    const T* bias = static_cast<const T*>(a.bias);
    const T* residual = static_cast<const T*>(a.residual);
    float y = activate(gate + (bias ? to_float(bias[n]) : 0.f), a.activation);
    if (a.gated) y *= up + (bias ? to_float(bias[n + a.outputs]) : 0.f);
    if (residual) y += to_float(residual[r * a.residual_stride + n]);
    static_cast<T*>(a.output)[r * a.output_stride + n] = from_float<T>(y);
}

// Of each row the bundle's 32 sums.
template <typename Shape>
struct RowSums {
    static constexpr int kPitch = 36;  // floats from row to row: a warp meets no bank twice
    static __host__ __device__ constexpr int bytes(int rows) { return rows * kPitch * 4; }

    static __device__ __forceinline__ void store(unsigned char* place, int rows,
                                                 const float (&sums)[Shape::kTiles][1][4]) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        float* const to = reinterpret_cast<float*>(place) + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = lane % 4 * 2 + i;
            if (r < rows)
#pragma unroll
                for (int m = 0; m < Shape::kTiles; ++m) {
                    to[r * kPitch + m * 16] = sums[m][0][i];
                    to[r * kPitch + m * 16 + 8] = sums[m][0][2 + i];
                }
        }
    }

    // `count` places' sum, in order.
    static __device__ __forceinline__ float add_up(const float* at, int pitch, int count) {
        constexpr int kAtOnce = 4;
        float sum = 0.f;
#pragma unroll 1
        for (int w = 0; w < count; w += kAtOnce) {
            float x[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) x[i] = w + i < count ? at[(w + i) * pitch] : 0.f;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) sum += x[i];
        }
        return sum;
    }

    template <typename T, int kBits>
    static __device__ __forceinline__ void finish(const OffloadQuantGemm& a, const QuantPlan& p,
                                                  const QuantWork<Shape>& work,
                                                  unsigned char* shared) {
        using Code = Codes<T, kBits>;
        const int thread = static_cast<int>(threadIdx.x);
        const int* const warps = reinterpret_cast<const int*>(shared + p.warps_at);
        float* const places = reinterpret_cast<float*>(shared + p.sums_at);
        const int pitch = a.rows * kPitch;
#ifdef OFFLOAD_HAS_CLUSTERS
        if (p.cluster > 1) {
            for (int i = thread; i < work.bundles * a.rows * 32; i += Shape::kThreads) {
                const int b = quotient(i / 32, a.rows), r = i / 32 - b * a.rows;
                float* const at = places + (first_warp(warps[b]) + b) * pitch + r * kPitch + i % 32;
                *at = add_up(at, pitch, count_warps(warps[b]));
            }
            cluster_arrive();
            cluster_wait();
        }
#endif
        const int width = a.gated ? 4 : 5;  // log2 of a bundle's outputs
        const int outputs = work.bundles * a.rows << width;
#pragma unroll 1
        for (int i = work.rank * Shape::kThreads + thread; i < outputs;
             i += p.cluster * Shape::kThreads) {
            const int o = i & ((1 << width) - 1), b = quotient(i >> width, a.rows);
            const int r = (i >> width) - b * a.rows;
            float sum = 0.f, up = 0.f;
#ifdef OFFLOAD_HAS_CLUSTERS
            if (p.cluster > 1) {
                for (int rank = 0; rank < p.cluster; ++rank) {
                    QuantWork<Shape> theirs = work;
                    theirs.at_rank(p, rank);
                    const int place = first_warp(theirs.warps_of(b)) + b;
                    const float* const at = places + place * pitch + r * kPitch + o;
                    sum += load_from_block(at, rank);
                    if (a.gated) up += load_from_block(at + 16, rank);
                }
            } else
#endif
            {
                const int count = count_warps(warps[b]);
                const float* const at =
                    places + (first_warp(warps[b]) + b) * pitch + r * kPitch + o;
                sum = add_up(at, pitch, count);
                if (a.gated) up = add_up(at + 16, pitch, count);
            }
            const int n = ((work.first + b) << width) + o;
            const float times = o & 8 ? Code::kSecond : Code::kFirst;
            if (n < p.tiles * 16) finish_output<T>(a, n, r, sum * times, up * times);
        }
    }
};

// Of each tile and 8 rows what the 32 lanes hold, 4 sums each.
template <typename Shape>
struct LaneSums {
    static constexpr int kTiles = Shape::kTiles, kColumns = Shape::kColumns;
    static __host__ __device__ constexpr int bytes(int) { return kTiles * kColumns * 512; }

    static __device__ __forceinline__ void store(unsigned char* place, int,
                                                 const float (&sums)[kTiles][kColumns][4]) {
        float4* to = reinterpret_cast<float4*>(place) + threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int c = 0; c < kColumns; ++c, to += 32) {
                const float (&s)[4] = sums[m][c];
                *to = make_float4(s[0], s[1], s[2], s[3]);
            }
    }

    static __device__ __forceinline__ void add(float (&sum)[4], const float4& x) {
        sum[0] += x.x;
        sum[1] += x.y;
        sum[2] += x.z;
        sum[3] += x.w;
    }

    // The sums of 8 rows of a bundle that a block's warps have.
    static __device__ __forceinline__ void add_warps(const float4* places, int bundle, int warps,
                                                     float (&sum)[kTiles][4]) {
        const int first = first_warp(warps), last = first + count_warps(warps) - 1;
        constexpr int kAtOnce = 4;
        for (int w = first; w <= last; w += kAtOnce) {
            float4 x[kAtOnce][kTiles];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
                    x[i][m] = w + i <= last
                                  ? places[((w + i + bundle) * kTiles + m) * kColumns * 32]
                                  : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int m = 0; m < kTiles; ++m) add(sum[m], x[i][m]);
        }
    }

    // A warp has 8 rows of a bundle at a time.
    template <typename T, int kBits>
    static __device__ __forceinline__ void finish(const OffloadQuantGemm& a, const QuantPlan& p,
                                                  const QuantWork<Shape>& work,
                                                  unsigned char* shared) {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int lane = static_cast<int>(threadIdx.x) % 32, columns = (a.rows + 7) / 8;
        const int* const warps = reinterpret_cast<const int*>(shared + p.warps_at);
        float4* const places = reinterpret_cast<float4*>(shared + p.sums_at) + lane;
#ifdef OFFLOAD_HAS_CLUSTERS
        if (p.cluster > 1) {
            for (int item = warp; item < work.bundles * columns; item += Shape::kWarps) {
                const int b = quotient(item, columns), c = item - b * columns;
                float sum[kTiles][4] = {};
                add_warps(places + c * 32, b, warps[b], sum);
#pragma unroll
                for (int m = 0; m < kTiles; ++m)
                    places[(((first_warp(warps[b]) + b) * kTiles + m) * kColumns + c) * 32] =
                        make_float4(sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
            }
            cluster_arrive();
            cluster_wait();
        }
#endif
        for (int item = work.rank * Shape::kWarps + warp; item < work.bundles * columns;
             item += p.cluster * Shape::kWarps) {
            const int b = quotient(item, columns), c = item - b * columns;
            float sum[kTiles][4] = {};  // of two tiles, or of gate and up
#ifdef OFFLOAD_HAS_CLUSTERS
            if (p.cluster > 1) {
                constexpr int kAtOnce = 4;
                for (int rank = 0; rank < p.cluster; rank += kAtOnce) {
                    float4 x[kAtOnce][kTiles];
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) {
                        QuantWork<Shape> theirs = work;
                        theirs.at_rank(p, rank + i);
                        const int place = first_warp(theirs.warps_of(b)) + b;
#pragma unroll
                        for (int m = 0; m < kTiles; ++m)
                            x[i][m] = rank + i < p.cluster
                                          ? load_from_block(
                                                places + ((place * kTiles + m) * kColumns + c) * 32,
                                                rank + i)
                                          : make_float4(0.f, 0.f, 0.f, 0.f);
                    }
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                        for (int m = 0; m < kTiles; ++m) add(sum[m], x[i][m]);
                }
            } else
#endif
                add_warps(places + c * 32, b, warps[b], sum);
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                const int tile = a.gated ? work.first + b : (work.first + b) * kTiles + m;
                if ((a.gated && m > 0) || tile >= p.tiles) break;
                const float (&up)[4] = sum[kTiles - 1];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int n = tile * 16 + i / 2 * 8 + lane / 4,
                              r = c * 8 + lane % 4 * 2 + i % 2;
                    const float times = i / 2 ? Codes<T, kBits>::kSecond : Codes<T, kBits>::kFirst;
                    if (r < a.rows) finish_output<T>(a, n, r, sum[m][i] * times, up[i] * times);
                }
            }
        }
    }
};

template <typename Shape>
using QuantSums = std::conditional_t<Shape::kColumns == 1, RowSums<Shape>, LaneSums<Shape>>;

}  // namespace offload
