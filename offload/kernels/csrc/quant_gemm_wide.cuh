// Many rows of activations times a quantised weight in panels, on warpgroups (sm_90a).
//
// The weights are operand A, in registers, where codes become what a weight made whole would hold:
// code times scale, rounded once. The activations are operand B, in shared memory. A block has some
// tiles of 16 outputs, shared out to its warps, and all of their depth (a cluster's blocks share it
// out), which passes through a ring of stages: codes by bulk copies, and activations by way of the
// registers of four warps that do nothing else, since their order must be that of the panels'
// columns. Sums stay in registers to the end, and are then added up across the cluster in order:
// results repeat bit for bit.
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "quant_gemm_work.cuh"
#include "tensor_core.cuh"
#include "warpgroup.cuh"

namespace offload {

struct WidePlan {
    int32_t cluster;                              // blocks that share out the depth
    int32_t bundles, longer_clusters;             // of a cluster; the first ones have one more
    int32_t chunks, block_chunks, longer_blocks;  // of a row; of a block, the first have one more
    int32_t tiles;                                // of 16 outputs
    int32_t groups, group_shift;                  // of a row; log2 of the chunks that share one
};

template <int kBits, int kHalves_, int kColumns_, int kTiles_, int kWarps_, int kStageChunks_,
          int kStages_>
struct WideShape {
    static constexpr int kHalves = kHalves_;                 // of a chunk, with scales of their own
    static constexpr int kColumns = kColumns_;               // of 8 rows of activations each
    static constexpr int kTiles = kTiles_;                   // of a warp
    static constexpr int kWarps = kWarps_, kInputWarps = 4;  // that multiply; that bring stages
    static constexpr int kThreads = (kWarps + kInputWarps) * 32;
    // A thread's registers, of those that multiply and of those that bring stages.
    static constexpr int kMultiplyRegisters = kWarps == 8 ? 216 : 104;
    static constexpr int kInputRegisters = kWarps == 8 ? 72 : 64;
    static constexpr int kChunkDepth = 4096 / kBits / 16;
    static constexpr int kSteps = kChunkDepth / 16;  // of a chunk
    static constexpr int kGroupSteps = 2;            // of a group of products
    static constexpr int kSlots = kWarps * kTiles;
    static constexpr int kStages = kStages_, kStageChunks = kStageChunks_;
    static constexpr int kStageDepth = kStageChunks * kChunkDepth;
    static constexpr int kInputBytes = kColumns * 16 * kStageDepth;  // of a stage
    static constexpr int kSlotBytes = kStageChunks * 512;
    static constexpr int kStageBytes = kInputBytes + kSlots * kSlotBytes;
    // Sums: 16 of a row, then those of the next row, without conflicts of banks.
    static constexpr int kRowFloats = 20, kTileFloats = kColumns * 8 * kRowFloats + 16;
    static constexpr int kPartsBytes = kSlots * kTileFloats * 4;
    static constexpr int kBarriersAt =
        kStages * kStageBytes > kPartsBytes ? kStages * kStageBytes : kPartsBytes;
    static constexpr int kShared = kBarriersAt + 2 * kStages * 8;
    static_assert(kWarps % 4 == 0, "whole warpgroups");
    static_assert(kStageChunks == 2 || kStageChunks == 4, "a lane of each quarter has scales");
    static_assert(kShared <= 232448, "what a block may have");
};

// Which part of the product a block has.
template <typename Shape>
struct WideWork {
    int rank, first, bundles;    // of outputs: two tiles each, neighbours or a gate's and its up's
    int chunk0, chunks, stages;  // of the depth

    __device__ __forceinline__ WideWork(const WidePlan& p, int block) {
        const int cluster = block / p.cluster;
        rank = block - cluster * p.cluster;
        first = cluster * p.bundles + min(cluster, p.longer_clusters);
        bundles = p.bundles + (cluster < p.longer_clusters);
        chunk0 = rank * p.block_chunks + min(rank, p.longer_blocks);
        chunks = p.block_chunks + (rank < p.longer_blocks);
        stages = (chunks + Shape::kStageChunks - 1) / Shape::kStageChunks;
    }

    // The tile of a slot: a warp's m-th slot is m * kWarps + warp. Behind the last, the last one.
    __device__ __forceinline__ int tile(const OffloadQuantGemm& a, const WidePlan& p,
                                        int slot) const {
        slot = min(slot, bundles * 2 - 1);
        return a.gated ? first + slot / 2 + slot % 2 * p.tiles : min(first * 2 + slot, p.tiles - 1);
    }
};

// A lane's scales and zero points of the two rows that it has of a tile, as operands.
template <typename T, int kBits, bool kZeros>
struct Rescale;

// Codes are operands as they are: numbers in steps of 2^-133, see quant_codes.cuh, those of int4's
// second row 16 times as large. The scale brings them to 2^-33 of what they stand for, which sums
// make good in the end: room for scales up to 2^27.
template <int kBits, bool kZeros>
struct Rescale<__nv_bfloat16, kBits, kZeros> {
    static constexpr float kUndo = 0x1p33f;
    uint32_t scale[2], offset[2];
    Rescale() = default;

    __device__ __forceinline__ Rescale(uint32_t scales, uint32_t zeros) {
        constexpr uint32_t kFirst = 0x71807180u;                              // 2^100
        constexpr uint32_t kSecond = kBits == 4 ? 0x6f806f80u : kFirst;       // 2^96
        constexpr uint32_t kMiddle = kBits == 4 ? 0xb080b080u : 0xb280b280u;  // -8, -128 * 2^-33
        const uint32_t pair[2] = {__byte_perm(scales, 0, 0x1010), __byte_perm(scales, 0, 0x3232)};
        scale[0] = multiply_add_pair(pair[0], kFirst, 0x80008000u, __nv_bfloat16());
        scale[1] = multiply_add_pair(pair[1], kSecond, 0x80008000u, __nv_bfloat16());
        if (kZeros) {
            const uint32_t first = zeros & ((1u << kBits) - 1);
            const uint32_t second = kBits == 4 ? zeros & 0xf0u : zeros >> 8;
            offset[0] = (first | 0x8000u) * 0x10001u;
            offset[1] = (second | 0x8000u) * 0x10001u;
        } else {
            offset[0] = multiply_add_pair(pair[0], kMiddle, 0x80008000u, __nv_bfloat16());
            offset[1] = multiply_add_pair(pair[1], kMiddle, 0x80008000u, __nv_bfloat16());
        }
    }

    __device__ __forceinline__ uint32_t apply(uint32_t codes, int second) const {
        if (!kZeros)
            return multiply_add_pair(codes, scale[second], offset[second], __nv_bfloat16());
        const uint32_t x = multiply_add_pair(codes, 0x3f803f80u, offset[second], __nv_bfloat16());
        return multiply_add_pair(x, scale[second], 0x80008000u, __nv_bfloat16());
    }

    __device__ __forceinline__ static uint32_t number(uint32_t codes) { return codes; }
};

// Codes are made the last bits of 1024 and more.
template <int kBits, bool kZeros>
struct Rescale<__half, kBits, kZeros> {
    static constexpr float kUndo = 1.f;
    uint32_t scale[2], offset[2];
    Rescale() = default;

    __device__ __forceinline__ Rescale(uint32_t scales, uint32_t zeros) {
        scale[0] = __byte_perm(scales, 0, 0x1010);
        scale[1] = __byte_perm(scales, 0, 0x3232);
        constexpr uint32_t kMiddle = 1u << (kBits - 1);
        const uint32_t first = kZeros ? zeros & ((1u << kBits) - 1) : kMiddle;
        const uint32_t second = kZeros ? zeros >> kBits & ((1u << kBits) - 1) : kMiddle;
        offset[0] = (first | 0xe400u) * 0x10001u;                    // -(1024 + first)
        offset[1] = kBits == 4 ? (second << 4 | 0xd400u) * 0x10001u  // -(64 + second)
                               : (second | 0xe400u) * 0x10001u;
    }

    __device__ __forceinline__ uint32_t apply(uint32_t codes, int second) const {
        constexpr uint32_t kOne = 0x3c003c00u, kSixteenth = 0x2c002c00u;
        const uint32_t times = kBits == 4 && second ? kSixteenth : kOne;
        const uint32_t x = multiply_add_pair(codes, times, offset[second], __half());
        return multiply_add_pair(x, scale[second], 0x80008000u, __half());
    }

    __device__ __forceinline__ static uint32_t number(uint32_t codes) {
        return codes | 0x64006400u;
    }
};

// Operand A of step j of a lane's 16 bytes.
template <int kBits, typename Rescaled>
__device__ __forceinline__ void make_operand(const uint4& words, int j, const Rescaled& rescale,
                                             uint32_t (&w)[4]) {
    if constexpr (kBits == 4) {
        const uint32_t word = j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
        const uint32_t later = word >> 8;
        w[0] = rescale.apply(Rescaled::number(word & 0x000f000fu), 0);
        w[1] = rescale.apply(Rescaled::number(word & 0x00f000f0u), 1);
        w[2] = rescale.apply(Rescaled::number(later & 0x000f000fu), 0);
        w[3] = rescale.apply(Rescaled::number(later & 0x00f000f0u), 1);
    } else {
        const uint32_t first = j ? words.z : words.x, second = j ? words.w : words.y;
        w[0] = rescale.apply(Rescaled::number(first & 0x00ff00ffu), 0);
        w[1] = rescale.apply(Rescaled::number(second & 0x00ff00ffu), 1);
        w[2] = rescale.apply(Rescaled::number(first >> 8 & 0x00ff00ffu), 0);
        w[3] = rescale.apply(Rescaled::number(second >> 8 & 0x00ff00ffu), 1);
    }
}

#ifdef OFFLOAD_HAS_WARPGROUPS

// Fills the stages. Of 64 bytes of a row of activations 4 x 4 pairs are transposed, since a lane's
// codes are those of 8 neighbours of the depth.
template <typename Shape>
__device__ __forceinline__ void bring_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                             const WideWork<Shape>& work, unsigned char* shared,
                                             int warp, int lane) {
    constexpr int kBlocks = Shape::kStageDepth / 32;
    constexpr int kItems = kBlocks * Shape::kColumns / Shape::kInputWarps;  // 8 rows, 64 bytes each
    constexpr int kSides = kItems > 4 ? 1 : 2;                              // stages on their way
    constexpr int kSlots = Shape::kSlots / Shape::kInputWarps;              // a lane's each
    const uint32_t shared_at = shared_address(shared), barriers = shared_at + Shape::kBarriersAt;

    const int slot = warp * kSlots + lane;
    const bool there = lane < kSlots && slot < work.bundles * 2;
    const uint4* codes =
        static_cast<const uint4*>(a.codes) +
        (static_cast<int64_t>(work.tile(a, p, slot)) * p.chunks + work.chunk0) * 32;
    const uint64_t policy = evict_first_policy();
    int chunks = work.chunks;  // that are still to come
    auto bring_codes = [&](int place) {
        const int bytes = min(Shape::kStageChunks, chunks) * 512;
        const uint32_t barrier = barriers + place * 8;
        if (warp == 0 && lane == 0) barrier_expect(barrier, bytes * work.bundles * 2);
        if (there)
            copy_bulk(shared_at + place * Shape::kStageBytes + Shape::kInputBytes +
                          slot * Shape::kSlotBytes,
                      codes, bytes, barrier, policy);
        codes += Shape::kStageChunks * 32;
        chunks -= Shape::kStageChunks;
    };
    for (int place = 0; place < Shape::kStages && place < work.stages; ++place) bring_codes(place);

    const int blocks = work.chunks * (Shape::kChunkDepth / 32);  // of 32 of the depth
    const uint16_t* const input =
        static_cast<const uint16_t*>(a.input) + work.chunk0 * Shape::kChunkDepth + lane % 4 * 8;
    uint4 x[kSides][kItems];
    auto load = [&](uint4(&to)[kItems], int stage) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            const int item = warp * kItems + i;
            const int block = stage * kBlocks + item % kBlocks;
            const int row = item / kBlocks * 8 + lane / 4;
            to[i] = make_uint4(0, 0, 0, 0);
            if (row < a.rows && block < blocks)
                to[i] = *reinterpret_cast<const uint4*>(input + row * a.input_stride + block * 32);
        }
    };
    wait_for_previous_kernel();
#pragma unroll
    for (int side = 0; side < kSides; ++side) load(x[side], side);
    uint32_t parity = 1;
    int place = 0;
    for (int stage = 0; stage < work.stages; stage += kSides) {
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
            if (stage + side >= work.stages) break;
            if (stage + side >= Shape::kStages) {
                barrier_wait(barriers + (Shape::kStages + place) * 8, parity);
                bring_codes(place);
            }
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                const int item = warp * kItems + i;
                uint32_t* const to =
                    reinterpret_cast<uint32_t*>(shared + place * Shape::kStageBytes) +
                    (item % kBlocks * 4 * Shape::kColumns + item / kBlocks) * 32 + lane;
                to[0] = x[side][i].x;
                to[Shape::kColumns * 32] = x[side][i].y;
                to[Shape::kColumns * 64] = x[side][i].z;
                to[Shape::kColumns * 96] = x[side][i].w;
            }
            fence_before_bulk_copies();
            __syncwarp();
            if (lane == 0) barrier_arrive(barriers + place * 8);
            if (++place == Shape::kStages) {
                place = 0;
                parity ^= 1;
            }
            load(x[side], stage + side + kSides);
        }
    }
}

template <typename T, int kBits, bool kZeros, typename Shape>
__device__ __forceinline__ void multiply_stages(const OffloadQuantGemm& a, const WidePlan& p,
                                                const WideWork<Shape>& work,
                                                const unsigned char* shared, int warp, int lane,
                                                float (&sums)[Shape::kTiles][Shape::kColumns][4]) {
    using Zero = std::conditional_t<kBits == 4, uint8_t, uint16_t>;  // those of two rows
    constexpr int kTiles = Shape::kTiles, kHalves = Shape::kHalves, kColumns = Shape::kColumns;
    constexpr int kGroupSteps = Shape::kGroupSteps;
    const int row = lane / 4, quarter = lane % 4;
    const uint32_t barriers = shared_address(shared) + Shape::kBarriersAt;

    // Scales of a stage are asked for a stage ahead, by a quarter's lanes those of a chunk.
    const uint32_t* scales_of[kTiles];
    const Zero* zeros_of[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        const int64_t tile = work.tile(a, p, m * Shape::kWarps + warp);
        scales_of[m] = static_cast<const uint32_t*>(a.scale) + tile * p.groups * 8 + row;
        zeros_of[m] = static_cast<const Zero*>(a.zero) + tile * p.groups * 8 + row;
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
    const int most = (work.bundles * 2 + Shape::kWarps - 1 - warp / 4 * 4) / Shape::kWarps;
    const unsigned char* const mine =
        shared + Shape::kInputBytes + warp * Shape::kSlotBytes + lane * 16;
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
        const unsigned char* const codes = mine + place * Shape::kStageBytes;
        const uint64_t stage_inputs = inputs + place * (Shape::kStageBytes / 16);
#pragma unroll
        for (int i = 0; i < Shape::kStageChunks; ++i)
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                if (kColumns == 8 && m > 0 && m >= most) break;  // else not worth a branch
                const uint4 words = *reinterpret_cast<const uint4*>(
                    codes + m * (Shape::kWarps * Shape::kSlotBytes) + i * 512);
                Rescale<T, kBits, kZeros> rescale[kHalves];
#pragma unroll
                for (int h = 0; h < kHalves; ++h)
                    rescale[h] = Rescale<T, kBits, kZeros>(
                        __shfl_sync(0xffffffffu, scales[m][h], row * 4 + i),
                        kZeros ? __shfl_sync(0xffffffffu, zeros[m][h], row * 4 + i) : 0);
#pragma unroll
                for (int j = 0; j < Shape::kSteps; j += kGroupSteps) {
                    uint32_t w[kGroupSteps][4];
#pragma unroll
                    for (int k = 0; k < kGroupSteps; ++k) {
                        make_operand<kBits>(words, j + k,
                                            rescale[(j + k) * kHalves / Shape::kSteps], w[k]);
                        settle(w[k]);
                    }
                    begin_products();
#pragma unroll
                    for (int k = 0; k < kGroupSteps; ++k)
                        multiply_group(sums[m], w[k],
                                       stage_inputs + (i * Shape::kSteps + j + k) * (kColumns * 16),
                                       T());
                    commit_products();
                    wait_for_products<1>();
                    // The stage before is nobody's any more.
                    if (i == 0 && m == 0 && j == 0 && stage > 0 && lane == 0)
                        barrier_arrive(barriers + (Shape::kStages + last) * 8);
                }
            }
        last = place;
        if (++place == Shape::kStages) {
            place = 0;
            parity ^= 1;
        }
    }
    wait_for_products<0>();
}

// Adds up what the blocks of the cluster have and writes the outputs, 4 of a row a thread.
template <typename T, int kBits, typename Shape>
__device__ __forceinline__ void finish_wide(const OffloadQuantGemm& a, const WidePlan& p,
                                            const WideWork<Shape>& work, const float* parts) {
    constexpr float kUndo = Rescale<T, kBits, false>::kUndo;
    constexpr int kAtOnce = 4;
    const T* const bias = static_cast<const T*>(a.bias);
    const T* const residual = static_cast<const T*>(a.residual);
    const int tile0 = a.gated ? work.first : work.first * 2;
    const int tiles = a.gated ? work.bundles : min(work.bundles * 2, p.tiles - tile0);
    const int in_row = tiles * 4, items = in_row * a.rows;
    const int step = p.cluster * Shape::kThreads;
    const bool whole = reinterpret_cast<uintptr_t>(a.output) % 8 == 0 && a.output_stride % 4 == 0;
    for (int item0 = work.rank * Shape::kThreads + static_cast<int>(threadIdx.x); item0 < items;
         item0 += step * kAtOnce) {
        float4 sum[2][kAtOnce] = {};  // of gate and up
        int row[kAtOnce], at[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int item = min(item0 + i * step, items - 1);
            row[i] = quotient(item, in_row);
            at[i] = item - row[i] * in_row;
        }
        for (int rank = 0; rank < p.cluster; ++rank)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if (m > 0 && !a.gated) break;
                float4 x[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int slot = a.gated ? at[i] / 4 * 2 + m : at[i] / 4;
                    const float4* const from =
                        reinterpret_cast<const float4*>(parts + slot * Shape::kTileFloats +
                                                        row[i] * Shape::kRowFloats + at[i] % 4 * 4);
                    x[i] = p.cluster > 1 ? load_from_block(from, rank) : *from;
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    sum[m][i].x += x[i].x;
                    sum[m][i].y += x[i].y;
                    sum[m][i].z += x[i].z;
                    sum[m][i].w += x[i].w;
                }
            }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (item0 + i * step >= items) break;
            const int n = tile0 * 16 + at[i] * 4, r = row[i];
            const float gate[4] = {sum[0][i].x, sum[0][i].y, sum[0][i].z, sum[0][i].w};
            const float up[4] = {sum[1][i].x, sum[1][i].y, sum[1][i].z, sum[1][i].w};
            T* const to = static_cast<T*>(a.output) + r * a.output_stride + n;
            T out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float y = gate[j] * kUndo + (bias ? to_float(bias[n + j]) : 0.f);
                y = activate(y, a.activation);
                if (a.gated) y *= up[j] * kUndo + (bias ? to_float(bias[n + j + a.outputs]) : 0.f);
                if (residual) y += to_float(residual[r * a.residual_stride + n + j]);
                out[j] = from_float<T>(y);
            }
            if (whole) {
                uint2 all;
                memcpy(&all, out, sizeof all);
                *reinterpret_cast<uint2*>(to) = all;
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) to[j] = out[j];
            }
        }
    }
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
    const int busy_warps = min((work.bundles + 1) / 2 * 4, kWarps);
    const uint32_t barriers = shared_address(shared) + Shape::kBarriersAt;
    if (warp == kWarps) {
        if (lane < 2 * Shape::kStages)
            barrier_init(barriers + lane * 8,
                         lane < Shape::kStages ? 1 + Shape::kInputWarps : busy_warps);
        fence_before_bulk_copies();
    }
    __syncthreads();
    let_next_kernel_begin();

    float* const parts = reinterpret_cast<float*>(shared);
    if (warp >= kWarps) {
        keep_registers<Shape::kInputRegisters>();
        bring_stages<Shape>(a, p, work, shared, warp - kWarps, lane);
        __syncthreads();
    } else {
        take_registers<Shape::kMultiplyRegisters>();
        if (warp >= busy_warps) {
            __syncthreads();
        } else {
            float sums[kTiles][Shape::kColumns][4] = {};
            multiply_stages<T, kBits, kZeros, Shape>(a, p, work, shared, warp, lane, sums);
            __syncthreads();  // stages become the place of sums
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                const int slot = m * kWarps + warp;
                if (slot >= work.bundles * 2) break;
                float* const to =
                    parts + slot * Shape::kTileFloats + lane % 4 * 2 * Shape::kRowFloats + lane / 4;
#pragma unroll
                for (int c = 0; c < Shape::kColumns; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        to[(c * 8 + i % 2) * Shape::kRowFloats + i / 2 * 8] = sums[m][c][i];
            }
        }
    }
    wait_for_previous_kernel();
    if (p.cluster > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    finish_wide<T, kBits, Shape>(a, p, work, parts);
    if (p.cluster > 1) {
        cluster_arrive();  // shared memory stays until all have read it
        cluster_wait();
    }
}
#else
template <typename T, int kBits, bool kZeros, typename Shape>
__global__ void wide_gemm_kernel(const __grid_constant__ OffloadQuantGemm,
                                 const __grid_constant__ WidePlan) {}
#endif

}  // namespace offload
