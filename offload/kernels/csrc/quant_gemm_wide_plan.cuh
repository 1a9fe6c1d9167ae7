// What a launch of quant_gemm_wide.cuh is made of: how blocks, stages and warpgroups share the
// product out.
#pragma once
#include "quant_gemm_work.cuh"

namespace offload {

struct WidePlan {
    int32_t cluster, cluster_bits;                // blocks that share out the depth; its log2
    int32_t bundles, longer_clusters;             // of a cluster; the first ones have one more
    int32_t chunks, block_chunks, longer_blocks;  // of a row; of a block, the first have one more
    int32_t tiles;                                // of 16 outputs
    int32_t groups, group_shift;                  // of a row; log2 of the chunks that share one
    int32_t stages, stage_bytes;                  // of the ring; of one
    int32_t parts_at, barriers_at;  // in shared memory: sums (0: where stages were); barriers
};

template <int kBits, int kHalves_, int kColumns_, int kTiles_, int kWarps_, int kStageChunks_>
struct WideShape {
    static constexpr int kHalves = kHalves_;    // of a chunk, with scales of their own
    static constexpr int kColumns = kColumns_;  // of 8 rows of activations each
    static constexpr int kColumnBits = kColumns / 2 - kColumns / 8;   // its log2
    static constexpr int kTiles = kTiles_;                            // of a warp
    static constexpr int kWarps = kWarps_, kWarpgroups = kWarps / 4;  // that multiply
    static constexpr int kInputWarps = kWarps == 8 ? 8 : 4;           // that bring stages
    static constexpr int kThreads = (kWarps + kInputWarps) * 32;
    // A thread's registers, of those that multiply and of those that bring stages.
    static constexpr int kMultiplyRegisters = kWarps == 8 ? 200 : 104;
    static constexpr int kInputRegisters = kWarps == 8 ? 56 : 64;
    static constexpr int kChunkDepth = 4096 / kBits / 16;
    static constexpr int kSteps = kChunkDepth / 16;  // of a chunk
    static constexpr int kGroupSteps = kSteps / 2;   // of a group of products
    static constexpr int kSlots = kWarps * kTiles;
    // With many rows all blocks have the same ring, and sums take its place; else stages are as
    // large as a block's slots ask for, and there are as many as there is room for.
    static constexpr bool kMany = kColumns == 8;
    static constexpr int kMostStages = kMany ? 4 : 8, kStageChunks = kStageChunks_;
    static constexpr int kFirstStages = 2;  // asked for before the activations
    static constexpr int kStageDepth = kStageChunks * kChunkDepth;
    static constexpr int kInputBytes = kColumns * 16 * kStageDepth;  // of a stage
    static constexpr int kSlotBytes = kStageChunks * 512;
    // Whose activations are on their way to registers at a time.
    static constexpr int kSides = kColumns * kChunkDepth <= 64 ? 4 : 2;
    static constexpr int kStageBytes = kInputBytes + kSlots * kSlotBytes;  // of all slots
    // Sums: pieces of a warp, of 16 outputs and 8 rows each, shared out to the blocks of a cluster.
    static constexpr int kPieces = kTiles * kColumns, kPieceFloats = 144;
    static constexpr int kMostCluster = 8;
    static constexpr int kPartsBytes =
        (kPieces > kMostCluster ? kPieces : kMostCluster) * kWarps * kPieceFloats * 4;
    static constexpr int kBarriersAt =
        kMostStages * kStageBytes > kPartsBytes ? kMostStages * kStageBytes : kPartsBytes;

    static __device__ __forceinline__ int stages(const WidePlan& p) {
        return kMany ? kMostStages : p.stages;
    }
    static __device__ __forceinline__ int stage_bytes(const WidePlan& p) {
        return kMany ? kStageBytes : p.stage_bytes;
    }
    static __device__ __forceinline__ int parts_at(const WidePlan& p) {
        return kMany ? 0 : p.parts_at;
    }
    static __device__ __forceinline__ int barriers_at(const WidePlan& p) {
        return kMany ? kBarriersAt : p.barriers_at;
    }
    static_assert(kWarps == 8 || kWarps == 16, "pairs of warpgroups");
    static_assert(kStageChunks == 2 || kStageChunks == 4, "a lane of each quarter has scales");
    static_assert(!kMany || kBarriersAt + 2 * kMostStages * 8 <= 232448, "what a block may have");
};

// Which part of the product a block has.
template <typename Shape>
struct WideWork {
    int rank, first, bundles;    // of outputs: two tiles each, neighbours or a gate's and its up's
    int chunk0, chunks, stages;  // of the depth

    __device__ __forceinline__ WideWork(const WidePlan& p, int block) {
        const int cluster = block >> p.cluster_bits;
        rank = block - (cluster << p.cluster_bits);
        first = cluster * p.bundles + min(cluster, p.longer_clusters);
        bundles = p.bundles + (cluster < p.longer_clusters);
        chunk0 = rank * p.block_chunks + min(rank, p.longer_blocks);
        chunks = p.block_chunks + (rank < p.longer_blocks);
        stages = (chunks + Shape::kStageChunks - 1) / Shape::kStageChunks;
    }

    // The tile of a slot. Behind the last one, the last one.
    __device__ __forceinline__ int tile(const OffloadQuantGemm& a, const WidePlan& p,
                                        int slot) const {
        slot = min(slot, bundles * 2 - 1);
        return a.gated ? first + slot / 2 + slot % 2 * p.tiles : min(first * 2 + slot, p.tiles - 1);
    }
};

// How four slots at a time are shared out to the warpgroups. Each has `whole`; those that are left
// over are one each of the first warpgroups, or, where there are two for each, in pairs: each of a
// pair has half of a stage's chunks, and its sums are added to the other's in the end.
template <typename Shape>
struct WideShares {
    int whole, left;
    bool paired;

    __device__ __forceinline__ explicit WideShares(const WideWork<Shape>& work) {
        const int fours = (work.bundles + 1) / 2;
        whole = fours / Shape::kWarpgroups;
        left = fours % Shape::kWarpgroups;
        paired = left > 0 && left * 2 <= Shape::kWarpgroups;
    }

    __device__ __forceinline__ int busy_warps() const {
        return (whole > 0 ? Shape::kWarpgroups : paired ? left * 2 : left) * 4;
    }

    // Of warpgroup g: whether it is one of a pair, which one, and how many it has alone.
    __device__ __forceinline__ bool in_pair(int g) const { return paired && g < left * 2; }
    __device__ __forceinline__ int half(int g) const { return g >= left; }
    __device__ __forceinline__ int alone(int g) const { return whole + (!paired && g < left); }

    // The first slot of its m-th four; a pair's comes after those that it has alone.
    __device__ __forceinline__ int slot(int g, int m) const {
        return (m * Shape::kWarpgroups + (m == whole && in_pair(g) && g >= left ? g - left : g)) *
               4;
    }
};

}  // namespace offload
