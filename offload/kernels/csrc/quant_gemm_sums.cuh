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

// What is added to output n of row r: 0 where there is no such thing.
template <typename T>
struct Added {
    T bias = T(0.f), up_bias = T(0.f), residual = T(0.f);
    Added() = default;

    __device__ __forceinline__ Added(const OffloadQuantGemm& a, int n, int r) {
        const T* const biases = static_cast<const T*>(a.bias);
        if (biases) bias = biases[n];
        if (biases && a.gated) up_bias = biases[n + a.outputs];
        if (a.residual) residual = static_cast<const T*>(a.residual)[r * a.residual_stride + n];
    }
};

template <typename T>
__device__ __forceinline__ void write_output(const OffloadQuantGemm& a, T* output, float gate,
                                             float up, const Added<T>& added) {
    float y = activate(gate + to_float(added.bias), a.activation);
    if (a.gated) y *= up + to_float(added.up_bias);
    if (a.residual) y += to_float(added.residual);
    *output = from_float<T>(y);
}

template <typename T>
__device__ __forceinline__ void write_output(const OffloadQuantGemm& a, int n, int r, float gate,
                                             float up) {
    write_output(a, static_cast<T*>(a.output) + r * a.output_stride + n, gate, up,
                 Added<T>(a, n, r));
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
        for (; count > 0; count -= kAtOnce, at += kAtOnce * pitch) {
            float x[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) x[i] = i < count ? at[i * pitch] : 0.f;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) sum += x[i];
        }
        return sum;
    }

    // A block's output i: column o of bundle b, row r.
    struct Output {
        int o, b, r;

        __device__ __forceinline__ Output(const OffloadQuantGemm& a, int i) {
            const int width = a.gated ? 4 : 5;  // log2 of a bundle's outputs
            o = i & ((1 << width) - 1);
            b = quotient(i >> width, a.rows);
            r = (i >> width) - b * a.rows;
        }
        __device__ __forceinline__ int number(const OffloadQuantGemm& a,
                                              const QuantWork<Shape>& work) const {
            return ((work.first + b) << (a.gated ? 4 : 5)) + o;
        }
        // Where the first warp's sum lies, in floats.
        __device__ __forceinline__ int place(int rows, int warp) const {
            return ((warp + b) * rows + r) * kPitch + o;
        }
    };

    // Of a thread's first output what can be looked up while it waits for activations, for few
    // threads have another one.
    template <typename T>
    struct First {
        int place = 0, count = 0;  // of its sums
        T* output = nullptr;
        Added<T> added;

        __device__ __forceinline__ First(const OffloadQuantGemm& a, const QuantPlan& p,
                                         const QuantWork<Shape>& work,
                                         const unsigned char* shared) {
            const Output at(a, static_cast<int>(threadIdx.x));
            const int n = at.number(a, work);
            if (p.cluster > 1 || at.b >= work.bundles || n >= p.tiles * 16) return;
            const int warps = reinterpret_cast<const int*>(shared + p.warps_at)[at.b];
            place = at.place(a.rows, first_warp(warps));
            count = count_warps(warps);
            output = static_cast<T*>(a.output) + at.r * a.output_stride + n;
            added = Added<T>(a, n, at.r);
        }
    };

    template <typename T, int kBits>
    static __device__ __forceinline__ void finish(const OffloadQuantGemm& a, const QuantPlan& p,
                                                  const QuantWork<Shape>& work,
                                                  unsigned char* shared, const First<T>& first) {
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
        const auto add_places = [&](int place, int count, float& sum, float& up) {
            sum = add_up(places + place, pitch, count);
            if (a.gated) up = add_up(places + place + 16, pitch, count);
        };
        const float times = thread & 8 ? Code::kSecond : Code::kFirst;  // of all of its outputs
        const int outputs = work.bundles * a.rows << (a.gated ? 4 : 5);
        int begin = work.rank * Shape::kThreads + thread;
        if (p.cluster == 1) {
            if (first.count) {
                float sum, up = 0.f;
                add_places(first.place, first.count, sum, up);
                write_output(a, first.output, sum * times, up * times, first.added);
            }
            begin += Shape::kThreads;
        }
#pragma unroll 1
        for (int i = begin; i < outputs; i += p.cluster * Shape::kThreads) {
            const Output output(a, i);
            const int b = output.b, n = output.number(a, work);
            if (n >= p.tiles * 16) continue;
            float sum = 0.f, up = 0.f;
#ifdef OFFLOAD_HAS_CLUSTERS
            if (p.cluster > 1) {
                for (int rank = 0; rank < p.cluster; ++rank) {
                    QuantWork<Shape> theirs = work;
                    theirs.at_rank(p, rank);
                    const float* const at =
                        places + output.place(a.rows, first_warp(theirs.warps_of(b)));
                    sum += load_from_block(at, rank);
                    if (a.gated) up += load_from_block(at + 16, rank);
                }
            } else
#endif
                add_places(output.place(a.rows, first_warp(warps[b])), count_warps(warps[b]), sum,
                           up);
            write_output<T>(a, n, output.r, sum * times, up * times);
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

    template <typename T>
    struct First {  // nothing is looked up ahead
        __device__ __forceinline__ First(const OffloadQuantGemm&, const QuantPlan&,
                                         const QuantWork<Shape>&, const unsigned char*) {}
    };

    // A warp has 8 rows of a bundle at a time.
    template <typename T, int kBits>
    static __device__ __forceinline__ void finish(const OffloadQuantGemm& a, const QuantPlan& p,
                                                  const QuantWork<Shape>& work,
                                                  unsigned char* shared, const First<T>&) {
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
                    if (r < a.rows) write_output<T>(a, n, r, sum[m][i] * times, up[i] * times);
                }
            }
        }
    }
};

template <typename Shape>
using QuantSums = std::conditional_t<Shape::kColumns == 1, RowSums<Shape>, LaneSums<Shape>>;

}  // namespace offload
