// Decode attention where few items must fill the GPU: few sequences, or short ones. What counts is
// how many steps follow each other, not bytes.
//
// An item (one KV head of one sequence, with up to 16 of its queries) belongs to one or more
// clusters of CTAs. Its columns go in strips of 16 to all warps of these, each of which reads,
// weighs and sums its own strips alone, without a barrier. Then three merges, each in a fixed
// order: the warps of a CTA through its shared memory; the CTAs of a cluster by writing into each
// other's, each CTA having a slice of the results; and, where an item has several clusters, their
// CTAs of one slice through the workspace, by the last of them (by a counter). Before sm_90 a
// cluster is one CTA.
//
// Both products have the cache as their 16-row operand and 8 queries as their columns: scores^T =
// K q^T, output^T = V^T weights^T. Weights get from one to the other by movmatrix. Queries come
// from global memory straight into registers, the only thing besides each sequence's last column
// that is read after the wait for the kernel ahead.
#pragma once
#include "decode_attention.cuh"

namespace offload {
namespace decode {

constexpr int kStrip = 16;            // columns
constexpr int kMostClusterRows = 32;  // sequences: one a lane
constexpr int kMostCluster = 16;      // CTAs
constexpr int kMostStripWarps = 8;    // of a CTA

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

// What a cluster does: strips [begin, end) of an item, as one of `parts` clusters, the first of
// which is `first`.
struct Piece : Place {
    Visible see;
    int32_t strips;  // of the item
    int32_t begin, end;
    int32_t parts, first;
};

// Finds the piece of cluster `index` of `clusters`; false where there are fewer pieces. Every warp
// does it by itself. Pieces are as short as makes them no more than there are clusters.
__device__ __forceinline__ bool find_piece(const Params& p, int32_t index, int32_t clusters,
                                           Piece* piece) {
    if (clusters == p.batch * p.items) {  // an item each, whatever the lengths
        piece->b = index / p.items;
        piece->item = index - piece->b * p.items;
        piece->see = visible(p, piece->b);
        piece->strips = tiles_of(piece->see.columns, kStrip);
        piece->begin = 0;
        piece->end = piece->strips;
        piece->parts = 1;
        piece->first = index;
        return true;
    }
    const int lane = threadIdx.x % 32;
    Visible see = {0, 0};
    int32_t strips = 0;
    if (lane < p.batch) {
        see = visible(p, lane);
        strips = tiles_of(see.columns, kStrip);
    }
    int64_t total = strips;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int64_t below = __shfl_up_sync(0xffffffffu, total, step);
        if (lane >= step) total += below;
    }
    total = __shfl_sync(0xffffffffu, total, 31) * p.items;
    int32_t longest = max(static_cast<int32_t>(quotient(total - 1, clusters)) + 1, p.least_strips);
    int32_t parts, upto;
    while (true) {
        parts = strips > 0 ? (strips - 1) / longest + 1 : 0;
        upto = parts * p.items;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int32_t below = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += below;
        }
        if (__shfl_sync(0xffffffffu, upto, 31) <= clusters) break;
        // The next length at which some sequence has a part less.
        int32_t next = parts > 1 ? (strips - 1) / (parts - 1) + 1 : INT_MAX;
#pragma unroll
        for (int step = 16; step > 0; step >>= 1)
            next = min(next, __shfl_xor_sync(0xffffffffu, next, step));
        longest = next;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, index < upto);
    if (reached == 0) return false;
    const int row = __ffs(reached) - 1;
    const int32_t before = __shfl_sync(0xffffffffu, upto - parts * p.items, row);
    piece->b = row;
    piece->parts = __shfl_sync(0xffffffffu, parts, row);
    piece->strips = __shfl_sync(0xffffffffu, strips, row);
    piece->see.first = __shfl_sync(0xffffffffu, see.first, row);
    piece->see.columns = __shfl_sync(0xffffffffu, see.columns, row);
    piece->item = (index - before) / piece->parts;
    const int32_t part = (index - before) - piece->item * piece->parts;
    piece->first = index - part;
    const int32_t each = piece->strips / piece->parts, more = piece->strips - each * piece->parts;
    piece->begin = part * each + min(part, more);
    piece->end = piece->begin + each + (part < more);
    return true;
}

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
                float s = (x[n][i] + odd[n][i]) * scale;
                if (p.softcap > 0.f) s = p.softcap * kLog2e * tanh_approximately(s);
                if (p.slopes) s += slope[n][i % 2] * static_cast<float>(from_last);
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

// Adds `count` parts of some results: of part i, at(i) is the maximum and the sum of weights,
// load(j, i) fetches the results and add(j, weight) adds them, j being i % kTogether. Returns the
// maximum and the sum of all.
template <int kTogether, typename At, typename Load, typename Add>
__device__ __forceinline__ float2 merge(int count, At at, Load load, Add add) {
    float most = -INFINITY, sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether)
#pragma unroll
        for (int j = 0; j < kTogether; ++j) most = fmaxf(most, at(min(first + j, count - 1)).x);
    const float base = most == -INFINITY ? 0.f : most;
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
        float2 one[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            one[j] = at(min(first + j, count - 1));
            load(j, min(first + j, count - 1));
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const float weight = exp2_approximately(one[j].x - base);
            if (first + j >= count) break;
            sum += one[j].y * weight;
            add(j, weight);
        }
    }
    return make_float2(most, sum);
}

template <typename T, int kDim, int kQueries>
__global__ void __launch_bounds__(32 * kMostStripWarps, kQueries == 1 && kDim <= 128 ? 2 : 1)
    decode_attention_clusters_kernel(const __grid_constant__ Params p) {
    using Shape = StripShape<kDim, kQueries>;
    extern __shared__ __align__(128) unsigned char shared[];
    let_next_kernel_begin();
    const int cluster = p.cluster, threads = blockDim.x, warps = threads / 32;
    const int cta = blockIdx.x, rank = cta % cluster, warp = threadIdx.x / 32;
    Piece piece;
    if (!find_piece(p, cta / cluster, gridDim.x / cluster, &piece)) return;
    // See StripShape.
    const int ring_bytes = Shape::ring_bytes(p.stages);
    unsigned char* const ring = shared + warp * ring_bytes;
    StripMath<T, kDim, kQueries> math(p, piece,
                                      static_cast<uint32_t>(__cvta_generic_to_shared(ring)));
    float2* const stats = reinterpret_cast<float2*>(shared + warps * ring_bytes);
    float2* const sent_stats = stats + warps * Shape::kHeads;  // [cluster, kHeads]
    float* const sent = reinterpret_cast<float*>(sent_stats + cluster * Shape::kHeads);
    uint64_t* const inbox = reinterpret_cast<uint64_t*>(sent + cluster * Shape::slice(cluster) * 4);
    // Fours of the item's results, of a CTA's slice of them, and of this one's.
    const int heads = piece.heads(p), all = heads * Shape::kQuads;
    const int slice = (all - 1) / cluster + 1, own = max(min(slice, all - rank * slice), 0);
    if (threadIdx.x == 0) open_inbox(inbox, cluster * (own * 16 + heads * 8));
    __syncwarp();
    inbox_is_open();

    const int step = cluster * warps;
    int32_t ahead = piece.begin + rank * warps + warp, at = ahead, late = -1;
    int late_stage = 0;
    for (int stage = 0; stage < p.stages; ++stage) {
        if (ahead < piece.end) {
            const int last = math.last_row(ahead);
            if (last < kStrip) {
                late = ahead;
                late_stage = stage;
            }
            math.copy(p, stage, ahead, last);
            ahead += step;
        }
        end_copies();
    }
    inboxes_are_open();
    wait_for_previous_kernel();
    math.read_late(p, late, late_stage);
    for (int stage = 0; at < piece.end; at += step) {
        wait_for_copies(p.stages - 1);
        __syncwarp();  // the strip is here for all lanes
        math.add(p, stage, at);
        __syncwarp();  // all lanes are done with it
        if (ahead < piece.end) {
            math.copy(p, stage, ahead, kStrip);
            ahead += step;
        }
        end_copies();
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }

    // The CTA's warps, each thread some fours of the item's results; these go to the CTA whose
    // slice they are in, and the statistics to all.
    math.write(reinterpret_cast<float*>(ring), stats + warp * Shape::kHeads);
    __syncthreads();
    constexpr int kTogether = 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += threads) {
        const int head = i / Shape::kQuads, quad = i % Shape::kQuads;
        float4 x = {0.f, 0.f, 0.f, 0.f}, y[kTogether];
        const float2 merged = merge<kTogether>(
            warps, [&](int w) { return stats[w * Shape::kHeads + head]; },
            [&](int j, int w) {
                y[j] = *reinterpret_cast<const float4*>(shared + w * ring_bytes +
                                                        (head * Shape::kSums + quad * 4) * 4);
            },
            [&](int j, float weight) {
                x.x += y[j].x * weight;
                x.y += y[j].y * weight;
                x.z += y[j].z * weight;
                x.w += y[j].w * weight;
            });
        const int to = i / slice;
        send(sent + (rank * slice + i - to * slice) * 4, inbox, to, x);
        if (quad < cluster) send(sent_stats + rank * Shape::kHeads + head, inbox, quad, merged);
    }
    wait_for_inbox(inbox);

    // The cluster's CTAs, each thread some of this CTA's slice.
    const int begin = rank * slice * 4, count = own * 4;
    const int first_head = piece.head(p), end = piece.see.first + piece.see.columns;
    T* const output = static_cast<T*>(p.output) +
                      (static_cast<int64_t>(piece.b) * p.heads + first_head) * p.head_dim;
    const auto store = [&](int head, int element, float2 merged, float x) {
        if (element < p.head_dim)
            output[head * p.head_dim + element] =
                from_float<T>(x * normaliser(p, first_head + head, end, merged.x, merged.y));
    };
    const int slot_floats = Shape::slot(cluster);
    const auto slot_of_part = [&](int part) {
        return p.sums + (static_cast<int64_t>(piece.first + part) * cluster + rank) * slot_floats;
    };
    float* const slot = p.sums + static_cast<int64_t>(cta) * slot_floats;
    const int slot_stats = Shape::slice(cluster) * 4;
#pragma unroll 1
    for (int e = threadIdx.x; e < count; e += threads) {
        const int head = (begin + e) / kDim, element = (begin + e) % kDim;
        float x = 0.f, y[kTogether];
        const float2 merged = merge<kTogether>(
            cluster, [&](int c) { return sent_stats[c * Shape::kHeads + head]; },
            [&](int j, int c) { y[j] = sent[c * slice * 4 + e]; },
            [&](int j, float weight) { x += y[j] * weight; });
        if (piece.parts == 1) {
            store(head, element, merged, x);
            continue;
        }
        __stcg(slot + e, x);
        if (e == 0 || element == 0)
            __stcg(reinterpret_cast<float2*>(slot + slot_stats) + head, merged);
    }
    if (piece.parts == 1 || count == 0) return;

    // The item's clusters.
    bool* const is_last = reinterpret_cast<bool*>(stats);
    __syncthreads();  // the release below covers what all threads wrote
    if (threadIdx.x == 0) {
        uint32_t* const counter = p.counters + piece.first * cluster + rank;
        *is_last = count_and_see(counter) == static_cast<uint32_t>(piece.parts) - 1;
        if (*is_last) *counter = 0;
    }
    __syncthreads();
    if (!*is_last) return;
    float2* const parts_stats = reinterpret_cast<float2*>(shared);  // [parts, heads]
    for (int i = threadIdx.x; i < piece.parts * heads; i += threads) {
        const int part = i / heads, head = i % heads;
        if (head < begin / kDim || head > (begin + count - 1) / kDim) continue;
        parts_stats[i] = __ldcg(reinterpret_cast<float2*>(slot_of_part(part) + slot_stats) + head);
    }
    constexpr int kLoads = 8;
    const int rounds = (count - 1) / threads + 1;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        const int e = min(i * threads + static_cast<int>(threadIdx.x), count - 1);
        const int head = (begin + e) / kDim, element = (begin + e) % kDim;
        float x = 0.f, y[kLoads];
        const auto load = [&](int j, int part) { y[j] = __ldcg(slot_of_part(part) + e); };
#pragma unroll
        for (int j = 0; j < kLoads; ++j) load(j, min(j, piece.parts - 1));
        if (i == 0) __syncthreads();  // the statistics are there
        const float2 merged = merge<kLoads>(
            piece.parts, [&](int part) { return parts_stats[part * heads + head]; },
            [&](int j, int part) {
                if (part >= kLoads) load(j, part);
            },
            [&](int j, float weight) { x += y[j] * weight; });
        if (i * threads + static_cast<int>(threadIdx.x) < count) store(head, element, merged, x);
    }
}

}  // namespace decode
}  // namespace offload
