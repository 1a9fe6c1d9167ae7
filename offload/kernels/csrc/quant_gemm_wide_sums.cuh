// The end of quant_gemm_wide.cuh with more than 32 rows: sums of a cluster go to the blocks that
// add them up, and become outputs.
#pragma once
#include "cluster.cuh"
#include "quant_gemm_wide_four.cuh"
#include "quant_gemm_wide_plan.cuh"
#include "warpgroup.cuh"

namespace offload {

#ifdef OFFLOAD_HAS_WARPGROUPS

// How the pieces of a warp are shared out to kCluster blocks: those of a block lie in its shared
// memory by the block that they come from, then in order, then by warp.
template <int kCluster, typename Shape>
struct WidePieces {
    static constexpr int kEach = Shape::kPieces > kCluster ? Shape::kPieces / kCluster : 1;
    static constexpr int kStep = Shape::kWarps * Shape::kPieceFloats;  // to a warp's next one
    static constexpr int kOfBlock = kEach * kStep;                     // from a block
};

// Sends the sums of a warp to the blocks that add them up. What a lane has of a piece are 16 bytes;
// the second half lies where reading 4 outputs a lane has no conflicts of banks.
template <int kCluster, typename Shape>
__device__ __forceinline__ void send_sums(const WideWork<Shape>& work,
                                          const WideShares<Shape>& shares, float* parts, int warp,
                                          int lane,
                                          const float (&sums)[Shape::kTiles][Shape::kColumns][4]) {
    using Pieces = WidePieces<kCluster, Shape>;
    float* const mine = parts + work.rank * Pieces::kOfBlock + warp * Shape::kPieceFloats +
                        lane * 4 + lane / 16 * 16;
    uint32_t to[kCluster];
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank)
        to[rank] = kCluster > 1 ? address_in_block(mine, rank) : 0;
#pragma unroll
    for (int m = 0; m < Shape::kTiles; ++m) {
        const int g = warp / 4;
        if (m >= shares.alone(g) + shares.in_pair(g) ||
            shares.slot(g, m) + warp % 4 >= work.bundles * 2)
            break;
#pragma unroll
        for (int c = 0; c < Shape::kColumns; ++c) {
            const int piece = m * Shape::kColumns + c, at = piece / kCluster * Pieces::kStep;
            const float (&x)[4] = sums[m][c];
            const bool own = piece % kCluster == work.rank;
            if (kCluster > 1 && !own)
                store_to_cluster(to[piece % kCluster] + at * 4,
                                 make_float4(x[0], x[1], x[2], x[3]));
            else
                *reinterpret_cast<float4*>(mine + at) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

// Adds up the pieces that this block got and writes their outputs: 4 of one of 8 rows a lane.
template <int kCluster, typename T, int kBits, typename Shape>
__device__ __forceinline__ void write_outputs(const OffloadQuantGemm& a, const WidePlan& p,
                                              const WideWork<Shape>& work,
                                              const WideShares<Shape>& shares, const float* parts,
                                              int warp, int lane) {
    using Pieces = WidePieces<kCluster, Shape>;
    constexpr float kUndo = Rescale<T, kBits, false>::kUndo;
    constexpr int kAllWarps = Shape::kThreads / 32;
    const T* const bias = static_cast<const T*>(a.bias);
    const T* const residual = static_cast<const T*>(a.residual);
    const int in_row = lane / 4, quarter = lane % 4;
    const int in_piece = quarter % 2 * 80 + quarter / 2 * 2 + in_row / 2 * 4 + in_row % 2;
    const bool whole = takes_fours(a);
    const int slots = work.bundles * 2, slot_step = a.gated ? 2 : 1;
    for (int slot = warp * slot_step; slot < slots; slot += kAllWarps * slot_step) {
        const int tile = a.gated ? work.first + slot / 2 : work.first * 2 + slot;
        if (tile >= p.tiles) break;
        const int m = slot / Shape::kWarps, n = tile * 16 + quarter * 4;
        const bool paired = shares.paired && m == shares.whole;
        float own_bias[2][4] = {};  // of gate and up
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (bias) own_bias[0][j] = to_float(bias[n + j]);
            if (bias && a.gated) own_bias[1][j] = to_float(bias[n + j + a.outputs]);
        }
        const int c0 = (work.rank - m * Shape::kColumns) & (kCluster - 1);
        const float* from = parts + (m * Shape::kColumns + c0) / kCluster * Pieces::kStep +
                            slot % Shape::kWarps * Shape::kPieceFloats + in_piece;
        int row = c0 * 8 + in_row;
        T* to = static_cast<T*>(a.output) + row * a.output_stride + n;
#pragma unroll 2
        for (int c = c0; c < Shape::kColumns; c += kCluster) {
            float y[2][4] = {};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (k > 0 && !a.gated) break;
#pragma unroll
                for (int rank = 0; rank < kCluster; ++rank)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        y[k][j] += from[rank * Pieces::kOfBlock + k * Shape::kPieceFloats + j * 16];
                if (paired)
#pragma unroll
                    for (int rank = 0; rank < kCluster; ++rank)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            y[k][j] += from[rank * Pieces::kOfBlock + j * 16 +
                                            (shares.left * 4 + k) * Shape::kPieceFloats];
#pragma unroll
                for (int j = 0; j < 4; ++j) y[k][j] = y[k][j] * kUndo + own_bias[k][j];
            }
            activate_four(y[0], a.activation);
            if (row < a.rows) {
                T out[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (a.gated) y[0][j] *= y[1][j];
                    if (residual) y[0][j] += to_float(residual[row * a.residual_stride + n + j]);
                    out[j] = from_float<T>(y[0][j]);
                }
                write_four(to, out, whole);
            }
            from += Pieces::kStep;
            row += kCluster * 8;
            to += kCluster * 8 * a.output_stride;
        }
    }
}

// f of the number of blocks of a cluster, known to the compiler.
template <typename F>
__device__ __forceinline__ void with_cluster(int bits, const F& f) {
    if (bits == 1)
        f(std::integral_constant<int, 2>());
    else if (bits == 0)
        f(std::integral_constant<int, 1>());
    else if (bits == 2)
        f(std::integral_constant<int, 4>());
    else
        f(std::integral_constant<int, 8>());
}

#endif

}  // namespace offload
