// Decode attention's math for float16 and bfloat16, by tensor cores.
//
// Both products have the cache as their 16-row operand and 8 queries as their columns, so that a
// group of 1 to 8 queries wastes the least: scores^T = K q^T for 16 columns a warp, then output^T =
// V^T weights^T for a quarter of the head's elements a warp. Between the two the scores cross
// shared memory once, and every warp works out all weights of its queries itself; so nothing of a
// warp's sums is another warp's, and there is nothing to merge at an item's end. Weights are
// rounded to the caches' dtype for the second product, as in flash attention.
//
// Four warps serve 8 * kQueries queries; larger groups have up to kMostTeams such teams in one CTA,
// which share its tiles of K and V. Head sizes are padded with zeros to kDim.
#pragma once
#include "decode_attention_tiles.cuh"

namespace offload {
namespace decode {

// How the math lies in shared memory, for the kernel and for the launcher.
template <int kDim, int kQueries>
struct MmaShape {
    static constexpr int kTeam = 128;         // threads
    static constexpr int kColumns = 64;       // of a tile
    static constexpr int kChunks = kDim / 8;  // of 16 bytes a row
    // Rows of eight consecutive addresses must lie in different banks: by swapping chunks where a
    // row is a whole number of 128-byte lines, by an odd number of chunks elsewhere.
    static constexpr bool kSwizzled = kChunks % 8 == 0;
    static constexpr int kRow = (kSwizzled ? kChunks : kChunks | 1) * 16;  // bytes
    static constexpr int kTile = kColumns * kRow;
    static constexpr int kScores = kColumns + 8;  // floats a query
    static constexpr int kMostTeams = kQueries < 4 ? 1 : kDim > 64 ? 2 : 3;

    __host__ __device__ static constexpr int queries(int teams) { return 8 * kQueries * teams; }
    __host__ __device__ static constexpr int stage_bytes(int teams) {
        return 2 * kTile + queries(teams) * kRow;
    }
    __host__ __device__ static constexpr int shared_bytes(int teams, int stages) {
        return stages * stage_bytes(teams) + queries(teams) * kScores * 4;
    }
    __device__ static uint32_t place(int row, int chunk) {
        return row * kRow + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
    }
};

template <typename T, int kDim, int kQueries>
struct MmaMath {
    using Element = T;
    using Shape = MmaShape<kDim, kQueries>;
    static constexpr int kMostThreads = Shape::kTeam * Shape::kMostTeams;
    static constexpr int kLeastCtas = kQueries == 4 || kDim > 128 ? 1 : kDim > 80 ? 2 : 3;
    static constexpr int kCopiesTogether = Shape::kMostTeams > 1 ? 2 : 16;
    static constexpr int kSteps = kDim / 16;         // of the first product, 16 elements each
    static constexpr int kParts = (kSteps + 3) / 4;  // of the output a warp has, 16 elements each
    static constexpr int kColumns = Shape::kColumns;
    static constexpr int kCopies = kColumns * Shape::kChunks;  // of 16 bytes, for K or V

    __device__ static int32_t columns(const Params&) { return kColumns; }

    const int threads, warp, lane;
    const int team_query;  // the first of this team's
    const uint32_t stages, queries;
    float* const scores;
    const uint64_t policy;
    const float scale;
    float output[kParts][kQueries][4];
    float most[kQueries], sum[kQueries];  // of query lane / 4; each lane has a quarter of its sum
    float slope[kQueries][2];             // of queries lane % 4 * 2 + {0, 1}
    uint32_t query[kQueries == 1 ? kSteps : 1][2];

    __device__ MmaMath(const Params& p, unsigned char* shared)
        : threads(Shape::kMostTeams == 1 ? Shape::kTeam : blockDim.x),
          warp(threadIdx.x / 32 % 4),
          lane(threadIdx.x % 32),
          team_query(threadIdx.x / Shape::kTeam * 8 * kQueries),
          stages(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
          queries(stages + p.stages * 2 * Shape::kTile),
          scores(reinterpret_cast<float*>(shared +
                                          p.stages * Shape::stage_bytes(threads / Shape::kTeam))),
          policy(l2_policy(p.head_tiles == 1)),
          scale(score_scale(p)) {}

    __device__ uint32_t keys(int stage) const { return stages + stage * 2 * Shape::kTile; }
    __device__ uint32_t values(int stage) const { return keys(stage) + Shape::kTile; }
    // A ring too: while one item's queries are in use, at most p.stages - 1 more were loaded.
    __device__ uint32_t queries_of(const Params& p, const Cursor& at) const {
        const int rows = Shape::queries(threads / Shape::kTeam);
        return queries + at.segment % p.stages * rows * Shape::kRow;
    }

    // Where a tile's keys or values begin in `cache`.
    __device__ const T* tile_of(const Params& p, const void* cache, const Cursor& at) const {
        return static_cast<const T*>(cache) + at.b * p.cache_batch + at.kv_head(p) * p.cache_head +
               (static_cast<int64_t>(at.see.first) + static_cast<int64_t>(at.tile) * kColumns) *
                   p.head_dim;
    }

    __device__ void load(const Params& p, int stage, const Cursor& at) {
        if (at.fresh) load_queries(p, at);
        const T* key = tile_of(p, p.key, at);
        const T* value = tile_of(p, p.value, at);
        const int rows = at.see.columns - at.tile * kColumns;
        if (rows >= kColumns && p.head_dim == kDim) {  // contiguous, and no column to hide
            copy_whole(keys(stage), key);
            copy_whole(values(stage), value);
        } else {
            copy_seen(p, keys(stage), key, rows);
            copy_seen(p, values(stage), value, rows);
        }
    }

    __device__ void load_early(const Params& p, int stage, const Cursor& at) {
        const T* key = tile_of(p, p.key, at);
        const T* value = tile_of(p, p.value, at);
        const int rows = at.see.columns - at.tile * kColumns;
        if (rows > kColumns && p.head_dim == kDim) {
            copy_whole(keys(stage), key);
            copy_whole(values(stage), value);
            return;
        }
        const int last = rows > kColumns ? -1 : rows - 1;
        copy_seen(p, keys(stage), key, rows, last);
        copy_seen(p, values(stage), value, rows, last);
        const int i = threadIdx.x / 2;  // 32 bytes of the last column
        if (last >= 0 && i * 16 < p.head_dim)
            expect_in_l2((threadIdx.x % 2 ? value : key) + last * p.head_dim + i * 16);
    }

    __device__ void load_late(const Params& p, int stage, const Cursor& at) {
        const int last = at.see.columns - at.tile * kColumns - 1;
        const int chunk = threadIdx.x / 2;
        const bool key = threadIdx.x % 2 == 0;
        const bool mine = last >= 0 && last < kColumns && chunk < Shape::kChunks;
        uint4 column = {0, 0, 0, 0};
        if (mine && chunk * 8 < p.head_dim)
            column = __ldcg(reinterpret_cast<const uint4*>(tile_of(p, key ? p.key : p.value, at) +
                                                           last * p.head_dim + chunk * 8));
        if (at.fresh) {
            const T* from = queries_from(p, at);
            const int heads = at.heads(p);
            const uint32_t to = queries_of(p, at);
#pragma unroll 2
            for (int i = threadIdx.x; i < Shape::queries(threads / Shape::kTeam) * Shape::kChunks;
                 i += threads) {
                const int row = i / Shape::kChunks, part = i % Shape::kChunks;
                uint4 x = {0, 0, 0, 0};
                if (row < heads && part * 8 < p.head_dim)
                    x = __ldcg(
                        reinterpret_cast<const uint4*>(from + row * p.query_head + part * 8));
                store_shared(to + Shape::place(row, part), x);
            }
        }
        if (mine)
            store_shared((key ? keys(stage) : values(stage)) + Shape::place(last, chunk), column);
    }

    __device__ void copy_whole(uint32_t to, const T* from) const {
#pragma unroll kCopiesTogether
        for (int first = 0; first < kCopies; first += Shape::kTeam) {
            const int i = first * (threads / Shape::kTeam) + static_cast<int>(threadIdx.x);
            if (Shape::kMostTeams > 1 && i >= kCopies) break;
            copy_async_once(to + Shape::place(i / Shape::kChunks, i % Shape::kChunks), from + i * 8,
                            16, policy);
        }
    }

    // Columns that are not seen become zeros without being read: a weight of 0 hides no NaN.
    // Column `but` is left out.
    __device__ void copy_seen(const Params& p, uint32_t to, const T* from, int rows,
                              int but = -1) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kCopies; i += threads) {
            const int row = i / Shape::kChunks, chunk = i % Shape::kChunks;
            if (row == but) continue;
            const bool seen = row < rows && chunk * 8 < p.head_dim;
            const void* source = seen ? from + row * p.head_dim + chunk * 8 : p.key;
            copy_async_once(to + Shape::place(row, chunk), source, seen ? 16 : 0, policy);
        }
    }

    __device__ const T* queries_from(const Params& p, const Cursor& at) const {
        return static_cast<const T*>(p.query) + at.b * p.query_batch + at.head(p) * p.query_head;
    }

    __device__ void load_queries(const Params& p, const Cursor& at) const {
        const T* from = queries_from(p, at);
        const int heads = at.heads(p);
        const uint32_t to = queries_of(p, at);
#pragma unroll 1
        for (int i = threadIdx.x; i < Shape::queries(threads / Shape::kTeam) * Shape::kChunks;
             i += threads) {
            const int row = i / Shape::kChunks, chunk = i % Shape::kChunks;
            const bool real = row < heads && chunk * 8 < p.head_dim;
            copy_async<16>(to + Shape::place(row, chunk),
                           real ? from + row * p.query_head + chunk * 8 : from, real ? 16 : 0);
        }
    }

    __device__ void begin(const Params& p, const Cursor& at) {
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
            most[n] = -INFINITY;
            sum[n] = 0.f;
#pragma unroll
            for (int part = 0; part < kParts; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) output[part][n][i] = 0.f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int head = team_query + n * 8 + lane % 4 * 2 + i;
                slope[n][i] =
                    p.slopes && head < at.heads(p) ? p.slopes[at.head(p) + head] * kLog2e : 0.f;
            }
        }
        if constexpr (kQueries == 1) {
            const uint32_t from = queries_of(p, at);
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                load_matrix_pair(query[step],
                                 from + Shape::place(lane % 8, step * 2 + lane / 8 % 2));
        }
    }

    __device__ void tile(const Params& p, int stage, const Cursor& at) {
        write_scores(p, keys(stage), at);
        __syncthreads();
        uint32_t weights[kQueries][kColumns / 16][2];
#pragma unroll
        for (int n = 0; n < kQueries; ++n) weigh(n, weights[n]);
        const uint32_t from = values(stage);
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step) {
            const int row = step * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int sixteen = warp + part * 4;
                if (kSteps % 4 != 0 && sixteen >= kSteps) continue;
                uint32_t v[4];
                load_matrices_transposed(v, from + Shape::place(row, sixteen * 2 + lane / 8 % 2));
#pragma unroll
                for (int n = 0; n < kQueries; ++n)
                    multiply<T>(output[part][n], v, weights[n][step][0], weights[n][step][1]);
            }
        }
    }

    // The scores of this warp's 16 columns and its team's queries.
    __device__ void write_scores(const Params& p, uint32_t from, const Cursor& at) {
        float x[kQueries][4] = {};
        const int row = warp * 16 + lane % 16;
        if constexpr (kQueries == 1) {
            float odd[4] = {};  // two sums, since one would be a chain of kSteps products
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t k[4];
                load_matrices(k, from + Shape::place(row, step * 2 + lane / 16));
                multiply<T>(step % 2 ? odd : x[0], k, query[step][0], query[step][1]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) x[0][i] += odd[i];
        } else {
            const uint32_t q = queries_of(p, at);
            const int query_row = team_query + lane % 8 + lane / 16 * 8;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t k[4];
                load_matrices(k, from + Shape::place(row, step * 2 + lane / 16));
#pragma unroll
                for (int n = 0; n < kQueries; n += 2) {
                    uint32_t two[4];
                    load_matrices(two,
                                  q + Shape::place(query_row + n * 8, step * 2 + lane / 8 % 2));
                    multiply<T>(x[n], k, two[0], two[1]);
                    multiply<T>(x[n + 1], k, two[2], two[3]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int in_tile = warp * 16 + lane / 4 + i / 2 * 8;
                const int from_last = at.tile * kColumns + in_tile - (at.see.columns - 1);
                const float s =
                    score(p, x[n][i], scale, slope[n][i % 2], from_last, tanh_approximately);
                const int q = team_query + n * 8 + lane % 4 * 2 + i % 2;
                scores[q * Shape::kScores + in_tile] = from_last > 0 ? -INFINITY : s;
            }
        }
    }

    // The weights of query lane / 4 (of eight) as the second product takes them; rescales what was
    // summed before where there is a new maximum.
    __device__ void weigh(int n, uint32_t (&weights)[kColumns / 16][2]) {
        const float* from =
            scores + (team_query + n * 8 + lane / 4) * Shape::kScores + lane % 4 * 2;
        float2 x[kColumns / 16][2];
        float now = most[n];
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                x[step][half] = *reinterpret_cast<const float2*>(from + step * 16 + half * 8);
                now = fmaxf(now, fmaxf(x[step][half].x, x[step][half].y));
            }
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
        const float base = now == -INFINITY ? 0.f : now;  // nothing seen yet: all weights are 0
        const float shrink = exp2_approximately(most[n] - base);
        most[n] = now;
        float total = 0.f;
#pragma unroll
        for (int step = 0; step < kColumns / 16; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float low = exp2_approximately(x[step][half].x - base);
                const float high = exp2_approximately(x[step][half].y - base);
                total += low + high;
                weights[step][half] = pack<T>(low, high);
            }
        sum[n] = sum[n] * shrink + total;
        if (__any_sync(0xffffffffu, shrink != 1.f)) rescale(n, shrink);
    }

    // Multiplies the sums of each query by `factor`, which lane 4 * query has.
    __device__ void rescale(int n, float factor) {
        const float even = __shfl_sync(0xffffffffu, factor, lane % 4 * 8);
        const float odd = __shfl_sync(0xffffffffu, factor, lane % 4 * 8 + 4);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < 4; ++i) output[part][n][i] *= i % 2 ? odd : even;
    }

    __device__ float whole_sum(int n) const {
        float x = sum[n];
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        return x;
    }

    // Calls write(query of the item, element of the head, value) for all that this lane has.
    template <typename Write>
    __device__ void each(const Params& p, const Cursor& at, Write write) const {
        const int heads = at.heads(p);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int n = 0; n < kQueries; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int q = team_query + n * 8 + lane % 4 * 2 + i % 2;
                    const int element = (warp + part * 4) * 16 + lane / 4 + i / 2 * 8;
                    if (q < heads && element < p.head_dim) write(q, element, output[part][n][i]);
                }
    }

    __device__ void store(const Params& p, const Cursor& at) {
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
            const int q = team_query + n * 8 + lane / 4;
            const float total = whole_sum(n);
            rescale(n, q < at.heads(p) ? normaliser(p, at.head(p) + q,
                                                    at.see.first + at.see.columns, most[n], total)
                                       : 0.f);
        }
        T* to = static_cast<T*>(p.output) +
                (static_cast<int64_t>(at.b) * p.heads + at.head(p)) * p.head_dim;
        each(p, at,
             [&](int q, int element, float x) { to[q * p.head_dim + element] = from_float<T>(x); });
    }

    __device__ void store_part(const Params& p, const Cursor& at, int64_t slot) const {
        float* to = p.sums + slot * p.tile_heads * p.padded_dim;
        each(p, at,
             [&](int q, int element, float x) { __stcg(to + q * p.padded_dim + element, x); });
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
            const int q = team_query + n * 8 + lane / 4;
            const float total = whole_sum(n);
            if (warp == 0 && lane % 4 == 0 && q < at.heads(p))
                __stcg(&p.stats[slot * p.tile_heads + q], make_float2(most[n], total));
        }
    }
};

}  // namespace decode
}  // namespace offload
