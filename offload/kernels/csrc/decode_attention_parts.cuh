// How the parts of items that were cut become results.
//
// An item that is cut has its parts in the workspace, as unnormalised float32 sums with their
// maximum; the CTA that adds the last of them (by a counter) combines them in the order of their
// columns, so that results repeat bit for bit. Of a cut item, a CTA holds either the end or a
// middle (then it comes first in its piece: slot 2 * cta), or the beginning (last in its piece:
// slot 2 * cta + 1). Both wait for the piece's end: an item cannot be whole before some piece ends.
#pragma once
#include "decode_attention_line.cuh"

namespace offload {
namespace decode {

// What one CTA combines alone; more parts are combined in two steps. A step costs two round trips
// through L2 (2 us), a CTA's reading of parts 1 us for 90 KB.
constexpr int kFewParts = 8;
constexpr int64_t kFewPartBytes = 300 << 10;

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

}  // namespace decode
}  // namespace offload
