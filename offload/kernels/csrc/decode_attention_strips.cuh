// What one warp does with strips of 16 columns: the math of decode_attention_clusters.cuh.
//
// Both products have the cache as their 16-row operand and 8 queries as their columns: scores^T =
// K q^T, output^T = V^T weights^T. Weights get from one to the other by movmatrix. Queries come
// from global memory straight into registers, the only thing besides each sequence's last column
// that is read after the wait for the kernel ahead.
#pragma once
#include "decode_attention_pieces.cuh"

namespace offload {
namespace decode {

// How the kernel lies in shared memory, for it and for the launcher: a ring of strips a warp, which
// the warp's sums take the place of; the warps' statistics; what the cluster's CTAs send.
template <int kDim, int kQueries>
struct StripShape {
    static constexpr int kHeads = 8 * kQueries;
    static constexpr int kChunks = kDim / 8;  // of 16 bytes a row
    // See MmaShape.
    static constexpr bool kSwizzled = kChunks % 8 == 0;
    static constexpr int kRow = (kSwizzled ? kChunks : kChunks | 1) * 16;  // bytes
    static constexpr int kHalf = kStrip * kRow;
    static constexpr int kQuads = kDim / 4;
    // Floats a query of a warp's sums: lanes of different queries write to different banks.
    static constexpr int kSums = kDim + 4;

    __host__ __device__ static constexpr int ring_bytes(int stages) {
        return stages * 2 * kHalf > kHeads * kSums * 4 ? stages * 2 * kHalf : kHeads * kSums * 4;
    }
    static constexpr int strip_bytes() { return 2 * kHalf; }
    // Fours of results that a CTA has at most.
    __host__ __device__ static constexpr int slice(int cluster) {
        return (kHeads * kQuads - 1) / cluster + 1;
    }
    __host__ __device__ static constexpr int shared_bytes(int warps, int stages, int cluster) {
        return warps * ring_bytes(stages) + warps * kHeads * 8 +
               cluster * (slice(cluster) * 16 + kHeads * 8) + 16;
    }
    // Floats a CTA in the workspace: its slice, then its queries' statistics.
    __host__ __device__ static constexpr int slot(int cluster) {
        return slice(cluster) * 4 + kHeads * 2;
    }
    __device__ static uint32_t place(int row, int chunk) {
        return row * kRow + (kSwizzled ? chunk ^ (row & 7) : chunk) * 16;
    }
    // From the address of place(row, 0 or 1) to that of an even number of chunks further on. These
    // two are for numbers known to the compiler; strips begin at multiples of 128.
    __device__ static uint32_t chunks_on(uint32_t at, int chunks) {
        if (!kSwizzled) return at + chunks * 16;
        return (at ^ chunks % 8 * 16) + chunks / 8 * 128;
    }
    // From the address of the first 16 bytes that lane `lane` of a warp copies to those of its
    // `round`-th.
    __device__ static uint32_t rounds_on(uint32_t at, int lane, int round) {
        if (kSwizzled) return (at ^ round * (32 / kChunks) % 8 * 16) + round * 512;
        const int row = (round * 32 + lane) / kChunks - lane / kChunks;
        return at + round * 512 + row * (kRow - kChunks * 16);
    }
};

// One warp's work on its strips: every `step`-th from `first` on.
template <typename T, int kDim, int kQueries>
struct StripMath {
    using Shape = StripShape<kDim, kQueries>;
    static constexpr int kSteps = kDim / 16;                      // of 16 elements
    static constexpr int kCopies = kStrip * Shape::kChunks / 32;  // of K or V, by a lane

    const int lane, heads;
    const uint32_t ring;  // this warp's
    const Piece& piece;
    const T* const key;
    const T* const value;
    const uint64_t policy;
    const T* const queries;  // this lane's first pair of query lane / 4
    const float scale;
    float output[kSteps][kQueries][4];
    // Of queries lane % 4 * 2 + {0, 1} of eight; a lane has the sum over its own columns.
    float most[kQueries][2], sum[kQueries][2], slope[kQueries][2];
    uint32_t query[kQueries][kSteps][2];

    __device__ StripMath(const Params& p, const Piece& piece, uint32_t ring)
        : lane(threadIdx.x % 32),
          heads(piece.heads(p)),
          ring(ring),
          piece(piece),
          key(column(p, p.key)),
          value(column(p, p.value)),
          policy(l2_policy(p.head_tiles == 1)),
          queries(static_cast<const T*>(p.query) + piece.b * p.query_batch +
                  (piece.head(p) + lane / 4) * p.query_head + lane % 4 * 2),
          scale(score_scale(p)) {
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                most[n][i] = -INFINITY;
                sum[n][i] = 0.f;
                const int head = n * 8 + lane % 4 * 2 + i;
                slope[n][i] =
                    p.slopes && head < heads ? p.slopes[piece.head(p) + head] * kLog2e : 0.f;
            }
#pragma unroll
            for (int part = 0; part < kSteps; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) output[part][n][i] = 0.f;
        }
    }

    // The first visible column in `cache`.
    __device__ const T* column(const Params& p, const void* cache) const {
        return static_cast<const T*>(cache) + piece.b * p.cache_batch +
               piece.kv_head(p) * p.cache_head + static_cast<int64_t>(piece.see.first) * p.head_dim;
    }
    __device__ uint32_t keys(int stage) const { return ring + stage * 2 * Shape::kHalf; }
    __device__ uint32_t values(int stage) const { return keys(stage) + Shape::kHalf; }
    // The row of a strip at which the sequence's last visible column is; not in the strip: kStrip.
    __device__ int last_row(int32_t strip) const {
        const int32_t row = piece.see.columns - 1 - strip * kStrip;
        return row < 0 || row > kStrip ? kStrip : row;
    }

    // Columns that are not seen become zeros without being read: a weight of 0 hides no NaN. Row
    // `but` is left out.
    __device__ void copy(const Params& p, int stage, int32_t strip, int but) const {
        const int64_t offset = static_cast<int64_t>(strip) * kStrip * p.head_dim;
        const int rows = piece.see.columns - strip * kStrip;
        if (rows >= kStrip && but == kStrip && p.head_dim == kDim) {  // contiguous
            const uint32_t to =
                keys(stage) + Shape::place(lane / Shape::kChunks, lane % Shape::kChunks);
            copy_whole(to, key + offset + lane * 8);
            copy_whole(to + Shape::kHalf, value + offset + lane * 8);
        } else {
            copy_seen(p, stage, offset, rows, but);
        }
    }
    __device__ void copy_whole(uint32_t to, const T* from) const {
#pragma unroll
        for (int j = 0; j < kCopies; ++j)
            copy_async_once(Shape::rounds_on(to, lane, j), from + j * 256, 16, policy);
    }
    __device__ void copy_seen(const Params& p, int stage, int64_t offset, int rows, int but) const {
#pragma unroll 1
        for (int i = lane; i < kStrip * Shape::kChunks; i += 32) {
            const int row = i / Shape::kChunks, chunk = i % Shape::kChunks;
            if (row == but) continue;
            const bool seen = row < rows && chunk * 8 < p.head_dim;
            const int64_t at = seen ? offset + row * p.head_dim + chunk * 8 : 0;
            const uint32_t to = keys(stage) + Shape::place(row, chunk);
            copy_async_once(to, key + at, seen ? 16 : 0, policy);
            copy_async_once(to + Shape::kHalf, value + at, seen ? 16 : 0, policy);
        }
    }

    // What the kernel ahead wrote: the queries, and the last column where it is in one of the
    // strips that were copied without it: strip `strip`, in `stage`; below 0: in none.
    __device__ void read_late(const Params& p, int32_t strip, int stage) {
        uint4 last[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        const int row = strip < 0 ? kStrip : last_row(strip);
        if (row < kStrip && lane * 8 < p.head_dim) {
            const int64_t offset =
                static_cast<int64_t>(piece.see.columns - 1) * p.head_dim + lane * 8;
            last[0] = __ldcg(reinterpret_cast<const uint4*>(key + offset));
            last[1] = __ldcg(reinterpret_cast<const uint4*>(value + offset));
        }
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
            const T* from = queries + n * 8 * p.query_head;
            const bool real = n * 8 + lane / 4 < heads;
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int element = step * 16 + half * 8;
                    query[n][step][half] = 0;
                    if (real && element < p.head_dim)
                        query[n][step][half] =
                            __ldcg(reinterpret_cast<const uint32_t*>(from + element));
                }
        }
        if (row < kStrip && lane < Shape::kChunks) {
            store_shared(keys(stage) + Shape::place(row, lane), last[0]);
            store_shared(values(stage) + Shape::place(row, lane), last[1]);
        }
    }

    __device__ void add(const Params& p, int stage, int32_t strip) {
        float x[kQueries][4] = {}, odd[kQueries][4] = {};  // a sum of its own for every other step
        const uint32_t from = keys(stage) + Shape::place(lane % 16, lane / 16);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t k[4];
            load_matrices(k, Shape::chunks_on(from, step * 2));
#pragma unroll
            for (int n = 0; n < kQueries; ++n)
                multiply<T>(step % 2 ? odd[n] : x[n], k, query[n][step][0], query[n][step][1]);
        }
        uint32_t weights[kQueries][2];
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = strip * kStrip + lane / 4 + i / 2 * 8;
                const int from_last = column - (piece.see.columns - 1);
                const float s = score(p, x[n][i] + odd[n][i], scale, slope[n][i % 2], from_last,
                                      tanh_approximately);
                x[n][i] = from_last > 0 ? -INFINITY : s;
            }
            weigh(n, x[n], weights[n]);
        }
        const uint32_t v_from =
            values(stage) + Shape::place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int part = 0; part < kSteps; ++part) {
            uint32_t v[4];
            load_matrices_transposed(v, Shape::chunks_on(v_from, part * 2));
#pragma unroll
            for (int n = 0; n < kQueries; ++n)
                multiply<T>(output[part][n], v, weights[n][0], weights[n][1]);
        }
    }

    // Scores become weights as the second product takes them; what was summed before is rescaled
    // where there is a new maximum.
    __device__ void weigh(int n, float (&x)[4], uint32_t (&weights)[2]) {
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float now = fmaxf(x[i], x[i + 2]);
#pragma unroll
            for (int step = 4; step < 32; step <<= 1)
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, step));
            now = fmaxf(now, most[n][i]);
            const float base = now == -INFINITY ? 0.f : now;  // nothing seen: all weights are 0
            shrink[i] = exp2_approximately(most[n][i] - base);
            most[n][i] = now;
            x[i] = exp2_approximately(x[i] - base);
            x[i + 2] = exp2_approximately(x[i + 2] - base);
            sum[n][i] = sum[n][i] * shrink[i] + (x[i] + x[i + 2]);
        }
        weights[0] = transpose_matrix(pack<T>(x[0], x[1]));
        weights[1] = transpose_matrix(pack<T>(x[2], x[3]));
        if (!__any_sync(0xffffffffu, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
        for (int part = 0; part < kSteps; ++part)
#pragma unroll
            for (int i = 0; i < 4; ++i) output[part][n][i] *= shrink[i % 2];
    }

    // To sums[query][Shape::kSums] and stats[query], both shared memory.
    __device__ void write(float* sums, float2* stats) const {
#pragma unroll
        for (int n = 0; n < kQueries; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int q = n * 8 + lane % 4 * 2 + i;
                float total = sum[n][i];
#pragma unroll
                for (int step = 4; step < 32; step <<= 1)
                    total += __shfl_xor_sync(0xffffffffu, total, step);
                if (q >= heads) continue;
                if (lane < 4) stats[q] = make_float2(most[n][i], total);
                float* to = sums + q * Shape::kSums + lane / 4;
#pragma unroll
                for (int part = 0; part < kSteps; ++part) {
                    to[part * 16] = output[part][n][i];
                    to[part * 16 + 8] = output[part][n][i + 2];
                }
            }
    }
};

}  // namespace decode
}  // namespace offload
