// Decode attention's frame: how the work is shared out, fed to the math, and put together again.
//
// Work is counted in tiles: up to Math::kColumns (or p.columns) visible cache columns of one item,
// which is one KV head of one sequence with up to p.tile_heads of its queries. All tiles of the
// batch stand in one line, sequence after sequence, item after item, and every CTA takes an equal
// piece of that line (stream-K): whatever the lengths, all CTAs read as much. Where all sequences
// have as many tiles, pieces end where items do if that costs little. Each CTA finds its piece
// itself from the lengths in device memory, so a captured launch follows them.
//
// An item that is cut has its parts in the workspace, as unnormalised float32 sums with their
// maximum; the CTA that adds the last of them (by a counter) combines them in the order of their
// columns, so that results repeat bit for bit. Of a cut item, a CTA holds either the end or a
// middle (then it comes first in its piece: slot 2 * cta), or the beginning (last in its piece:
// slot 2 * cta + 1). Both wait for the piece's end: an item cannot be whole before some piece ends.
//
// A launch that may begin early reads lengths, and the columns that were there before, while the
// kernels ahead still run; then it waits for what they write: queries and each sequence's last
// column.
//
// Scores are kept in units of log2(e), so that exponentials are exp2.
#pragma once
#include <limits.h>

#include "common.cuh"
#include "decode_attention_ptx.cuh"

namespace offload {
namespace decode {

constexpr int kMostShares = OFFLOAD_DECODE_ATTENTION_SHARES;
// What one CTA combines alone; more parts are combined in two steps. A step costs two round trips
// through L2 (2 us), a CTA's reading of parts 1 us for 90 KB.
constexpr int kFewParts = 8;
constexpr int64_t kFewPartBytes = 300 << 10;
constexpr int kAloneRows = 64;  // sequences that each warp counts for itself
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
    int32_t room;          // of shared memory, in float2s
    int32_t columns;       // of a tile, where the math leaves it open
    int32_t unit;          // bytes a copy into shared memory moves, where the math leaves it open
    int32_t cluster;       // CTAs, where they come in clusters
    int32_t least_strips;  // of an item that are worth a cluster
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

// Into how many pieces the line is cut, and at which multiples of tiles. Piece i begins at unit
// floor(i * units / ctas).
struct Split {
    int32_t ctas;
    int64_t unit, units;
};

// `total` tiles are those of `items` items, of `each` tiles all of them (0: they differ).
__device__ __forceinline__ Split split(int64_t total, int64_t items, int32_t each) {
    const int32_t most = gridDim.x;
    if (total <= most) return {static_cast<int32_t>(total), 1, total};
    // With few tiles a CTA, what is left idle costs less than items that are cut; HBM is busy.
    const bool few = total < static_cast<int64_t>(most) * 32;
    const auto enough = [&](int64_t ctas) {
        return ctas * 10 >= static_cast<int64_t>(most) * (few ? 7 : 9);
    };
    if (each > 0 && items >= most) {
        const int64_t a_cta = quotient(items - 1, most) + 1;
        const int64_t ctas = quotient(items - 1, a_cta) + 1;
        if (enough(ctas)) return {static_cast<int32_t>(ctas), each, items};
    } else if (each > 0) {
        const int32_t parts = most / static_cast<int32_t>(items);
        if (enough(parts * items)) {
            const int32_t longest = (each - 1) / parts + 1;  // fewer parts do that as well
            return {static_cast<int32_t>(((each - 1) / longest + 1) * items), 1, total};
        }
    }
    const int64_t longest = quotient(total - 1, most) + 1;
    return {static_cast<int32_t>(quotient(total - 1, longest) + 1), 1, total};
}

// Where a CTA's piece of the line lies.
struct Share {
    int64_t begin, count;
    int64_t total;  // tiles of the line
    int32_t ctas;
    int32_t b, item, tile;  // what `begin` is

    // Which CTA has tile `at` of the line; only where items are cut.
    __device__ int32_t owner(int64_t at) const {
        return static_cast<int32_t>(quotient((at + 1) * ctas - 1, total));
    }
};

// Finds the share of this CTA; false where there is less work than CTAs. Not inlined, as
// combine_cuts: compiled once, not once a kernel.
static __device__ __noinline__ bool find_share(const Params& p, int32_t width, Share* share) {
    __shared__ int64_t warp_totals[kMostWarps];
    __shared__ int32_t warp_most[kMostWarps];
    __shared__ int32_t place[3];
    const bool alone = p.batch <= kAloneRows;  // no warp waits for another
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int scanners = alone ? 32 : blockDim.x, scanner = alone ? lane : threadIdx.x;
    const int strip = (p.batch - 1) / scanners + 1;
    const int from = min(scanner * strip, p.batch);
    const int to = min(from + strip, p.batch);
    int64_t own = 0;
    int32_t most = 0;
#pragma unroll 1
    for (int b = from; b < to; ++b) {
        const int32_t tiles = tiles_of(visible(p, b).columns, width);
        own += tiles;
        most = max(most, tiles);
    }
    int64_t upto = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int64_t below = __shfl_up_sync(0xffffffffu, upto, step);
        const int32_t highest = __shfl_up_sync(0xffffffffu, most, step);
        if (lane >= step) {
            upto += below;
            most = max(most, highest);
        }
    }
    int64_t sum = __shfl_sync(0xffffffffu, upto, 31);
    most = __shfl_sync(0xffffffffu, most, 31);
    if (!alone) {
        if (lane == 31) {
            warp_totals[warp] = sum;
            warp_most[warp] = most;
        }
        __syncthreads();
        sum = 0;
        for (int w = 0; w < blockDim.x / 32; ++w) {
            if (w == warp) upto += sum;
            sum += warp_totals[w];
            most = max(most, warp_most[w]);
        }
    }
    const bool even = sum == static_cast<int64_t>(most) * p.batch;
    const int64_t total = sum * p.items;
    const Split cut = split(total, static_cast<int64_t>(p.batch) * p.items, even ? most : 0);
    const int32_t cta = blockIdx.x;
    if (cta >= cut.ctas) return false;
    share->total = total;
    share->ctas = cut.ctas;
    share->begin = quotient(cta * cut.units, cut.ctas) * cut.unit;
    share->count = quotient((cta + 1) * cut.units, cut.ctas) * cut.unit - share->begin;
    int64_t rest = share->begin - (upto - own) * p.items;
    const bool here = rest >= 0 && rest < own * p.items;  // true in exactly one scanner
    int32_t b = from, item = 0;
    if (here) {
        int32_t tiles;
#pragma unroll 1
        for (;; ++b) {
            tiles = tiles_of(visible(p, b).columns, width);
            if (rest < static_cast<int64_t>(tiles) * p.items) break;
            rest -= static_cast<int64_t>(tiles) * p.items;
        }
        item = static_cast<int32_t>(quotient(rest, tiles));
        rest -= static_cast<int64_t>(item) * tiles;
    }
    int32_t tile = static_cast<int32_t>(rest);
    if (alone) {
        const int source = __ffs(__ballot_sync(0xffffffffu, here)) - 1;
        share->b = __shfl_sync(0xffffffffu, b, source);
        share->item = __shfl_sync(0xffffffffu, item, source);
        share->tile = __shfl_sync(0xffffffffu, tile, source);
        return true;
    }
    if (here) {
        place[0] = b;
        place[1] = item;
        place[2] = tile;
    }
    __syncthreads();
    share->b = place[0];
    share->item = place[1];
    share->tile = place[2];
    return true;
}

// An item of a sequence.
struct Place {
    int32_t b, item;

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

// One tile of a CTA's piece; `segment` counts the items that it touched before this one.
struct Cursor : Place {
    int64_t left;  // tiles from here to the end of the piece
    int32_t tile, tiles;
    int32_t segment;
    Visible see;
    bool fresh;  // the piece's first tile of this item

    __device__ Cursor(const Params& p, const Share& share, int32_t width)
        : Place{share.b, share.item},
          left(share.count),
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
template <typename Tanh>
__device__ __forceinline__ float score(const Params& p, float product, float scale, float slope,
                                       int32_t from_last, Tanh tanh) {
    float x = product * scale;
    if (p.softcap > 0.f) x = p.softcap * kLog2e * tanh(x);
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

// Counts this CTA at up to two counters, where it says what that CTA wrote before; null: at none.
// Bit i is set where all `expected[i]` CTAs are there now, and what they wrote is seen; that
// counter is zero again, for the next launch.
__device__ __forceinline__ int arrive(uint32_t* first, uint32_t first_expected, uint32_t* second,
                                      uint32_t second_expected) {
    __shared__ bool last[2];
    __syncthreads();                              // the release below covers what all threads wrote
    if (threadIdx.x == 0 || threadIdx.x == 32) {  // side by side
        uint32_t* const counter = threadIdx.x == 0 ? first : second;
        const uint32_t expected = threadIdx.x == 0 ? first_expected : second_expected;
        const bool complete = counter && count_and_see(counter) == expected - 1;
        if (complete) *counter = 0;
        last[threadIdx.x / 32] = complete;
    }
    __syncthreads();
    return last[0] | last[1] << 1;
}

// Some parts of an item: i, i + step, ... (`count` of them).
struct Parts {
    int32_t first;  // the CTA that has part 0
    int32_t i, step, count;

    __device__ int64_t slot(int n) const { return slot_of(first, i + n * step); }
};

// A cut item's parts, and how they become one: all at once (step 1), or first groups of `step`
// parts, each into the slot of its first.
struct Cut {
    int32_t first, count, step;

    // The item begins at tile `begin` of the line.
    __device__ Cut(const Params& p, const Cursor& at, const Share& share, int64_t begin)
        : first(share.owner(begin)), step(1) {
        count = share.owner(begin + at.tiles - 1) - first + 1;
        const int32_t heads = at.heads(p);
        const int64_t bytes = static_cast<int64_t>(count) * heads * p.padded_dim * 4;
        if (count > kFewParts && (count > p.room / 2 / heads || bytes > kFewPartBytes))
            while (step * step < count) ++step;
    }
    // Those that this CTA's part is combined with first.
    __device__ Parts group() const {
        if (step == 1) return all();
        const int32_t leader = (static_cast<int32_t>(blockIdx.x) - first) / step * step;
        return {first, leader, 1, min(step, count - leader)};
    }
    __device__ Parts all() const { return {first, 0, step, (count - 1) / step + 1}; }
};

// scratch[n * heads + head] is part n's statistics, and .x becomes what its sums are multiplied
// with; their maximum and sum become those of slot `into`, or below 0 the weights are normalised.
__device__ __forceinline__ void weigh_parts(const Params& p, const Cursor& at, int count,
                                            int64_t into, float2* scratch) {
    const int heads = at.heads(p), lane = threadIdx.x % 32;
    __syncthreads();
#pragma unroll 1
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
        float most = -INFINITY;
#pragma unroll 1
        for (int n = lane; n < count; n += 32) most = fmaxf(most, scratch[n * heads + head].x);
        most = warp_most(most);
        const float base = most == -INFINITY ? 0.f : most;
        float sum = 0.f;
#pragma unroll 1
        for (int n = lane; n < count; n += 32) {
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
#pragma unroll 1
        for (int n = lane; n < count; n += 32) scratch[n * heads + head].x *= factor;
    }
    __syncthreads();
}

// Adds an item's parts in their order and calls write(head, first element, sums). Their statistics
// go to slot `into`, or below 0 the sums are normalised. `shared` is p.room float2s: statistics,
// then sums, which are copied there behind each other while the statistics are weighed; a thread
// reads only what it copied itself.
template <typename Write>
__device__ __forceinline__ void add_parts(const Params& p, const Cursor& at, const Parts& parts,
                                          int64_t into, float2* shared, Write write) {
    const int threads = blockDim.x, heads = at.heads(p), stats = parts.count * heads;
    const int quads = p.padded_dim / 4, all = heads * quads;
    constexpr int kStats = 4;
    float2 early[kStats];
    const auto stat = [&](int i) {
        return __ldcg(&p.stats[parts.slot(i / heads) * p.tile_heads + i % heads]);
    };
#pragma unroll
    for (int j = 0; j < kStats; ++j) {
        const int i = threadIdx.x + j * threads;
        if (i < stats) early[j] = stat(i);
    }
    const int whole = (stats + 1) / 2 * 2;  // a multiple of 16 bytes
    float4* const sums = reinterpret_cast<float4*>(shared + whole) + threadIdx.x;
    const int depth = (p.room - whole) / (2 * threads);  // fours of a thread
    // Four and part of what is copied next, and of what is added next.
    int e = threadIdx.x, n = 0, added_e = threadIdx.x, added_n = 0;
    const int64_t slot = static_cast<int64_t>(p.tile_heads) * p.padded_dim;
    const float* from = nullptr;
    const auto copy = [&] {
#pragma unroll 1
        for (int j = 0; j < depth && e < all; ++j) {
            if (n < 2)
                from = p.sums + parts.slot(n) * slot + e * 4;
            else
                from += 2 * parts.step * slot;
            copy_async<16>(static_cast<uint32_t>(__cvta_generic_to_shared(sums + j * threads)),
                           from, 16);
            if (++n == parts.count) {
                n = 0;
                e += threads;
            }
        }
        end_copies();
    };
    copy();
#pragma unroll
    for (int j = 0; j < kStats; ++j) {
        const int i = threadIdx.x + j * threads;
        if (i < stats) shared[i] = early[j];
    }
#pragma unroll 1
    for (int i = threadIdx.x + kStats * threads; i < stats; i += threads) shared[i] = stat(i);
    weigh_parts(p, at, parts.count, into, shared);
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    int head = added_e / quads;
    const float2* weight = shared + head;
    while (added_e < all) {
        wait_for_copies(0);
#pragma unroll 2
        for (int j = 0; j < depth && added_e < all; ++j) {
            const float4 x = sums[j * threads];
            sum.x += x.x * weight->x;
            sum.y += x.y * weight->x;
            sum.z += x.z * weight->x;
            sum.w += x.w * weight->x;
            weight += heads;
            if (++added_n < parts.count) continue;
            write(head, (added_e - head * quads) * 4, sum);
            sum = {0.f, 0.f, 0.f, 0.f};
            added_n = 0;
            added_e += threads;
            head = added_e / quads;
            weight = shared + head;
        }
        copy();
    }
    wait_for_copies(0);
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

// Called by the CTA that has all parts of the cut item at `at`, or of a group of them: into the
// output, where need be once all groups are there. `scratch` is shared memory, p.room of it.
template <typename T>
__device__ __forceinline__ void combine(const Params& p, const Cursor& at, const Cut& cut,
                                        float2* scratch) {
    bool grouped = cut.step > 1;
    while (true) {
        const Parts parts = grouped ? cut.group() : cut.all();
        const int64_t into = grouped ? parts.slot(0) : -1;
        add_parts(p, at, parts, into, scratch, [&](int head, int element, float4 sums) {
            if (into < 0)
                store_output<T>(p, at.b, at.head(p) + head, element, sums);
            else
                __stcg(reinterpret_cast<float4*>(
                           p.sums + (into * p.tile_heads + head) * p.padded_dim + element),
                       sums);
        });
        if (!grouped) return;
        uint32_t* const counter = p.counters + 2 * kMostShares + cut.first;
        if (!arrive(counter, cut.all().count, nullptr, 0)) return;
        grouped = false;
    }
}

// Called at a piece's end, which `end` is: combines the items that it has parts of and whose other
// parts are there.
template <typename T>
__device__ __noinline__ void combine_cuts(const Params& p, const Share& share, int32_t width,
                                          const Cursor& end, float2* scratch) {
    const bool tail = share.tile > 0;  // the piece's first item began before it
    const bool head = !end.fresh && (end.segment > 0 || !tail);
    if (!tail && !head) return;
    const Cursor begun(p, share, width);
    const Cut first(p, begun, share, share.begin - share.tile);
    const Cut second(p, end, share, share.begin + share.count - end.tile);
    const Parts firsts = first.group(), seconds = second.group();
    const int last = arrive(tail ? p.counters + firsts.slot(0) : nullptr, firsts.count,
                            head ? p.counters + seconds.slot(0) : nullptr, seconds.count);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (!(last >> i & 1)) continue;
        combine<T>(p, i ? end : begun, i ? second : first, scratch);
        __syncthreads();  // all are done with `scratch`
    }
}

// Math is what one CTA does with a tile:
//   columns(p)                 the most columns of a tile
//   load(p, stage, cursor)     begin copying the cursor's tile (and its queries, if it is fresh)
//   load_early(p, stage, cursor)  as much of that as does not come from the kernels ahead
//   load_late(p, stage, cursor)   the rest, now and past L1, which may have what was there before
//   begin(p, cursor)           a new item: forget the sums
//   tile(p, stage, cursor)     add a tile
//   store(p, cursor)           the item was whole: normalise, write the output
//   store_part(p, cursor, slot)  write the sums as they are
template <typename Math>
__global__ void __launch_bounds__(Math::kMostThreads, Math::kLeastCtas)
    decode_attention_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    let_next_kernel_begin();
    const int32_t width = Math::columns(p);
    Share share;
    if (!find_share(p, width, &share)) return;

    Math math(p, shared);
    Cursor ahead(p, share, width), at(p, share, width);
    const int lead = p.stages - 1;
    Cursor early = at;
#pragma unroll 1
    for (int stage = 0; stage < lead; ++stage) {
        if (early.left > 0) {
            math.load_early(p, stage, early);
            early.advance(p, width);
        }
        end_copies();
    }
    wait_for_previous_kernel();
#pragma unroll 1
    for (int stage = 0; stage < lead && ahead.left > 0; ++stage) {
        math.load_late(p, stage, ahead);
        ahead.advance(p, width);
    }

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
        if (complete && begun == 0)
            math.store(p, at);
        else
            math.store_part(p, at, 2 * static_cast<int64_t>(blockIdx.x) + (begun == 0));
    }
    const Cursor end = at;  // `at` itself stays in registers
    combine_cuts<typename Math::Element>(p, share, width, end, reinterpret_cast<float2*>(shared));
}

}  // namespace decode
}  // namespace offload
