// Which part of a quantised product a block and each of its warps have, and where in shared memory
// they keep what they need for it. What the words stand for: quant_gemm.cuh.
#pragma once
#include "common.cuh"

namespace offload {

struct QuantPlan {
    int32_t cluster;                              // blocks that share out the depth
    int32_t bundles, longer_clusters;             // of a cluster; the first ones have one more
    int32_t chunks, block_chunks, longer_blocks;  // of a row; of a block, the first have one more
    int32_t tiles;                                // of 16 outputs
    int32_t groups, group_shift;                  // of a row; log2 of the chunks that share one
    // In shared memory, in bytes: from row to row of the activations; where the barrier that
    // announces them lies, the warps of each bundle, what sums of products start from, the warps'
    // rings, what warps sum up.
    int32_t input_pitch, barrier_at, warps_at, starts_at, rings_at, sums_at;
};

template <int kBits, int kHalves_, int kColumns_, int kTiles_, int kWarps_, int kPieceChunks_,
          int kStages_>
struct QuantShape {
    static constexpr int kHalves = kHalves_;    // of a chunk, with scales of their own
    static constexpr int kColumns = kColumns_;  // of the tensor cores' product: 8 rows each
    static constexpr int kTiles = kTiles_;      // of a bundle
    static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
    static constexpr int kPieceChunks = kPieceChunks_, kStages = kStages_;
    // Of which codes are asked for ahead of the activations, which queue behind them: as much as is
    // under way to a multiprocessor at HBM's rate.
    static constexpr int kEarlyStages = kStages / 2;
    // Whether activations are summed up before the loop (quant_gemm_inputs.cuh), not in it.
    static constexpr bool kSummedUp = kColumns > 1;
    static constexpr int kChunkDepth = 4096 / kBits / 16;
    static constexpr int kChunkInputs = kChunkDepth * 2;       // bytes of a row of activations
    static constexpr int kLoads = kChunkDepth / 32 / kHalves;  // of 8 activations a lane
    static constexpr int kStageBytes = kTiles * kPieceChunks * 512;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static_assert(kTiles == 2, "one of gate rows and one of up rows");
    static_assert(kChunkDepth % (32 * kHalves) == 0, "whole loads");
    static_assert(kPieceChunks <= 4, "a lane of each quarter has a chunk's scales");
};

// x / d for x below 2^20: a division of integers takes ten times as long.
__device__ __forceinline__ int quotient(int x, int d) {
#ifdef __CUDA_ARCH__
    return __float2int_rz(__fdividef(static_cast<float>(x) + 0.5f, static_cast<float>(d)));
#else
    return x / d;
#endif
}

// How `pieces` are shared out among warps: the first ones have one more.
struct QuantShares {
    int each, longer;

    __device__ __forceinline__ QuantShares(int pieces, int warps)
        : each(pieces / warps), longer(pieces % warps) {}
    __device__ __forceinline__ int begin(int warp) const { return warp * each + min(warp, longer); }
    __device__ __forceinline__ int count(int warp) const { return each + (warp < longer); }
    __device__ __forceinline__ int owner(int piece) const {
        const int in_longer = longer * (each + 1);
        return piece < in_longer ? quotient(piece, each + 1)
                                 : longer + quotient(piece - in_longer, each);
    }
};

// Neighbouring warps, as one number.
__device__ __forceinline__ int first_warp(int warps) { return warps & 0xffff; }
__device__ __forceinline__ int count_warps(int warps) { return warps >> 16; }

// Which pieces a block has.
template <typename Shape>
struct QuantWork {
    int rank, cluster;
    int first, bundles;  // of outputs
    int chunk0, chunks;  // of the depth
    int pieces;          // of a bundle

    __device__ __forceinline__ QuantWork(const QuantPlan& p, int block) {
        cluster = quotient(block, p.cluster);
        first = cluster * p.bundles + min(cluster, p.longer_clusters);
        bundles = p.bundles + (cluster < p.longer_clusters);
        at_rank(p, block - cluster * p.cluster);
    }

    __device__ __forceinline__ void at_rank(const QuantPlan& p, int block_rank) {
        rank = block_rank;
        chunk0 = rank * p.block_chunks + min(rank, p.longer_blocks);
        chunks = p.block_chunks + (rank < p.longer_blocks);
        pieces = (chunks + Shape::kPieceChunks - 1) / Shape::kPieceChunks;
    }

    __device__ __forceinline__ QuantShares shares() const {
        return QuantShares(bundles * pieces, Shape::kWarps);
    }

    // Which warps have pieces of bundle b: for first_warp and count_warps.
    __device__ __forceinline__ int warps_of(int b) const {
        const QuantShares all = shares();
        const int warp = all.owner(b * pieces);
        return warp | (all.owner((b + 1) * pieces - 1) + 1 - warp) << 16;
    }

    // The m-th tile of bundle b; behind the last one, the last one.
    __device__ __forceinline__ int tile(const OffloadQuantGemm& a, const QuantPlan& p, int b,
                                        int m) const {
        return a.gated ? first + b + m * p.tiles
                       : min((first + b) * Shape::kTiles + m, p.tiles - 1);
    }
};

}  // namespace offload
