// What decode attention is asked: a launch's parameters, the columns that a query sees, and what
// its scores and sums become. An item is one KV head of one sequence with up to p.tile_heads of its
// queries.
//
// A launch that may begin early reads lengths, and the columns that were there before, while the
// kernels ahead still run; then it waits for what they write: queries and each sequence's last
// column.
//
// Scores are kept in units of log2(e), so that exponentials are exp2.
#pragma once
#include "common.cuh"
#include "decode_attention_ptx.cuh"

namespace offload {
namespace decode {

constexpr int kMostShares = OFFLOAD_DECODE_ATTENTION_SHARES;
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

template <typename T>
__device__ __forceinline__ void store_output(const Params& p, int b, int head, int element,
                                             float4 x) {
    T* to = static_cast<T*>(p.output) + (static_cast<int64_t>(b) * p.heads + head) * p.head_dim;
    const float at[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (element + i < p.head_dim) to[element + i] = from_float<T>(at[i]);
}

}  // namespace decode
}  // namespace offload
