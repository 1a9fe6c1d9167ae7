// A few rows of activations times a quantised weight in panels (offload/kernels/panels.py): int4
// and int8 codes in the order of the tensor cores' operands, one scale a row or a group.
//
// Weights are the 16-row operand at any number of rows: a scalar form has no issue slots left for
// more than one. A bundle is two tiles of 16 rows of the weight, neighbours or a gate's and its
// up's, that share the activations' way out of shared memory; a chunk is 512 bytes of a tile, 16 a
// lane; a piece is some chunks of a bundle, one stage of a warp's ring.
//
// A block has some bundles and all of their depth (a cluster's blocks share it out), and each of
// its warps an equal share of their pieces, in the order in which they lie: a plain stream that
// crosses from bundle to bundle, with no barrier between. What a warp sums up of a bundle goes to a
// place of its own in shared memory; at the end the places of each bundle are added in order,
// across the blocks of a cluster too: results repeat bit for bit.
//
// The activations lie in shared memory, read by all warps. What the codes' offset or zero points
// take away, times the sums of activations, is a product of the tensor cores too: of up to 8 rows
// in the loop, so that no pass over the activations stands between their coming and the first
// product. With programmatic dependent launch the first pieces are under way before the kernel
// waits for the one before it; the others are asked for behind the activations.
#pragma once
#include "async_copy.cuh"
#include "quant_codes.cuh"
#include "quant_gemm_inputs.cuh"
#include "quant_gemm_sums.cuh"
#include "quant_gemm_work.cuh"

namespace offload {

// Ends what a warp asks for at a time, where copies are counted.
__device__ __forceinline__ void commit_ring() {
#ifndef OFFLOAD_HAS_BULK_COPY
    commit_copies();
#endif
}

template <typename T, int kBits, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    quant_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                      const __grid_constant__ QuantPlan p) {
    using Code = Codes<T, kBits>;
    using Zero = std::conditional_t<kBits == 4, uint8_t, uint16_t>;  // those of two rows
    constexpr int kHalves = Shape::kHalves, kColumns = Shape::kColumns, kTiles = Shape::kTiles;
    constexpr int kPieceChunks = Shape::kPieceChunks, kStages = Shape::kStages;
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int row = lane / 4, quarter = lane % 4;
    let_next_kernel_begin();
    const QuantWork<Shape> work(p, static_cast<int>(blockIdx.x));
    const QuantShares shares = work.shares();
    const int begin = shares.begin(warp), count = shares.count(warp);
    int bundle = quotient(begin, work.pieces);
    int chunk = (begin - bundle * work.pieces) * kPieceChunks;

    // What is asked for: codes into the warp's ring, scales and zeros into registers, a quarter's
    // lanes those of a chunk.
    unsigned char* const ring = shared + p.rings_at + warp * Shape::kRingBytes;
    const uint32_t ring_at = shared_address(ring);
    const uint32_t barriers = shared_address(shared + p.rings_at) +
                              Shape::kWarps * Shape::kRingBytes + warp * (kStages * 8);
    const uint32_t inputs_barrier = shared_address(shared + p.barrier_at);
    const uint64_t policy = evict_first_policy();
    struct Scales {
        uint32_t scales[kTiles][kHalves], zeros[kTiles][kHalves];
    } scales[kStages] = {};
    int ahead_left = count, ahead_bundle = bundle, ahead_chunk = chunk;
    const uint4* codes_of[kTiles];
    const uint32_t* scales_of[kTiles];
    const Zero* zeros_of[kTiles];
    auto enter_bundle = [&] {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            const int64_t tile = work.tile(a, p, min(ahead_bundle, work.bundles - 1), m);
            codes_of[m] = static_cast<const uint4*>(a.codes) + (tile * p.chunks + work.chunk0) * 32;
            scales_of[m] = static_cast<const uint32_t*>(a.scale) + tile * p.groups * 8 + row;
            zeros_of[m] = static_cast<const Zero*>(a.zero) + tile * p.groups * 8 + row;
        }
    };
    auto fetch = [&](int stage, auto zeros) {
        if (ahead_left == 0) {
            commit_ring();
            return;
        }
        --ahead_left;
        const int there = min(kPieceChunks, work.chunks - ahead_chunk);
        const uint32_t to = ring_at + stage * Shape::kStageBytes;
#ifdef OFFLOAD_HAS_BULK_COPY
        if (elect_one()) {
            barrier_expect(barriers + stage * 8, there * (kTiles * 512));
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
                copy_bulk(to + m * (kPieceChunks * 512), codes_of[m] + ahead_chunk * 32,
                          there * 512, barriers + stage * 8, policy);
        }
#else
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int i = 0; i < kPieceChunks; ++i)
                if (i < there)
                    copy_async16(to + (m * kPieceChunks + i) * 512 + lane * 16,
                                 codes_of[m] + (ahead_chunk + i) * 32 + lane, policy);
        commit_ring();
#endif
        const int mine = work.chunk0 + min(ahead_chunk + quarter % kPieceChunks, work.chunks - 1);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                const int group = (kHalves == 2 ? mine * 2 + h : mine >> p.group_shift) * 8;
                scales[stage].scales[m][h] = scales_of[m][group];
                if (decltype(zeros)::value) scales[stage].zeros[m][h] = zeros_of[m][group];
            }
        ahead_chunk += kPieceChunks;
        if (ahead_chunk >= work.chunks) {
            ahead_chunk = 0;
            ++ahead_bundle;
            enter_bundle();
        }
    };

    auto ask_for_inputs = [&] {
#ifdef OFFLOAD_HAS_BULK_COPY
#pragma unroll 1
        for (int r = warp; r < a.rows; r += Shape::kWarps)
            if (elect_one())
                copy_bulk(shared_address(shared) + r * p.input_pitch,
                          static_cast<const uint16_t*>(a.input) + r * a.input_stride +
                              work.chunk0 * Shape::kChunkDepth,
                          work.chunks * Shape::kChunkInputs, inputs_barrier);
#else
        const int in_row = work.chunks * (Shape::kChunkDepth / 8);  // copies of 16 bytes
        for (int i = thread; i < a.rows * in_row; i += Shape::kThreads) {
            const int r = quotient(i, in_row), at = i - r * in_row;
            copy_async16_or_zero(shared_address(shared) + r * p.input_pitch + at * 16,
                                 static_cast<const uint16_t*>(a.input) + r * a.input_stride +
                                     work.chunk0 * Shape::kChunkDepth + at * 8,
                                 true);
        }
        commit_copies();
#endif
    };
    auto wait_for_inputs = [&] {
#ifdef OFFLOAD_HAS_BULK_COPY
        barrier_wait(inputs_barrier, 0);
#else
        wait_for_copies(kStages - Shape::kEarlyStages);
        __syncthreads();
#endif
    };
    unsigned char* inputs_of[kColumns];  // columns without a row have the last one's
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        inputs_of[c] = shared + min(c * 8 + row, a.rows - 1) * p.input_pitch + quarter * 16;

    auto run = [&](auto zeros) {
        constexpr bool kZeros = decltype(zeros)::value;
        // Only the weight is sure to be there before the kernel ahead has ended.
        enter_bundle();
#ifdef OFFLOAD_HAS_BULK_COPY
        if (lane < kStages) barrier_init(barriers + lane * 8, 1);
        if (thread == 0) {
            barrier_init(inputs_barrier, 1);
            barrier_expect(inputs_barrier, a.rows * work.chunks * Shape::kChunkInputs);
        }
        fence_before_bulk_copies();
        __syncwarp();
#endif
#pragma unroll
        for (int stage = 0; stage < Shape::kEarlyStages; ++stage) fetch(stage, zeros);
        for (int b = thread; b < work.bundles; b += Shape::kThreads)
            reinterpret_cast<int*>(shared + p.warps_at)[b] = work.warps_of(b);
        __syncthreads();  // the barrier of the activations is there
        wait_for_previous_kernel();
        ask_for_inputs();
#pragma unroll
        for (int stage = Shape::kEarlyStages; stage < kStages; ++stage) fetch(stage, zeros);
        const typename QuantSums<Shape>::template First<T> ending(a, p, work, shared);
        wait_for_inputs();
        if constexpr (Shape::kSummedUp) sum_up<T, kBits, Shape>(a, p, work.chunks, shared);
        [[maybe_unused]] const float4* const starts =
            reinterpret_cast<const float4*>(shared + p.starts_at) + quarter;

        float sums[kTiles][kColumns][4] = {};
        auto multiply = [&](int stage) {
            const uint4* const codes =
                reinterpret_cast<const uint4*>(ring + stage * Shape::kStageBytes) + lane;
            const Scales& at = scales[stage];
#pragma unroll
            for (int i = 0; i < kPieceChunks; ++i) {
                // Of up to 8 rows there is no branch around what a bundle's last piece lacks, so
                // that chunks overlap; of more there are no registers for that.
                const bool there = chunk + i < work.chunks;
                if (kColumns > 1 && i > 0 && !there) break;
                uint4 words[kTiles];
#pragma unroll
                for (int m = 0; m < kTiles; ++m) words[m] = codes[(m * kPieceChunks + i) * 32];
#pragma unroll
                for (int h = 0; h < kHalves; ++h) {
                    const int half = min(chunk + i, work.chunks - 1) * kHalves + h;
                    // The sums of activations, times -kMiddle.
                    float middle[kColumns][4] = {}, sum[kTiles][kColumns][4] = {};
                    uint4 x[kColumns][Shape::kLoads];
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        if constexpr (Shape::kSummedUp) {
                            const float4 start = starts[(half * kColumns + c) * 4];
                            middle[c][0] = start.x;
                            middle[c][1] = start.y;
                            middle[c][2] = start.z;
                            middle[c][3] = start.w;
                        }
#pragma unroll
                        for (int l = 0; l < Shape::kLoads; ++l) {
                            const uint4 stored = *reinterpret_cast<const uint4*>(
                                inputs_of[c] + (half * Shape::kLoads + l) * 64);
                            x[c][l] = Shape::kSummedUp ? stored : Code::enlarge(stored);
                            if constexpr (!Shape::kSummedUp)
#pragma unroll
                                for (int j = 0; j < 2; ++j)
                                    multiply_tile(middle[c], Code::kMinusFirst, Code::kMinusSecond,
                                                  Code::kMinusFirst, Code::kMinusSecond,
                                                  j ? x[c][l].z : x[c][l].x,
                                                  j ? x[c][l].w : x[c][l].y, T());
                        }
                    }
                    if (!kZeros)
#pragma unroll
                        for (int m = 0; m < kTiles; ++m)
#pragma unroll
                            for (int c = 0; c < kColumns; ++c)
#pragma unroll
                                for (int q = 0; q < 4; ++q) sum[m][c][q] = middle[c][q];
#pragma unroll
                    for (int l = 0; l < Shape::kLoads; ++l)
#pragma unroll
                        for (int m = 0; m < kTiles; ++m)
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                uint32_t w[4];
                                Code::operand(words[m], (h * Shape::kLoads + l) * 2 + j, w);
#pragma unroll
                                for (int c = 0; c < kColumns; ++c)
                                    multiply_tile(sum[m][c], w[0], w[1], w[2], w[3],
                                                  j ? x[c][l].z : x[c][l].x,
                                                  j ? x[c][l].w : x[c][l].y, T());
                            }
#pragma unroll
                    for (int m = 0; m < kTiles; ++m) {
                        const uint32_t both =
                            __shfl_sync(0xffffffffu, at.scales[m][h], row * 4 + i);
                        const float first = scale_in(both, false, T());
                        const float second = scale_in(both, true, T());
                        float zero_points[2] = {};  // in units of kMiddle
                        if (kZeros) {
                            const uint32_t zero =
                                __shfl_sync(0xffffffffu, at.zeros[m][h], row * 4 + i);
                            constexpr float kUnit = 1.f / Code::kMiddle;
                            zero_points[0] = static_cast<float>(zero & ((1u << kBits) - 1)) * kUnit;
                            zero_points[1] = static_cast<float>(zero >> kBits) * kUnit;
                        }
                        if (!there) continue;
#pragma unroll
                        for (int c = 0; c < kColumns; ++c)
#pragma unroll
                            for (int q = 0; q < 4; ++q) {
                                float s = sum[m][c][q];
                                if (kZeros) s += zero_points[q / 2] * middle[c][q];
                                sums[m][c][q] += (q / 2 ? second : first) * s;
                            }
                    }
                }
            }
        };

        auto end_bundle = [&] {
            QuantSums<Shape>::store(
                shared + p.sums_at + (warp + bundle) * QuantSums<Shape>::bytes(a.rows), a.rows,
                sums);
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int c = 0; c < kColumns; ++c)
#pragma unroll
                    for (int q = 0; q < 4; ++q) sums[m][c][q] = 0.f;
        };

        uint32_t parity = 0;
        for (int i = 0; i < count; i += kStages, parity ^= 1) {
#pragma unroll
            for (int stage = 0; stage < kStages; ++stage) {
                if (i + stage >= count) break;
#ifdef OFFLOAD_HAS_BULK_COPY
                barrier_wait(barriers + stage * 8, parity);
#else
                wait_for_copies(kStages - 1);
#endif
                multiply(stage);
                __syncwarp();
                fetch(stage, zeros);
                chunk += kPieceChunks;
                if (chunk >= work.chunks || i + stage + 1 == count) {
                    end_bundle();
                    chunk = 0;
                    ++bundle;
                }
            }
        }
        wait_for_copies(0);

        __syncthreads();
        QuantSums<Shape>::template finish<T, kBits>(a, p, work, shared, ending);
    };
    if (a.zero)
        run(std::true_type());
    else
        run(std::false_type());
#ifdef OFFLOAD_HAS_CLUSTERS
    if (p.cluster > 1) {
        cluster_arrive();  // shared memory stays until all have read it
        cluster_wait();
    }
#endif
}

}  // namespace offload
