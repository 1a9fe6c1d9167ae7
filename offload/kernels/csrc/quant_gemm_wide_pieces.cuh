// The end of quant_gemm_wide.cuh with up to 32 rows: sums of a cluster go, in the background, to
// the blocks that add them up, and become outputs.
#pragma once
#include "cluster.cuh"
#include "quant_gemm_wide_four.cuh"
#include "quant_gemm_wide_plan.cuh"
#include "warpgroup.cuh"

namespace offload {

#ifdef OFFLOAD_HAS_WARPGROUPS

// Where sums of a cluster lie. A piece is 16 outputs (of a gate and its up 16 each) by 8 rows;
// piece u * kColumns + c of unit u, a slot or the two of a bundle with a gate, belongs to the block
// of that rank modulo the cluster's size, which has places for what each block sums up of it, and,
// of fours that a pair of warpgroups shares, others for what the second one does.
template <typename Shape>
struct WidePlaces {
    int units;        // of the block
    int each_bits;    // log2 of a unit's slots
    int places;       // of pieces that belong to a block
    int seconds;      // from a piece's place to its second one
    int paired_from;  // the first unit of those that pairs share

    __device__ __forceinline__ WidePlaces(const OffloadQuantGemm& a, const WidePlan& p,
                                          const WideWork<Shape>& work,
                                          const WideShares<Shape>& shares) {
        each_bits = a.gated ? 1 : 0;
        units = work.bundles * 2 >> each_bits;
        paired_from = shares.whole * Shape::kWarps >> each_bits;
        places = (units * Shape::kColumns + p.cluster - 1) >> p.cluster_bits;
        seconds = places - (paired_from * Shape::kColumns >> p.cluster_bits);
    }

    // Bytes that the blocks of the cluster, of which this has `rank`, send it.
    __device__ __forceinline__ int bytes(int rows, const WidePlan& p, int rank, bool paired) const {
        const int columns = (rows + 7) / 8;  // that have rows
        int own;
        if (p.cluster <= Shape::kColumns) {
            own = (columns + p.cluster - 1 - rank) >> p.cluster_bits;  // of each unit
            own *= units + (paired ? units - paired_from : 0);
        } else {
            // Of every so many units one.
            const int every = p.cluster / Shape::kColumns, which = rank / Shape::kColumns;
            const int bits = p.cluster_bits - Shape::kColumnBits;
            const auto before = [&](int unit) { return (unit + every - 1 - which) >> bits; };
            own = before(units) + (paired ? before(units) - before(paired_from) : 0);
            if (rank % Shape::kColumns >= columns) own = 0;
        }
        return own * (512 << p.cluster_bits << each_bits);
    }
};

// Sends the sums of a warp to the blocks that add them up, in a cluster in the background:
// `barrier` of theirs expects them. What a lane has of a piece are 16 bytes; the second half lies
// where reading 4 outputs a lane has no conflicts of banks.
template <int kCluster, typename Shape>
__device__ __forceinline__ void send_pieces(
    const OffloadQuantGemm& a, const WideWork<Shape>& work, const WideShares<Shape>& shares,
    const WidePlaces<Shape>& pieces, float* parts, unsigned char* barrier, int warp, int lane,
    const float (&sums)[Shape::kTiles][Shape::kColumns][4]) {
    const int g = warp / 4;
    float* const mine = parts + lane * 4 + lane / 16 * 16;
#pragma unroll
    for (int m = 0; m < Shape::kTiles; ++m) {
        const int slot = shares.slot(g, m) + warp % 4;
        if (m >= shares.alone(g) + shares.in_pair(g) || slot >= work.bundles * 2) break;
        const bool second = m == shares.whole && shares.in_pair(g) && shares.half(g);
        const int unit = slot >> pieces.each_bits, in_unit = slot - (unit << pieces.each_bits);
#pragma unroll
        for (int c = 0; c < Shape::kColumns; ++c) {
            if (c > 0 && c * 8 >= a.rows) break;
            const int piece = unit * Shape::kColumns + c, owner = piece % kCluster;
            const int place = piece / kCluster + (second ? pieces.seconds : 0);
            float* const to =
                mine + (((place * kCluster + work.rank) << pieces.each_bits) + in_unit) *
                           Shape::kPieceFloats;
            const float (&x)[4] = sums[m][c];
            if (kCluster > 1)
                send_to_cluster(address_in_block(to, owner), make_float4(x[0], x[1], x[2], x[3]),
                                address_in_block(barrier, owner));
            else
                *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

// The outputs of a warp, one piece after another: 4 of one of 8 rows a lane. What is added to those
// of the first one is looked up while sums are on their way.
template <int kCluster, typename T, int kBits, typename Shape>
struct WideOutputs {
    const OffloadQuantGemm& a;
    const WidePlan& p;
    const WideWork<Shape>& work;
    int item, in_row, quarter;
    // Of the piece at hand.
    int unit, row, n;
    T bias[2][4], residual[4];

    __device__ __forceinline__ WideOutputs(const OffloadQuantGemm& a, const WidePlan& p,
                                           const WideWork<Shape>& work, int warp, int lane)
        : a(a), p(p), work(work), item(warp), in_row(lane / 4), quarter(lane % 4) {}

    // Whether there is another one, and what is added to it.
    __device__ __forceinline__ bool look_up(const WidePlaces<Shape>& pieces) {
        const int piece = item * kCluster + work.rank;
        unit = piece / Shape::kColumns;
        row = piece % Shape::kColumns * 8 + in_row;
        const int tile = a.gated ? work.first + unit : work.first * 2 + unit;
        n = tile * 16 + quarter * 4;
        if (unit >= pieces.units || tile >= p.tiles) return false;
        if (row < a.rows) {
            const T* const biases = static_cast<const T*>(a.bias);
            const T* const from = static_cast<const T*>(a.residual) + row * a.residual_stride + n;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (biases) bias[0][j] = biases[n + j];
                if (biases && a.gated) bias[1][j] = biases[n + j + a.outputs];
                if (a.residual) residual[j] = from[j];
            }
        }
        return true;
    }

    // Adds up the pieces that this block got.
    __device__ __forceinline__ void write(const WideShares<Shape>& shares,
                                          const WidePlaces<Shape>& pieces, const float* parts) {
        constexpr float kUndo = Rescale<T, kBits, false>::kUndo;
        if (row < a.rows) {
            const bool paired = shares.paired && unit >= pieces.paired_from;
            const int step = Shape::kPieceFloats << pieces.each_bits;
            const float* const from = parts + item * kCluster * step + quarter % 2 * 80 +
                                      quarter / 2 * 2 + in_row / 2 * 4 + in_row % 2;
            float y[2][4] = {};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (k > 0 && !a.gated) break;
#pragma unroll
                for (int rank = 0; rank < kCluster; ++rank)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        y[k][j] += from[rank * step + k * Shape::kPieceFloats + j * 16];
                if (paired)
#pragma unroll
                    for (int rank = 0; rank < kCluster; ++rank)
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            y[k][j] += from[(pieces.seconds * kCluster + rank) * step +
                                            k * Shape::kPieceFloats + j * 16];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    y[k][j] = y[k][j] * kUndo + (a.bias ? to_float(bias[k][j]) : 0.f);
            }
            activate_four(y[0], a.activation);
            T out[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (a.gated) y[0][j] *= y[1][j];
                if (a.residual) y[0][j] += to_float(residual[j]);
                out[j] = from_float<T>(y[0][j]);
            }
            T* const to = static_cast<T*>(a.output) + row * a.output_stride + n;
            write_four(to, out, takes_fours(a));
        }
        item += Shape::kThreads / 32;
    }
};

#endif

}  // namespace offload
