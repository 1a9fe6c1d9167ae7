// Decode attention's frame: how the work is shared out, fed to the math, and put together again.
//
// Work is counted in tiles: up to Math::kColumns (or p.columns) visible cache columns of one item,
// which is one KV head of one sequence with up to p.tile_heads of its queries. All tiles of the
// batch stand in one line, sequence after sequence, item after item, and every CTA takes an equal
// piece of that line (stream-K): whatever the lengths, all CTAs read as much. Each CTA finds its
// piece itself from the lengths in device memory, so a captured launch follows them.
//
// A piece begins and ends inside an item as a rule. Such an item's parts go to the workspace as
// unnormalised float32 sums with their maximum; the CTA that adds the last of them (by a counter)
// combines them in the order of their columns, so that results repeat bit for bit. Of a cut item, a
// CTA holds either the end or a middle (then it comes first in its piece: slot 2 * cta), or the
// beginning (last in its piece: slot 2 * cta + 1).
//
// Scores are kept in units of log2(e), so that exponentials are exp2.
#pragma once
#include <limits.h>

#include "common.cuh"
#include "decode_attention_ptx.cuh"

namespace offload {
namespace decode {

constexpr int kMostShares = OFFLOAD_DECODE_ATTENTION_SHARES;
// What one CTA combines alone; more parts are combined in two steps. Every step costs a round trip
// through L2 and an atomic, every part of a head its elements.
constexpr int kFewParts = 8;
constexpr int kMostPartHeads = 384;
constexpr int kMostWarps = 12;  // of a CTA
constexpr float kLog2e = 1.4426950408889634f;

struct Params {
    const void* query;
    const void* key;
    const void* value;
    void* output;
    const int32_t* start;
    const int32_t* length;
    const float* slopes;
    const float* sinks;
    float* sums;         // [2 * shares, tile_heads, padded_dim]
    float2* stats;       // [2 * shares, tile_heads]: maximum, sum
    uint32_t* counters;  // 2 a share for parts, then 1 a share for groups of parts
    int64_t query_batch, query_head, cache_batch, cache_head;
    float scale, softcap;
    int32_t batch, heads, head_dim;
    int32_t padded_dim;  // head_dim rounded up to a multiple of 4
    int32_t group;       // queries a KV head
    int32_t tile_heads;  // queries an item
    int32_t head_tiles;  // items a KV head
    int32_t items;       // items a sequence
    int32_t max_length, window;
    int32_t stages;
    int32_t columns;  // of a tile, where the math leaves it open
    int32_t unit;     // bytes a copy into shared memory moves, where the math leaves it open
};

// The columns that one sequence's query sees.
struct Visible {
    int32_t first, columns;
};

__device__ __forceinline__ Visible visible(const Params& p, int b) {
    const int32_t end = max(min(p.length[b], p.max_length), 0);
    int32_t first = p.start ? max(p.start[b], 0) : 0;
    if (p.window > 0) first = max(first, end - p.window);
    return {first, max(end - first, 0)};
}

// A sequence that sees nothing has one tile too, which makes its output zero.
__device__ __forceinline__ int32_t tiles_of(int32_t columns, int32_t width) {
    return columns <= width ? 1 : (columns - 1) / width + 1;
}

__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
}

// Where a CTA's piece of the line lies; the first `longer` CTAs take one tile more than `each`.
struct Share {
    int64_t begin, count;
    int64_t each;
    int32_t longer;
    int32_t b, item, tile;  // what `begin` is

    // Which CTA has tile `at` of the line.
    __device__ int32_t owner(int64_t at) const {
        const int64_t border = longer * (each + 1);
        return static_cast<int32_t>(at < border ? quotient(at, each + 1)
                                                : longer + quotient(at - border, each));
    }
};

// Fills `share` (in shared memory) for this CTA; false where there is less work than CTAs.
__device__ __forceinline__ bool find_share(const Params& p, int32_t width, Share* share) {
    __shared__ int64_t warp_totals[kMostWarps];
    const int threads = blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int strip = (p.batch - 1) / threads + 1;
    const int from = min(static_cast<int>(threadIdx.x) * strip, p.batch);
    const int to = min(from + strip, p.batch);
    int64_t own = 0;
    for (int b = from; b < to; ++b) own += tiles_of(visible(p, b).columns, width);
    int64_t upto = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int64_t below = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += below;
    }
    if (lane == 31) warp_totals[warp] = upto;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < threads / 32; ++w) {
        if (w == warp) upto += total;
        total += warp_totals[w];
    }
    total *= p.items;
    const int32_t shares = total < gridDim.x ? static_cast<int32_t>(total) : gridDim.x;
    const int32_t cta = blockIdx.x;
    if (cta >= shares) return false;
    const int64_t each = quotient(total, shares);
    const int32_t longer = static_cast<int32_t>(total - each * shares);
    const int64_t begin = cta * each + min(cta, longer);
    int64_t rest = begin - (upto - own) * p.items;
    if (rest >= 0 && rest < own * p.items) {  // true in exactly one thread
        int b = from;
        int32_t tiles;
        for (;; ++b) {
            tiles = tiles_of(visible(p, b).columns, width);
            if (rest < static_cast<int64_t>(tiles) * p.items) break;
            rest -= static_cast<int64_t>(tiles) * p.items;
        }
        const int32_t item = static_cast<int32_t>(quotient(rest, tiles));
        *share = {begin,
                  each + (cta < longer ? 1 : 0),
                  each,
                  longer,
                  b,
                  item,
                  static_cast<int32_t>(rest - static_cast<int64_t>(item) * tiles)};
    }
    __syncthreads();
    return true;
}

// One tile of a CTA's piece; `segment` counts the items that it touched before this one.
struct Cursor {
    int64_t left;  // tiles from here to the end of the piece
    int32_t b, item, tile, tiles;
    int32_t segment;
    Visible see;
    bool fresh;  // the piece's first tile of this item

    __device__ Cursor(const Params& p, const Share& share, int32_t width)
        : left(share.count),
          b(share.b),
          item(share.item),
          tile(share.tile),
          segment(0),
          see(visible(p, share.b)),
          fresh(true) {
        tiles = tiles_of(see.columns, width);
    }

    __device__ void advance(const Params& p, int32_t width) {
        --left;
        fresh = ++tile == tiles;
        if (!fresh) return;
        tile = 0;
        ++segment;
        if (++item < p.items || left == 0) return;
        item = 0;
        see = visible(p, ++b);
        tiles = tiles_of(see.columns, width);
    }

    __device__ int32_t kv_head(const Params& p) const {
        return p.head_tiles == 1 ? item : item / p.head_tiles;
    }
    // The first of this item's query heads, and how many there are.
    __device__ int32_t head(const Params& p) const {
        if (p.head_tiles == 1) return item * p.group;
        const int32_t kv = item / p.head_tiles;
        return kv * p.group + (item - kv * p.head_tiles) * p.tile_heads;
    }
    __device__ int32_t heads(const Params& p) const {
        if (p.head_tiles == 1) return p.group;
        return min(p.tile_heads, p.group - (item % p.head_tiles) * p.tile_heads);
    }
};

// What a head's unnormalised sums are multiplied with; `end` is the last visible column + 1. Scores
// of a head with a slope were counted from its last column, and so is its sink here.
__device__ __forceinline__ float normaliser(const Params& p, int head, int32_t end, float most,
                                            float sum) {
    if (sum == 0.f) return 0.f;
    if (p.sinks) {
        float sink = p.sinks[head] * kLog2e;
        if (p.slopes) sink -= p.slopes[head] * kLog2e * static_cast<float>(end - 1);
        sum += exp2f(sink - most);
    }
    return 1.f / sum;
}

// Turns q.k into a score in units of log2(e); `from_last` is its column less the last visible one.
__device__ __forceinline__ float score(const Params& p, float product, float scale, float slope,
                                       int32_t from_last) {
    float x = product * scale;
    if (p.softcap > 0.f) x = p.softcap * kLog2e * tanhf(x);
    return p.slopes ? x + slope * static_cast<float>(from_last) : x;
}
__device__ __forceinline__ float score_scale(const Params& p) {
    return p.softcap > 0.f ? p.scale / p.softcap : p.scale * kLog2e;
}

__device__ __forceinline__ float warp_most(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The slot of part `i` of an item whose first part CTA `first` has.
__device__ __forceinline__ int64_t slot_of(int32_t first, int32_t i) {
    return 2 * (static_cast<int64_t>(first) + i) + (i == 0);
}

// True in the CTA that is the last of `expected` to come here, once what all of them wrote before
// is seen; leaves the counter zero.
__device__ __forceinline__ bool is_last(uint32_t* counter, uint32_t expected) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // it covers what the CTA's other threads wrote before the barrier
        last = atomicAdd(counter, 1u) == expected - 1;
        if (last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Some parts of an item: i, i + step, ... (`count` of them).
struct Parts {
    int32_t first;  // the CTA that has part 0
    int32_t i, step, count;

    __device__ int64_t slot(int n) const { return slot_of(first, i + n * step); }
};

// Fills scratch[n * heads + head].x with what part n's sums are multiplied with; their maximum and
// sum become those of slot `into`, or below 0 the weights are normalised.
__device__ __forceinline__ void weigh_parts(const Params& p, const Cursor& at, const Parts& parts,
                                            int64_t into, float2* scratch) {
    const int heads = at.heads(p), lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < parts.count * heads; i += blockDim.x)
        scratch[i] = __ldcg(&p.stats[parts.slot(i / heads) * p.tile_heads + i % heads]);
    __syncthreads();
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
        float most = -INFINITY;
        for (int n = lane; n < parts.count; n += 32)
            most = fmaxf(most, scratch[n * heads + head].x);
        most = warp_most(most);
        const float base = most == -INFINITY ? 0.f : most;
        float sum = 0.f;
        for (int n = lane; n < parts.count; n += 32) {
            float2& stat = scratch[n * heads + head];
            stat.x = exp2f(stat.x - base);
            sum += stat.y * stat.x;
        }
        sum = warp_sum(sum);
        if (into >= 0) {
            if (lane == 0) __stcg(&p.stats[into * p.tile_heads + head], make_float2(most, sum));
            continue;
        }
        const float factor =
            normaliser(p, at.head(p) + head, at.see.first + at.see.columns, most, sum);
        for (int n = lane; n < parts.count; n += 32) scratch[n * heads + head].x *= factor;
    }
    __syncthreads();
}

// Adds the weighed parts in their order and calls write(head, first element, sums).
template <int kUnrolled, typename Write>
__device__ __forceinline__ void add_parts(const Params& p, int heads, const Parts& parts,
                                          const float2* scratch, Write write) {
    constexpr int kTogether = 2;  // elements in flight at a time, times the unrolled parts
    const int quads = p.padded_dim / 4, all = heads * quads;
    for (int e = threadIdx.x; e < all; e += blockDim.x * kTogether) {
        float4 sums[kTogether] = {};
        int head[kTogether], element[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int at = min(e + i * static_cast<int>(blockDim.x), all - 1);
            head[i] = at / quads;
            element[i] = at % quads * 4;
        }
#pragma unroll kUnrolled
        for (int n = 0; n < parts.count; ++n) {
            const float* from = p.sums + parts.slot(n) * p.tile_heads * p.padded_dim;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const float4 x = __ldcg(
                    reinterpret_cast<const float4*>(from + head[i] * p.padded_dim + element[i]));
                const float weight = scratch[n * heads + head[i]].x;
                sums[i].x += x.x * weight;
                sums[i].y += x.y * weight;
                sums[i].z += x.z * weight;
                sums[i].w += x.w * weight;
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            if (e + i * static_cast<int>(blockDim.x) < all) write(head[i], element[i], sums[i]);
    }
}

template <typename T>
__device__ __forceinline__ void store_output(const Params& p, int b, int head, int element,
                                             float4 x) {
    T* to = static_cast<T*>(p.output) + (static_cast<int64_t>(b) * p.heads + head) * p.head_dim;
    const float at[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (element + i < p.head_dim) to[element + i] = from_float<T>(at[i]);
}

// Called by every CTA that has written a part of the item at `at`, where the item begins at tile
// `begin` of the line: the last one combines the parts into the output. `scratch` is shared memory
// for `room` statistics.
template <typename Math>
__device__ __forceinline__ void combine(const Params& p, const Cursor& at, const Share& share,
                                        int64_t begin, float2* scratch, int room) {
    const int32_t first = share.owner(begin);
    const int32_t count = share.owner(begin + at.tiles - 1) - first + 1;
    const int heads = at.heads(p);
    int32_t step = 1;
    if (count > kFewParts && (count > room / heads || count * heads > kMostPartHeads)) {
        // Too much for one CTA: groups of `step` parts first, each into the slot of its first.
        while (step * step < count) ++step;
        const int32_t own = static_cast<int32_t>(blockIdx.x) - first;
        const int32_t leader = own / step * step;
        const Parts parts = {first, leader, 1, min(step, count - leader)};
        const int64_t into = parts.slot(0);
        if (!is_last(p.counters + into, parts.count)) return;
        weigh_parts(p, at, parts, into, scratch);
        add_parts<Math::kPartsTogether>(
            p, heads, parts, scratch, [&](int head, int element, float4 sums) {
                __stcg(reinterpret_cast<float4*>(
                           p.sums + (into * p.tile_heads + head) * p.padded_dim + element),
                       sums);
            });
    }
    const Parts parts = {first, 0, step, (count - 1) / step + 1};
    if (!is_last(p.counters + (step > 1 ? 2 * kMostShares + first : slot_of(first, 0)),
                 parts.count))
        return;
    weigh_parts(p, at, parts, -1, scratch);
    add_parts<Math::kPartsTogether>(
        p, heads, parts, scratch, [&](int head, int element, float4 sums) {
            store_output<typename Math::Element>(p, at.b, at.head(p) + head, element, sums);
        });
}

// Math is what one CTA does with a tile:
//   columns(p)                 the most columns of a tile
//   load(p, stage, cursor)     begin copying the cursor's tile (and its queries, if it is fresh)
//   begin(p, cursor)           a new item: forget the sums
//   tile(p, stage, cursor)     add a tile
//   store(p, cursor)           the item was whole: normalise, write the output
//   store_part(p, cursor, slot)  write the sums as they are
//   scratch(), room(p)         shared memory for float2s, free between items
template <typename Math>
__global__ void __launch_bounds__(Math::kMostThreads, Math::kLeastCtas)
    decode_attention_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Share share;
    wait_for_previous_kernel();
    const int32_t width = Math::columns(p);
    if (!find_share(p, width, &share)) return;

    Math math(p, shared);
    Cursor ahead(p, share, width), at(p, share, width);
    for (int stage = 0; stage < p.stages - 1; ++stage) {
        if (ahead.left > 0) {
            math.load(p, stage, ahead);
            ahead.advance(p, width);
        }
        end_copies();
    }
    let_next_kernel_begin();

    int32_t begun = 0;  // the first tile of this item in this piece
    for (int stage = 0; at.left > 0; at.advance(p, width)) {
        wait_for_copies(p.stages - 2);
        __syncthreads();  // the tile is here for all, and all are done with the one before
        if (ahead.left > 0) {
            math.load(p, stage == 0 ? p.stages - 1 : stage - 1, ahead);
            ahead.advance(p, width);
        }
        end_copies();
        if (at.fresh) {
            begun = at.tile;
            math.begin(p, at);
        }
        math.tile(p, stage, at);
        stage = stage + 1 == p.stages ? 0 : stage + 1;
        const bool complete = at.tile + 1 == at.tiles;
        if (!complete && at.left > 1) continue;
        if (complete && begun == 0) {
            math.store(p, at);
        } else {
            math.store_part(p, at, 2 * static_cast<int64_t>(blockIdx.x) + (begun == 0));
            const int64_t here = share.begin + share.count - at.left;
            combine<Math>(p, at, share, here - at.tile, math.scratch(), math.room(p));
        }
    }
}

}  // namespace decode
}  // namespace offload
