// The product for 16-bit elements: all warps of a block share its weight rows and the activations
// beside them, a chunk of the depth at a time, in one ring of shared memory.
//
// Every block has an equal number of outputs, to the row, cut into equal tiles of at most kTile
// weight rows: so all SMs read as much. Background copies (cp.async) keep all stages but one under
// way. Activations come with the weights, once for a whole tile, from L2, which has little more to
// give than HBM: where 16 rows stand beside few outputs, two blocks of a cluster have twice the
// outputs in common and half of the depth each; one adds up what both have.
//
// Warps share out a tile's groups of 16 rows and, where there are fewer of these than warps, the
// chunk's depth. At a tile's end they leave their sums in the stage that was read last; these are
// added in the order of the depth, so results repeat bit for bit.
#pragma once
#include "async_copy.cuh"
#include "cluster.cuh"
#include "skinny_gemm_norm.cuh"
#include "skinny_gemm_plan.cuh"
#include "tensor_core.cuh"

namespace offload {

constexpr int kMostStages = 9;  // wait_for_copies
// At the front of shared memory: RowScale of each row.
constexpr int kStagedHead = kMostRows * static_cast<int>(sizeof(RowScale));

// How a staged block shares out its work, for the kernel and for the launcher.
template <int kColumns, int kTile, int kChunkBytes, bool kNormed>
struct StagedShape {
    // Few warps have few others to wait for. A norm gives each more to do.
    static constexpr int kThreads = kNormed ? 512 : 256;
    static constexpr int kWarps = kThreads / 32;
    // Activations in registers serve two groups of weight rows where there are many of them.
    static constexpr int kOwnGroups = kColumns;
    static constexpr int kTeams = kTile / 16 / kOwnGroups;
    static constexpr int kParts = kWarps / kTeams;   // of a chunk's depth
    static constexpr int kSteps = kChunkBytes / 64;  // of 32 elements
    static constexpr int kOwnSteps = kSteps / kParts;
    static constexpr int kPieces = kChunkBytes / 16;  // of a row
    static constexpr int kWarpsOfRow = kPieces / 32;  // that copy it
    static constexpr int kRowsAtOnce = kThreads / kPieces;
    static constexpr int kCopies = kTile / kRowsAtOnce;  // of weights, a thread and stage
    static constexpr int kInputCopies = (kColumns * 8 - 1) / kRowsAtOnce + 1;
    static constexpr int kItems = (kTile * kColumns * 8 - 1) / kThreads + 1;  // a thread
    static_assert(kCopies * kRowsAtOnce == kTile, "whole copies");
    static_assert(kRowsAtOnce == 4 || kRowsAtOnce == 8 || kRowsAtOnce == 16, "half a group");
    static_assert(kTeams >= 1 && kParts * kTeams == kWarps, "whole groups");
    static_assert(kOwnSteps >= 1 && kOwnSteps * kParts == kSteps, "whole steps");
    static_assert(kWarpsOfRow * 32 == kPieces && kWarpsOfRow <= kParts, "whole warps");
};

// A block's outputs, tile by tile and chunk by chunk. The chunks of a tile are `count` from
// `first`, taken from the `turn`-th of them on.
struct StagedWalk {
    int left;             // tiles, this one included
    int shorter, longer;  // outputs a tile has; how many more tiles have one more
    int output, outputs;  // the tile's first, and how many
    int done, at;         // chunks of this tile; the one that comes

    // `tiles`: of a block with the most outputs. Divisions are what blocks would begin with: a
    // hundred cycles each before the first copies.
    __device__ __forceinline__ StagedWalk(int first_output, int count, int most, int tiles,
                                          int turn) {
        left = tiles - (count <= (tiles - 1) * most);
        shorter = left > 1 ? count / left : count;
        longer = count - shorter * left;
        output = first_output;
        done = 0;
        at = turn;
        begin_tile();
    }

    __device__ __forceinline__ void begin_tile() {
        outputs = shorter + (longer > 0);
        --longer;
    }

    __device__ __forceinline__ bool more() const { return left > 0; }

    __device__ __forceinline__ void advance(int count) {
        if (++at == count) at = 0;
        if (++done < count) return;
        done = 0;
        next_tile();
    }

    __device__ __forceinline__ void next_tile() {
        --left;
        output += outputs;
        begin_tile();
    }
};

template <typename T, int kColumns, int kTile, int kChunkBytes, bool kNormed>
__global__ void __launch_bounds__(StagedShape<kColumns, kTile, kChunkBytes, kNormed>::kThreads, 1)
    staged_gemm_kernel(const __grid_constant__ OffloadSkinnyGemm a,
                       const __grid_constant__ GemmPlan p, float*) {
    using Shape = StagedShape<kColumns, kTile, kChunkBytes, kNormed>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_next_kernel_begin();

#ifdef OFFLOAD_HAS_CLUSTERS
    const int splits = static_cast<int>(p.splits);
    const int rank = blockIdx.x & (splits - 1);
    if (splits > 1) cluster_arrive();  // both have begun
#else
    // Code for older GPUs on a newer one: the first block of a cluster does all of the depth.
    constexpr int splits = 1, rank = 0;
    if (blockIdx.x % p.splits) return;
#endif
    const int team = blockIdx.x >> (p.splits - 1);  // of one or two blocks
    const int first = team * p.outputs + min(team, p.more_outputs);
    const int count = p.outputs + (team < p.more_outputs);
    const int half = static_cast<int>(p.chunks) / 2, first_chunk = rank * half;
    const int chunks = splits == 1 ? static_cast<int>(p.chunks)
                       : rank == 0 ? half
                                   : static_cast<int>(p.chunks) - half;
    const int turn =
        static_cast<int>(static_cast<float>(chunks) * (static_cast<float>(team) * p.turn));
    const int depth_bytes = a.depth * static_cast<int>(sizeof(T));
    const uint64_t policy = evict_first_policy();
    StagedWalk ahead(first, count, p.tile_outputs, static_cast<int>(p.tiles), turn), at = ahead;

    // A thread copies the same 16 bytes of a chunk in every kRowsAtOnce-th row. There are few warps
    // and much to copy, so addresses are worked out once a tile. Odd rows have their 64 bytes
    // swapped, so that two rows of 64 bytes meet no bank twice.
    const int copy_row = threadIdx.x / Shape::kPieces, copy_piece = threadIdx.x % Shape::kPieces;
    const uint32_t copy_to = shared_address(shared) + p.ring_at + copy_row * kChunkBytes +
                             (copy_piece ^ (copy_row & 1) << 2) * 16;
    // How far copy n is behind the first: so many steps of kRowsAtOnce rows, short ones and long
    // ones. With a gate, a group's first 8 rows are gate rows and the others their up rows.
    const int64_t weight_row_bytes = a.weight_stride * static_cast<int64_t>(sizeof(T));
    constexpr int kSpan = Shape::kRowsAtOnce < 8 ? 8 : Shape::kRowsAtOnce;
    constexpr int kCopiesOfSpan = kSpan / Shape::kRowsAtOnce;
    const int64_t step = weight_row_bytes * Shape::kRowsAtOnce;
    const int64_t short_step = weight_row_bytes * (!a.gated     ? kSpan
                                                   : kSpan < 16 ? a.outputs
                                                                : kSpan / 2);
    const int64_t long_step = weight_row_bytes * (a.gated ? kSpan : 2 * kSpan);
    const auto behind_first = [&](int n) {
        return n % kCopiesOfSpan * step + n / kCopiesOfSpan % 2 * short_step +
               n / kCopiesOfSpan / 2 * long_step;
    };
    const unsigned char* weight_from;
    uint32_t wanted = 0;  // a bit a copy: rows without an output are left as they are
    auto begin_tile = [&] {
        if (!ahead.more()) return;
        const int output = a.gated ? copy_row / 16 * 8 + copy_row % 8 : copy_row;
        weight_from = static_cast<const unsigned char*>(a.weight) + copy_piece * 16 +
                      (ahead.output + output +
                       static_cast<int64_t>(a.gated && copy_row % 16 >= 8 ? a.outputs : 0)) *
                          weight_row_bytes;
        wanted = 0;
#pragma unroll
        for (int n = 0; n < Shape::kCopies; ++n) {
            const int row = copy_row + n * Shape::kRowsAtOnce;
            const bool there = (a.gated ? row / 16 * 8 + row % 8 : row) < ahead.outputs;
            wanted |= static_cast<uint32_t>(there) << n;
        }
    };
    // The norm's weight and bias lie as rows behind the activations.
    const unsigned char* norm_from = nullptr;
    if (kNormed && copy_row < 2)
        norm_from = static_cast<const unsigned char*>(copy_row ? a.norm.bias : a.norm.weight);
    auto fetch_weights = [&](int stage_at) {
        const uint32_t to = copy_to + stage_at;
        const int skip = (first_chunk + ahead.at) * kChunkBytes;
        const unsigned char* from = weight_from + skip;
        if (skip + kChunkBytes <= depth_bytes) {
#pragma unroll
            for (int n = 0; n < Shape::kCopies; ++n)
                copy_async16_if(wanted >> n & 1, to + n * Shape::kRowsAtOnce * kChunkBytes,
                                from + behind_first(n), policy);
        } else {
            const bool there = skip + copy_piece * 16 < depth_bytes;
#pragma unroll
            for (int n = 0; n < Shape::kCopies; ++n)
                if (wanted >> n & 1)
                    copy_async16_or_zero(to + n * Shape::kRowsAtOnce * kChunkBytes,
                                         there ? from + behind_first(n) : a.weight, there, policy);
        }
        if (norm_from) {
            const bool there = skip + copy_piece * 16 < depth_bytes;
            copy_async16_or_zero(to + p.norm_at,
                                 there ? norm_from + copy_piece * 16 + skip : a.weight, there);
        }
    };
    const unsigned char* const input_from =
        static_cast<const unsigned char*>(a.input) +
        copy_row * a.input_stride * static_cast<int64_t>(sizeof(T)) + copy_piece * 16;
    const int64_t input_step =
        Shape::kRowsAtOnce * a.input_stride * static_cast<int64_t>(sizeof(T));
    auto fetch_inputs = [&](int stage_at, int chunk) {
        const uint32_t to = copy_to + stage_at + p.inputs_at;
        const int skip = (first_chunk + chunk) * kChunkBytes;
        const bool there = skip + copy_piece * 16 < depth_bytes;
#pragma unroll
        for (int n = 0; n < Shape::kInputCopies; ++n)
            if (copy_row + n * Shape::kRowsAtOnce < a.rows)
                copy_async16_or_zero(to + n * Shape::kRowsAtOnce * kChunkBytes,
                                     there ? input_from + n * input_step + skip : a.input, there);
    };
    auto advance = [&] {
        ahead.advance(chunks);
        if (ahead.done == 0) begin_tile();
    };
    begin_tile();

    // Only the weights are sure to be there before the kernel ahead has ended.
    int begun = 0;
    for (; begun + 1 < p.stages && ahead.more(); ++begun) {
        fetch_weights(begun * p.stage_bytes);
        advance();
    }
    const bool layer = kNormed && a.norm.kind == OFFLOAD_NORM_LAYER;
    const int norm_rows = layer ? 2 : 0;
    const uint32_t offset_mask = a.norm.weight_offset != 0.f ? ~0u : 0u;
    // Rows of a norm that has neither weight nor bias: they stay, whatever the chunk.
    if (kNormed && copy_row < (layer ? 2 : 1) && !norm_from) {
        const uint32_t x = copy_row == 0 && !offset_mask ? Late<T>::kOnes : 0u;
        for (int s = 0; s < p.stages; ++s)
            *reinterpret_cast<uint4*>(
                shared + p.ring_at + s * p.stage_bytes + p.norm_at + copy_row * kChunkBytes +
                (copy_piece ^ (copy_row & 1) << 2) * 16) = make_uint4(x, x, x, x);
    }
    wait_for_previous_kernel();
    for (int s = 0, chunk = turn; s + 1 < p.stages; ++s) {
        if (s < begun) fetch_inputs(s * p.stage_bytes, chunk);
        if (++chunk == chunks) chunk = 0;
        commit_copies();
    }

    const int pair = warp % Shape::kTeams, part = warp / Shape::kTeams;
    const int group = pair * Shape::kOwnGroups;
    const int row = lane / 4, swap = (row & 1) << 2;
    RowScale* const row_scales = reinterpret_cast<RowScale*>(shared);
    if (kNormed) {
        if (needs_row_scales<T>(a.norm)) {
            choose_row_scales<T>(a, row_scales);
            __syncthreads();
        } else if (threadIdx.x < kMostRows) {
            row_scales[threadIdx.x] = {1.f, 0.f};  // read at a tile's end
        }
    }
    auto row_scale = [&](int r) {
        return needs_row_scales<T>(a.norm) ? row_scales[r] : RowScale{1.f, 0.f};
    };

    // Everything that a step's addresses have in common with those of other chunks.
    const int ring_at = p.ring_at;
    const unsigned char* const weights = shared + ring_at + (group * 16 + row) * kChunkBytes;
    int place[Shape::kOwnSteps], input_place[Shape::kOwnSteps][kColumns];
    int norm_place[Shape::kOwnSteps][kColumns];
    uint32_t scales[kColumns], shifts[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        // Past the last row it is that one: nobody looks at its sums.
        const int column = c * 8 + row, r = min(column, a.rows - 1);
        // But the first two columns there have a layer norm's weight and bias, as 0 x + 1 times
        // these. The x is of the same place: no row may spoil another's sums with 0 times infinity.
        const int extra = column - a.rows;
        const bool is_norm = extra >= 0 && extra < norm_rows;
        const int norm_row = is_norm ? extra : 0;
#pragma unroll
        for (int own = 0; own < Shape::kOwnSteps; ++own) {
            const int piece = (part * Shape::kOwnSteps + own) * 4 + lane % 4;
            place[own] = (piece ^ swap) * 16;
            const int norm_at =
                ring_at + p.norm_at + norm_row * kChunkBytes + (piece ^ norm_row << 2) * 16;
            norm_place[own][c] = norm_at;
            input_place[own][c] =
                is_norm ? norm_at
                        : ring_at + p.inputs_at + r * kChunkBytes + (piece ^ (r & 1) << 2) * 16;
        }
        if (kNormed) {
            const RowScale by = is_norm ? RowScale{0.f, 1.f} : row_scale(r);
            scales[c] = pair_of<T>(by.scale);
            shifts[c] = pair_of<T>(by.shift);
        }
    }

    // What the rows sum up to: each thread, of the activations that it copies, while it is at the
    // block's first tile.
    float row_sum[Shape::kInputCopies] = {}, row_square[Shape::kInputCopies] = {};
    auto add_rows = [&](int stage_at, int skip) {
        if (skip + copy_piece * 16 >= depth_bytes) return;
#pragma unroll
        for (int n = 0; n < Shape::kInputCopies; ++n) {
            const int r = copy_row + n * Shape::kRowsAtOnce;
            if (r >= a.rows) break;
            const RowScale by = row_scale(r);
            add_row<T>(
                *reinterpret_cast<const uint4*>(shared + ring_at + stage_at + p.inputs_at +
                                                r * kChunkBytes + (copy_piece ^ (r & 1) << 2) * 16),
                pair_of<T>(by.scale), pair_of<T>(by.shift), row_sum[n], row_square[n]);
        }
    };

    constexpr int kSets = kColumns == 1 ? 2 : 1;  // products that add to the same sums wait
    float sums[kSets][Shape::kOwnGroups][kColumns][4] = {};
    int next_group = 0;  // how far behind this one it lies
    auto multiply = [&](int stage_at) {
#pragma unroll
        for (int own = 0; own < Shape::kOwnSteps; ++own) {
            uint4 low[Shape::kOwnGroups], high[Shape::kOwnGroups];
#pragma unroll
            for (int g = 0; g < Shape::kOwnGroups; ++g) {
                const unsigned char* from = weights + stage_at + place[own] + g * next_group;
                low[g] = *reinterpret_cast<const uint4*>(from);
                high[g] = *reinterpret_cast<const uint4*>(from + 8 * kChunkBytes);
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                uint4 x = *reinterpret_cast<const uint4*>(shared + input_place[own][c] + stage_at);
                if constexpr (kNormed)
                    x = scale_row<T>(
                        x, *reinterpret_cast<const uint4*>(shared + norm_place[own][c] + stage_at),
                        scales[c], shifts[c], offset_mask);
#pragma unroll
                for (int g = 0; g < Shape::kOwnGroups; ++g) {
                    multiply_tile(sums[0][g][c], low[g].x, high[g].x, low[g].y, high[g].y, x.x, x.y,
                                  T());
                    multiply_tile(sums[kSets - 1][g][c], low[g].z, high[g].z, low[g].w, high[g].w,
                                  x.z, x.w, T());
                }
            }
        }
    };

    // What a thread finishes: output `n` of the tile, of every kRowsAtOnce-th row.
    const int width = a.gated ? kTile / 2 : kTile;
    const int n = threadIdx.x % width, rows_at_once = Shape::kThreads / width;
    const int first_row = threadIdx.x / width;
    T bias = {}, up_bias = {}, residual[Shape::kItems] = {};

    // The stage that was used last is the next to be filled.
    int stage_at = 0, free_at = (p.stages - 1) * p.stage_bytes, chunk = turn;
    for (int tile = 0; at.more(); at.next_tile(), ++tile) {
        if (rank == 0 && n < at.outputs) {
            // Long before it is needed; and each value on its own, as `output` may be `residual`.
            if (a.bias) {
                bias = static_cast<const T*>(a.bias)[at.output + n];
                if (a.gated) up_bias = static_cast<const T*>(a.bias)[at.output + n + a.outputs];
            }
            if (a.residual)
#pragma unroll
                for (int i = 0; i < Shape::kItems; ++i) {
                    const int r = first_row + i * rows_at_once;
                    if (r < a.rows)
                        residual[i] = static_cast<const T*>(
                            a.residual)[r * a.residual_stride + at.output + n];
                }
        }
        const int groups = a.gated ? (at.outputs + 7) / 8 : (at.outputs + 15) / 16;
        if (Shape::kOwnGroups > 1) next_group = group + 1 < groups ? 16 * kChunkBytes : 0;
        for (int more = chunks; more > 0; --more) {
            wait_for_copies(p.stages - 2);
            __syncthreads();  // the stage is here for all, and all are done with the one before
            if (ahead.more()) {
                fetch_weights(free_at);
                fetch_inputs(free_at, ahead.at);
                advance();
            }
            commit_copies();
            if (group < groups) multiply(stage_at);
            if (kNormed && tile == 0) add_rows(stage_at, (first_chunk + chunk) * kChunkBytes);
            if (++chunk == chunks) chunk = 0;
            free_at = stage_at;
            stage_at += p.stage_bytes;
            if (stage_at == p.stages * p.stage_bytes) stage_at = 0;
        }

        // A row of sums for each of the activations, then those of the norm's weight and bias: of
        // every part of the depth, in the stage that all have read. Then what rows sum up to, of
        // every warp that has copied a part of one.
        const int row_sums_at = (a.rows + norm_rows) * p.sum_pitch;
        const int values = row_sums_at + (kNormed ? 2 * kMostRows : 0);
        float* const left = reinterpret_cast<float*>(shared + ring_at + free_at);
        float* const mine = left + part * values;
        __syncthreads();
        if (group < groups) {
#pragma unroll
            for (int g = 0; g < Shape::kOwnGroups; ++g) {
                float* const to = mine + (group + g) * 16 + row;
                if (group + g < groups) {
#pragma unroll
                    for (int c = 0; c < kColumns; ++c)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int r = c * 8 + lane % 4 * 2 + i % 2;
                            float x = sums[0][g][c][i];
                            if (kSets > 1) x += sums[kSets - 1][g][c][i];
                            if (r < a.rows + norm_rows) to[r * p.sum_pitch + i / 2 * 8] = x;
                        }
                }
            }
        }
        if (kNormed)
#pragma unroll
            for (int n = 0; n < Shape::kInputCopies; ++n) {
                if (tile == 0) {
                    row_sum[n] = warp_sum(row_sum[n]);
                    row_square[n] = warp_sum(row_square[n]);
                }
                const int r = copy_row + n * Shape::kRowsAtOnce;
                if (lane == 0 && r < a.rows) {
                    float* const to = left + copy_piece / 32 * values + row_sums_at + r;
                    to[0] = row_sum[n];
                    to[kMostRows] = row_square[n];
                }
            }
#pragma unroll
        for (int i = 0; i < Shape::kOwnGroups * kColumns * 4 * kSets; ++i)
            (&sums[0][0][0][0])[i] = 0.f;
        __syncthreads();
        float* const others = reinterpret_cast<float*>(shared + p.sums_at) + tile % 2 * values;
        for (int i = threadIdx.x; i < values; i += Shape::kThreads) {
            float x = left[i];
            if (i < row_sums_at) {
#pragma unroll
                for (int other = 1; other < Shape::kParts; ++other) x += left[other * values + i];
            } else {
#pragma unroll
                for (int other = 1; other < Shape::kWarpsOfRow; ++other)
                    x += left[other * values + i];
            }
            left[i] = x;
        }
#ifdef OFFLOAD_HAS_CLUSTERS
        if (splits > 1) {
            // A place is written again two tiles later, when the barrier between has been passed.
            if (tile == 0) cluster_wait();
            if (rank > 0)
                for (int i = threadIdx.x; i < values; i += Shape::kThreads)
                    store_to_block(others + i, 0, left[i]);
            cluster_arrive();
            cluster_wait();
        }
#endif
        if (rank > 0) continue;
        __syncthreads();
        if (n >= at.outputs) continue;
        auto total = [&](int i) { return splits > 1 ? left[i] + others[i] : left[i]; };
        const int weight_row = a.gated ? n / 8 * 16 + n % 8 : n;
#pragma unroll
        for (int i = 0; i < Shape::kItems; ++i) {
            const int r = first_row + i * rows_at_once;
            if (r >= a.rows) break;
            RowNorm by = {1.f, 0.f};
            if (kNormed)
                by = row_norm(a.norm, a.depth, row_scales[r].scale, total(row_sums_at + r),
                              total(row_sums_at + kMostRows + r));
            auto product = [&](int m) {
                float x = total(r * p.sum_pitch + m);
                if (norm_rows) x -= by.mean * total(a.rows * p.sum_pitch + m);
                if (kNormed) x *= by.inverse;
                if (norm_rows) x += total((a.rows + 1) * p.sum_pitch + m);
                return x;
            };
            float y = activate(product(weight_row) + to_float(bias), a.activation);
            if (a.gated) y *= product(weight_row + 8) + to_float(up_bias);
            if (a.residual) y += to_float(residual[i]);
            static_cast<T*>(a.output)[r * a.output_stride + at.output + n] = from_float<T>(y);
        }
    }
}

}  // namespace offload
