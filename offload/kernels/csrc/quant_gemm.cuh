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
// The activations stay in shared memory, read by all warps. With programmatic dependent launch the
// first pieces are under way before the kernel waits for the one before it.
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "quant_codes.cuh"

namespace offload {

struct QuantPlan {
    int32_t cluster;                              // blocks that share out the depth
    int32_t bundles, longer_clusters;             // of a cluster; the first ones have one more
    int32_t chunks, block_chunks, longer_blocks;  // of a row; of a block, the first have one more
    int32_t tiles;                                // of 16 outputs
    int32_t groups, group_shift;                  // of a row; log2 of the chunks that share one
    // In shared memory, in bytes: from row to row of the activations; where the sums of activations
    // begin, the warps' rings, the sums of products.
    int32_t input_pitch, starts_at, rings_at, parts_at;
};

template <int kBits, int kHalves_, int kColumns_, int kTiles_, int kWarps_, int kPieceChunks_,
          int kStages_, int kBlocks_>
struct QuantShape {
    static constexpr int kHalves = kHalves_;    // of a chunk, with scales of their own
    static constexpr int kColumns = kColumns_;  // of the tensor cores' product: 8 rows each
    static constexpr int kTiles = kTiles_;      // of a bundle
    static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
    static constexpr int kBlocks = kBlocks_;  // that a multiprocessor's registers suffice for
    static constexpr int kPieceChunks = kPieceChunks_, kStages = kStages_;
    static constexpr int kChunkDepth = 4096 / kBits / 16;
    static constexpr int kChunkInputs = kChunkDepth * 2;       // bytes of a row of activations
    static constexpr int kLoads = kChunkDepth / 32 / kHalves;  // of 8 activations a lane
    static constexpr int kStageBytes = kTiles * kPieceChunks * 512;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kPartFloats = kTiles * kColumns * 128;  // of a warp and bundle
    static constexpr int kStartBytes = kColumns * 64;            // of a half of a chunk
    static_assert(kTiles == 2, "one of gate rows and one of up rows");
    static_assert(kPieceChunks <= 4, "a lane of each quarter has a chunk's scales");
    static_assert(kChunkDepth % (32 * kHalves) == 0, "whole loads");
};

// x / d for x below 2^20: a division of integers takes ten times as long.
__device__ __forceinline__ int quotient(int x, int d) {
#ifdef __CUDA_ARCH__
    return __float2int_rz(__fdividef(static_cast<float>(x) + 0.5f, static_cast<float>(d)));
#else
    return x / d;
#endif
}

// Ends what a warp asks for at a time, where copies are counted.
__device__ __forceinline__ void commit_ring() {
#ifndef OFFLOAD_HAS_BULK_COPY
    commit_copies();
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

// Which pieces a block has.
template <typename Shape>
struct QuantWork {
    int rank, cluster;
    int first, bundles;  // of outputs
    int chunk0, chunks;  // of the depth
    int pieces;          // of a bundle

    __device__ __forceinline__ QuantWork(const OffloadQuantGemm& a, const QuantPlan& p, int block) {
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

    // The m-th tile of bundle b; behind the last one, the last one.
    __device__ __forceinline__ int tile(const OffloadQuantGemm& a, const QuantPlan& p, int b,
                                        int m) const {
        return a.gated ? first + b + m * p.tiles
                       : min((first + b) * Shape::kTiles + m, p.tiles - 1);
    }
};

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

// The sums of 8 rows of activations of a bundle that a block's warps have: in the order of the
// warps.
template <typename Shape>
__device__ __forceinline__ void add_warps(const QuantWork<Shape>& work, float4* parts, int bundle,
                                          float (&sum)[Shape::kTiles][4]) {
    const QuantShares shares = work.shares();
    const int first = shares.owner(bundle * work.pieces);
    const int last = shares.owner((bundle + 1) * work.pieces - 1);
    constexpr int kAtOnce = 4;
    for (int w = first; w <= last; w += kAtOnce) {
        float4 x[kAtOnce][Shape::kTiles];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int m = 0; m < Shape::kTiles; ++m)
                x[i][m] = w + i <= last
                              ? parts[((w + i + bundle) * Shape::kTiles + m) * Shape::kColumns * 32]
                              : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
            for (int m = 0; m < Shape::kTiles; ++m) {
                sum[m][0] += x[i][m].x;
                sum[m][1] += x[i][m].y;
                sum[m][2] += x[i][m].z;
                sum[m][3] += x[i][m].w;
            }
    }
}

// Adds up what all warps have of each bundle, then what all blocks of the cluster have, and writes
// the outputs. A warp has 8 rows of activations of a bundle at a time.
template <typename T, int kBits, typename Shape>
__device__ __forceinline__ void finish_bundles(const OffloadQuantGemm& a, const QuantPlan& p,
                                               const QuantWork<Shape>& work,
                                               unsigned char* shared) {
    constexpr int kTiles = Shape::kTiles;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int columns = (a.rows + 7) / 8;
    float4* const parts = reinterpret_cast<float4*>(shared + p.parts_at) + lane;
    __syncthreads();
#ifdef OFFLOAD_HAS_CLUSTERS
    if (p.cluster > 1) {
        for (int item = warp; item < work.bundles * columns; item += Shape::kWarps) {
            const int bundle = quotient(item, columns), c = item - bundle * columns;
            float sum[kTiles][4] = {};
            add_warps(work, parts + c * 32, bundle, sum);
            const int first = work.shares().owner(bundle * work.pieces);
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
                parts[(((first + bundle) * kTiles + m) * Shape::kColumns + c) * 32] =
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
                    const int first = theirs.shares().owner(b * theirs.pieces);
#pragma unroll
                    for (int m = 0; m < kTiles; ++m)
                        x[i][m] =
                            rank + i < p.cluster
                                ? load_from_block(
                                      parts +
                                          (((first + b) * kTiles + m) * Shape::kColumns + c) * 32,
                                      rank + i)
                                : make_float4(0.f, 0.f, 0.f, 0.f);
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                    for (int m = 0; m < kTiles; ++m) {
                        sum[m][0] += x[i][m].x;
                        sum[m][1] += x[i][m].y;
                        sum[m][2] += x[i][m].z;
                        sum[m][3] += x[i][m].w;
                    }
            }
        } else
#endif
            add_warps(work, parts + c * 32, b, sum);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            const int tile = a.gated ? work.first + b : (work.first + b) * kTiles + m;
            if ((a.gated && m > 0) || tile >= p.tiles) break;
            const float (&up)[4] = sum[kTiles - 1];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = tile * 16 + i / 2 * 8 + lane / 4, r = c * 8 + lane % 4 * 2 + i % 2;
                const float times = i / 2 ? Codes<T, kBits>::kSecond : Codes<T, kBits>::kFirst;
                if (r < a.rows) finish_output<T>(a, n, r, sum[m][i] * times, up[i] * times);
            }
        }
    }
#ifdef OFFLOAD_HAS_CLUSTERS
    if (p.cluster > 1) {
        cluster_arrive();  // shared memory stays until all have read it
        cluster_wait();
    }
#endif
}

template <typename T, int kBits, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
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
    const QuantWork<Shape> work(a, p, static_cast<int>(blockIdx.x));
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
        if (lane == 0) {
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

    // Activations: 16 bytes a copy, each block's from another one on, since all ask for the same.
    const int in_row = work.chunks * (Shape::kChunkDepth / 8);  // copies of a row
    const int copies = a.rows * in_row;
    const int turn = static_cast<int>(blockIdx.x) * 64;
    const int turned = turn - quotient(turn, in_row) * in_row;
    auto every_copy = [&](auto use) {  // by whole warps
        for (int i = warp * 32; i < copies; i += Shape::kThreads) {
            const int mine = min(i + lane, copies - 1), r = quotient(mine, in_row);
            const int at = mine - r * in_row + turned;
            use(i + lane < copies, r, at < in_row ? at : at - in_row);
        }
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
        fence_before_bulk_copies();
        __syncwarp();
#endif
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) fetch(stage, zeros);
        wait_for_previous_kernel();
        every_copy([&](bool there, int r, int at) {
            if (there)
                copy_async16_or_zero(shared_address(shared) + r * p.input_pitch + at * 16,
                                     static_cast<const uint16_t*>(a.input) + r * a.input_stride +
                                         work.chunk0 * Shape::kChunkDepth + at * 8,
                                     true);
        });
        commit_copies();
        wait_for_copies(0);
        // Each thread makes what it copied fit for use, and neighbours sum it up for what sums of
        // products start from, of half a chunk (or a whole one).
        float4* const starts = reinterpret_cast<float4*>(shared + p.starts_at) + quarter;
        every_copy([&](bool there, int r, int at) {
            uint4* const mine = reinterpret_cast<uint4*>(shared + r * p.input_pitch + at * 16);
            const uint4 x = *mine;
            float sum = sum_of<T>(x);
            constexpr int kCopies = Shape::kLoads * 4;  // of a sum
#pragma unroll
            for (int step = 1; step < kCopies; step *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (!there) return;
            if (Code::kEnlarged) *mine = Code::enlarge(x);
            if (at % kCopies) return;
            float* const to = reinterpret_cast<float*>(shared + p.starts_at) +
                              ((at / kCopies * kColumns + r / 8) * 4 + r % 8 / 2) * 4 + r % 2;
            to[0] = sum * (-Code::kMiddle / Code::kFirst);
            to[2] = sum * (-Code::kMiddle / Code::kSecond);
        });
        __syncthreads();

        float sums[kTiles][kColumns][4] = {};
        auto multiply = [&](int stage) {
            const uint4* const codes =
                reinterpret_cast<const uint4*>(ring + stage * Shape::kStageBytes) + lane;
            const Scales& at = scales[stage];
#pragma unroll
            for (int i = 0; i < kPieceChunks; ++i) {
                if (i > 0 && chunk + i >= work.chunks) break;
                uint4 words[kTiles];
#pragma unroll
                for (int m = 0; m < kTiles; ++m) words[m] = codes[(m * kPieceChunks + i) * 32];
#pragma unroll
                for (int h = 0; h < kHalves; ++h) {
                    const int half = (chunk + i) * kHalves + h;
                    float4 start[kColumns];
                    float sum[kTiles][kColumns][4] = {};
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) {
                        start[c] = starts[(half * kColumns + c) * 4];
                        if (kZeros) continue;
#pragma unroll
                        for (int m = 0; m < kTiles; ++m) {
                            sum[m][c][0] = start[c].x;
                            sum[m][c][1] = start[c].y;
                            sum[m][c][2] = start[c].z;
                            sum[m][c][3] = start[c].w;
                        }
                    }
#pragma unroll
                    for (int l = 0; l < Shape::kLoads; ++l) {
                        uint4 x[kColumns];
#pragma unroll
                        for (int c = 0; c < kColumns; ++c)
                            x[c] = *reinterpret_cast<const uint4*>(
                                inputs_of[c] + half * (Shape::kLoads * 64) + l * 64);
#pragma unroll
                        for (int m = 0; m < kTiles; ++m)
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                uint32_t w[4];
                                Code::operand(words[m], (h * Shape::kLoads + l) * 2 + j, w);
#pragma unroll
                                for (int c = 0; c < kColumns; ++c)
                                    multiply_tile(sum[m][c], w[0], w[1], w[2], w[3],
                                                  j ? x[c].z : x[c].x, j ? x[c].w : x[c].y, T());
                            }
                    }
#pragma unroll
                    for (int m = 0; m < kTiles; ++m) {
                        const uint32_t both =
                            __shfl_sync(0xffffffffu, at.scales[m][h], row * 4 + i);
                        const float first = scale_in(both, false, T());
                        const float second = scale_in(both, true, T());
                        float middles[2] = {};  // that are to be subtracted
                        if (kZeros) {
                            const uint32_t zero =
                                __shfl_sync(0xffffffffu, at.zeros[m][h], row * 4 + i);
                            constexpr float kPart = 1.f / Code::kMiddle;
                            middles[0] = static_cast<float>(zero & ((1u << kBits) - 1)) * kPart;
                            middles[1] = static_cast<float>(zero >> kBits) * kPart;
                        }
#pragma unroll
                        for (int c = 0; c < kColumns; ++c) {
                            float (&s)[4] = sum[m][c];
                            if (kZeros) {
                                s[0] += middles[0] * start[c].x;
                                s[1] += middles[0] * start[c].y;
                                s[2] += middles[1] * start[c].z;
                                s[3] += middles[1] * start[c].w;
                            }
                            sums[m][c][0] += first * s[0];
                            sums[m][c][1] += first * s[1];
                            sums[m][c][2] += second * s[2];
                            sums[m][c][3] += second * s[3];
                        }
                    }
                }
            }
        };

        auto end_bundle = [&] {
            float4* to = reinterpret_cast<float4*>(shared + p.parts_at) +
                         (warp + bundle) * (Shape::kPartFloats / 4) + lane;
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int c = 0; c < kColumns; ++c, to += 32) {
                    float (&s)[4] = sums[m][c];
                    *to = make_float4(s[0], s[1], s[2], s[3]);
                    s[0] = s[1] = s[2] = s[3] = 0.f;
                }
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
    };
    if (a.zero)
        run(std::true_type());
    else
        run(std::false_type());
    wait_for_copies(0);

    finish_bundles<T, kBits>(a, p, work, shared);
}

}  // namespace offload
