// Rows of activations times a quantised weight in panels, on warpgroups (sm_90a).
//
// The weights are operand A, in registers, where codes become what a weight made whole would hold:
// code times scale, rounded once. The activations are operand B, in shared memory. A block has some
// tiles of 16 outputs, shared out to its warps, and all of their depth (a cluster's blocks share it
// out), which passes through a ring of stages: codes by bulk copies, and activations by way of the
// registers of four warps that do nothing else, since their order must be that of the panels'
// columns. Sums stay in registers to the end; then each block of a cluster gets those of its part
// of the outputs, and adds them up in order: results repeat bit for bit.
#pragma once
#include "quant_gemm_wide_operands.cuh"
#include "quant_gemm_wide_pieces.cuh"
#include "quant_gemm_wide_plan.cuh"
#include "quant_gemm_wide_stages.cuh"
#include "quant_gemm_wide_sums.cuh"
#include "warpgroup.cuh"

namespace offload {

#ifdef OFFLOAD_HAS_WARPGROUPS

// kAlone: fours of slots that the warpgroup has alone; kPair: it shares another one. Each case has
// code of its own, without branches: so the compiler converts further ahead.
template <typename T, int kBits, bool kZeros, int kAlone, bool kPair, typename Shape>
__device__ __forceinline__ void multiply_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                                const WideWork<Shape>& work,
                                                const WideShares<Shape>& shares,
                                                const unsigned char* shared, int warp, int lane,
                                                float (&sums)[Shape::kTiles][Shape::kColumns][4]) {
    using Zero = std::conditional_t<kBits == 4, uint8_t, uint16_t>;  // those of two rows
    constexpr int kTiles = kAlone + kPair, kHalves = Shape::kHalves, kColumns = Shape::kColumns;
    constexpr int kGroupSteps = Shape::kGroupSteps;
    const int row = lane / 4, quarter = lane % 4, g = warp / 4;
    const uint32_t barriers = shared_address(shared) + Shape::barriers_at(p);

    // Scales of a stage are asked for a stage ahead, by a quarter's lanes those of a chunk.
    const uint32_t* scales_of[kTiles];
    const Zero* zeros_of[kTiles];
    int codes_of[kTiles];  // in a stage
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        int slot = shares.slot(g, m) + warp % 4;
        if (!Shape::kMany) slot = min(slot, work.bundles * 2 - 1);  // stages have no more
        const int64_t tile = work.tile(a, p, slot);
        scales_of[m] = static_cast<const uint32_t*>(a.scale) + tile * p.groups * 8 + row;
        zeros_of[m] = static_cast<const Zero*>(a.zero) + tile * p.groups * 8 + row;
        codes_of[m] = Shape::kInputBytes + slot * Shape::kSlotBytes + lane * 16;
    }
    uint32_t next_scales[kTiles][kHalves], next_zeros[kTiles][kHalves];
    auto fetch_scales = [&](int stage) {
        const int in_block = stage * Shape::kStageChunks + quarter % Shape::kStageChunks;
        const bool there = in_block < work.chunks;  // else its codes are anything
        const int chunk = work.chunk0 + min(in_block, work.chunks - 1);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
            const int group = (kHalves == 2 ? chunk * 2 + h : chunk >> p.group_shift) * 8;
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                next_scales[m][h] = there ? scales_of[m][group] : 0;
                if (kZeros) next_zeros[m][h] = zeros_of[m][group];
            }
        }
    };
    fetch_scales(0);

    const uint64_t inputs = describe_pieces(shared_address(shared), kColumns * 128, 128);
    const int half = shares.half(g) * (Shape::kStageChunks / 2);
    uint32_t place = 0, parity = 0, last = 0;
    for (int stage = 0; stage < work.stages; ++stage) {
        uint32_t scales[kTiles][kHalves], zeros[kTiles][kHalves];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                scales[m][h] = next_scales[m][h];
                zeros[m][h] = kZeros ? next_zeros[m][h] : 0;
            }
        fetch_scales(stage + 1);
        barrier_wait(barriers + place * 8, parity);
        const unsigned char* const codes = shared + place * Shape::stage_bytes(p);
        const uint64_t stage_inputs = inputs + place * (Shape::stage_bytes(p) / 16);
        auto stage_before_is_read = [&] {
            if (stage > 0 && lane == 0) barrier_arrive(barriers + (Shape::kMostStages + last) * 8);
        };
        // Of the next chunk of a tile, asked for while one is converted.
        uint4 next_words;
        uint32_t next_scale[kHalves], next_zero[kHalves];
        auto fetch = [&](int i, int m) {
            next_words = *reinterpret_cast<const uint4*>(codes + codes_of[m] + i * 512);
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
                next_scale[h] = __shfl_sync(0xffffffffu, scales[m][h], row * 4 + i);
                next_zero[h] = kZeros ? __shfl_sync(0xffffffffu, zeros[m][h], row * 4 + i) : 0;
            }
        };
        constexpr int kOfPair = Shape::kStageChunks / 2, kWithout = Shape::kStageChunks * kAlone;
        constexpr int kAll = kWithout + (kPair ? kOfPair : 0);
        auto chunk_of = [&](int k) {
            return k < kWithout ? k / max(kAlone, 1) : k - kWithout + half;
        };
        auto tile_of = [](int k) { return k < kWithout ? k % max(kAlone, 1) : kAlone; };
        fetch(chunk_of(0), tile_of(0));
#pragma unroll
        for (int k = 0; k < kAll; ++k) {
            const int i = chunk_of(k), m = tile_of(k);
            const uint4 words = next_words;
            Rescale<T, kBits, kZeros> rescale[kHalves];
#pragma unroll
            for (int h = 0; h < kHalves; ++h)
                rescale[h] = Rescale<T, kBits, kZeros>(next_scale[h], next_zero[h]);
            if (k + 1 < kAll) fetch(chunk_of(k + 1), tile_of(k + 1));
#pragma unroll
            for (int j = 0; j < Shape::kSteps; j += kGroupSteps) {
                uint32_t w[kGroupSteps][4];
#pragma unroll
                for (int step = 0; step < kGroupSteps; ++step) {
                    make_operand<kBits>(words, j + step,
                                        rescale[(j + step) * kHalves / Shape::kSteps], w[step]);
                    settle(w[step]);
                }
                begin_products();
#pragma unroll
                for (int step = 0; step < kGroupSteps; ++step)
                    multiply_group(sums[m], w[step],
                                   stage_inputs + (i * Shape::kSteps + j + step) * (kColumns * 16),
                                   T());
                commit_products();
                wait_for_products<1>();
                if (k == 0 && j == 0) stage_before_is_read();
            }
        }
        last = place;
        if (++place == Shape::stages(p)) {
            place = 0;
            parity ^= 1;
        }
    }
    wait_for_products<0>();
}

// f of what a warpgroup has, known to the compiler.
template <typename Shape, int kAlone = 0, typename F>
__device__ __forceinline__ void with_share(const WideShares<Shape>& shares, int g, const F& f) {
    using Alone = std::integral_constant<int, kAlone>;
    if constexpr (kAlone < Shape::kTiles) {
        if (shares.alone(g) > kAlone) {
            with_share<Shape, kAlone + 1>(shares, g, f);
            return;
        }
        if (kAlone == 0 || shares.in_pair(g)) {
            f(Alone(), std::true_type());
            return;
        }
    }
    if constexpr (kAlone > 0) f(Alone(), std::false_type());
}

template <typename T, int kBits, bool kZeros, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    wide_gemm_kernel(const __grid_constant__ OffloadQuantGemm a,
                     const __grid_constant__ WidePlan p) {
    constexpr int kTiles = Shape::kTiles, kWarps = Shape::kWarps;
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // known to be the same for all
    const WideWork<Shape> work(p, static_cast<int>(blockIdx.x));
    const WideShares<Shape> shares(work);
    const int busy_warps = shares.busy_warps();
    const uint32_t barriers = shared_address(shared) + Shape::barriers_at(p);
    [[maybe_unused]] unsigned char* const parts_barrier_at =
        shared + Shape::barriers_at(p) + 2 * Shape::kMostStages * 8;
    [[maybe_unused]] const uint32_t parts_barrier = shared_address(parts_barrier_at);
    if constexpr (Shape::kMany) {
        if (warp == kWarps) {
            if (lane < 2 * Shape::kMostStages)
                barrier_init(barriers + lane * 8,
                             lane < Shape::kMostStages ? 1 + Shape::kInputWarps : busy_warps);
            fence_before_bulk_copies();
        }
    } else if (warp == kWarps && elect_one()) {  // no loop over lanes: the first copies wait for it
#pragma unroll
        for (int place = 0; place < Shape::kMostStages; ++place) {
            barrier_init(barriers + place * 8, 1 + Shape::kInputWarps);
            barrier_init(barriers + (Shape::kMostStages + place) * 8, busy_warps);
        }
        barrier_init(parts_barrier, 1);
        fence_new_barriers();
        fence_before_bulk_copies();
    }
    __syncthreads();
    let_next_kernel_begin();

    float* const parts = reinterpret_cast<float*>(shared + Shape::parts_at(p));
    [[maybe_unused]] const WidePlaces<Shape> pieces(a, p, work, shares);
    // Sums may be sent when all blocks of the cluster have begun, and, where stages become their
    // place, have read those.
    const bool apart = Shape::parts_at(p) > 0;
    if (p.cluster > 1 && apart) cluster_arrive_relaxed();
    auto wait_for_parts = [&] {
        if (p.cluster > 1) {
            if (!apart) cluster_arrive_relaxed();
            cluster_wait();
        } else if (!apart) {
            __syncthreads();
        }
    };
    if (warp >= kWarps) {
        keep_registers<Shape::kInputRegisters>();
        if (!Shape::kMany && p.cluster > 1 && warp == kWarps + 1 && elect_one())
            barrier_expect(parts_barrier, pieces.bytes(a.rows, p, work.rank, shares.paired));
        bring_stages<Shape>(a, p, work, shared, warp - kWarps, lane);
        wait_for_parts();
    } else {
        take_registers<Shape::kMultiplyRegisters>();
        if (warp >= busy_warps) {
            wait_for_parts();
        } else {
            float sums[kTiles][Shape::kColumns][4] = {};
            with_share<Shape>(shares, warp / 4, [&](auto alone, auto pair) {
                multiply_stages<T, kBits, kZeros, decltype(alone)::value, decltype(pair)::value>(
                    a, p, work, shares, shared, warp, lane, sums);
            });
            wait_for_parts();
            with_cluster(p.cluster_bits, [&](auto cluster) {
                constexpr int kCluster = decltype(cluster)::value;
                if constexpr (Shape::kMany)
                    send_sums<kCluster, Shape>(work, shares, parts, warp, lane, sums);
                else
                    send_pieces<kCluster>(a, work, shares, pieces, parts, parts_barrier_at, warp,
                                          lane, sums);
            });
        }
    }
    wait_for_previous_kernel();
    if constexpr (Shape::kMany) {
        if (p.cluster > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
        with_cluster(p.cluster_bits, [&](auto cluster) {
            write_outputs<decltype(cluster)::value, T, kBits, Shape>(a, p, work, shares, parts,
                                                                     warp, lane);
        });
    } else {
        with_cluster(p.cluster_bits, [&](auto cluster) {
            WideOutputs<decltype(cluster)::value, T, kBits, Shape> outputs(a, p, work, warp, lane);
            bool there = outputs.look_up(pieces);
            if (p.cluster > 1)
                barrier_wait(parts_barrier, 0);
            else
                __syncthreads();
            while (there) {
                outputs.write(shares, pieces, parts);
                there = outputs.look_up(pieces);
            }
        });
    }
}
#else
template <typename T, int kBits, bool kZeros, typename Shape>
__global__ void wide_gemm_kernel(const __grid_constant__ OffloadQuantGemm,
                                 const __grid_constant__ WidePlan) {}
#endif

}  // namespace offload
