// How a row's heads are shared out among warps, for the forms of a rotary append whose warps have
// heads of one kind and one row: what can be known before the launch is, since index arithmetic
// would cost as much as the rotation.
#pragma once
#include "elementwise.cuh"

namespace offload {

constexpr int kAppendWarps = 4;  // of a block

// The queries, the keys or the values of a row.
struct HeadsOfKind {
    int count;
    int warps;       // that take them
    int per_thread;  // heads
    int offset;      // of the first, in the row
    int stride;      // from one to the next; of queries, from one group to the next
};

struct AppendPlan {
    HeadsOfKind kinds[3];  // queries, keys, values
    Divisor lanes;         // of a head
    Divisor warps;         // of a row
    Divisor tokens;        // of a sequence
    Divisor per_group;     // queries of a group; 1 where all lie at one stride
    int all_warps;         // of all rows
    int packs;             // of a head
    int groups;            // heads of a warp at a time
    int ahead;             // a row's first warp asks for the row so many after it; 0: for none
    int row_bytes;         // of a row that is asked for
    float share;           // 1 / head_dim
    bool once;             // what is written leaves L2 first
};

// Which heads of which row a warp has.
struct WarpsHeads {
    int row, batch, token;
    int part;   // of the row
    int kind;   // 0: queries, 1: keys, 2: values
    int first;  // how many heads of the kind come before

    __device__ __forceinline__ WarpsHeads(const AppendPlan& plan, int warp) {
        row = plan.warps(warp);
        part = warp - row * plan.warps.by;
        batch = plan.tokens(row);
        token = row - batch * plan.tokens.by;
        const int before_values = plan.kinds[0].warps + plan.kinds[1].warps;
        kind = (part >= plan.kinds[0].warps) + (part >= before_values);
        const int part_of_kind = part - (kind == 0   ? 0
                                         : kind == 1 ? plan.kinds[0].warps
                                                     : before_values);
        first = part_of_kind * plan.kinds[kind].per_thread * plan.groups;
    }
};

// By a shuffle, so that the compiler knows that a warp's lanes agree on it.
__device__ __forceinline__ int append_warp() {
    return blockIdx.x * kAppendWarps + __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
}

// Where a head begins in its row.
__device__ __forceinline__ int source_of(const OffloadRotaryAppend& x, const AppendPlan& plan,
                                         int kind, int head) {
    const HeadsOfKind& heads = plan.kinds[kind];
    if (kind || plan.per_group.by == 1) return heads.offset + head * heads.stride;
    const int kv = plan.per_group(head);
    return heads.offset + kv * heads.stride + (head - kv * plan.per_group.by) * x.head_dim;
}

// The cache's column of the sequence's first token; 0 for queries. At an address that a lane has
// its own of, for all the compiler knows: what is one for a warp it moves to a uniform register,
// and waits for, ahead of the angles' loads.
__device__ __forceinline__ int first_column_of(const OffloadRotaryAppend& x, const AppendPlan& plan,
                                               const WarpsHeads& warp, int lane_of_warp) {
    const int of_lane = lane_of_warp & plan.groups >> 6;  // 0
    return warp.kind ? x.column[static_cast<int64_t>(warp.batch) * x.column_stride + of_lane] : 0;
}

// The first lane of a row's first warp tells L2 to fetch the row that is `plan.ahead` behind `row`.
template <typename T>
__device__ __forceinline__ void ask_for_row_ahead(const OffloadRotaryAppend& x,
                                                  const AppendPlan& plan, const WarpsHeads& warp,
                                                  int lane_of_warp, const T* row) {
    if (plan.ahead && warp.part == 0 && lane_of_warp == 0 &&
        warp.row + plan.ahead < x.batch * x.tokens)
        prefetch_bulk(row + static_cast<int64_t>(plan.ahead) * x.row_stride, plan.row_bytes);
}

// Where a row's heads of one kind are written: the first one, the distance to the next, the last
// one that is; below 0 where the token has no column in the cache.
template <typename T>
struct Targets {
    T* first;
    int64_t stride;
    int last;

    __device__ __forceinline__ Targets(const OffloadRotaryAppend& x, const AppendPlan& plan,
                                       const WarpsHeads& warp, int first_column) {
        last = plan.kinds[warp.kind].count - 1;
        if (warp.kind == 0) {
            first = static_cast<T*>(x.query) + warp.batch * x.query_batch_stride +
                    warp.token * x.query_token_stride;
            stride = x.query_head_stride;
        } else {
            const int64_t column = static_cast<int64_t>(first_column) + warp.token;
            first = static_cast<T*>(warp.kind == 1 ? x.key_cache : x.value_cache) +
                    warp.batch * x.cache_batch_stride + column * x.head_dim;
            stride = x.cache_head_stride;
            if (column < 0 || column >= x.cache_capacity) last = -1;
        }
    }
};

inline bool has_norm(const OffloadRotaryAppend& x) { return x.q_norm.kind || x.k_norm.kind; }

// Whether a head is packs of a warp's lanes, every address a multiple of a pack, and every four
// neighbours rotated as a whole or not at all.
template <typename T>
bool in_packs(const OffloadRotaryAppend& x) {
    constexpr int N = 16 / sizeof(T);
    if (x.head_dim > 32 * N || x.rotary_dim % 8) return false;
    for (int64_t n :
         {static_cast<int64_t>(x.head_dim), x.row_stride, x.q_offset, x.k_offset, x.v_offset,
          x.q_group_stride, x.kv_group_stride, x.query_batch_stride, x.query_token_stride,
          x.query_head_stride, x.cache_batch_stride, x.cache_head_stride})
        if (n % N) return false;
    for (const void* p :
         {x.qkv, x.bias, static_cast<const void*>(x.query), static_cast<const void*>(x.key_cache),
          static_cast<const void*>(x.value_cache), x.q_norm.weight, x.q_norm.bias, x.k_norm.weight,
          x.k_norm.bias, static_cast<const void*>(x.cos), static_cast<const void*>(x.sin)})
        if (!aligned16(p)) return false;
    return x.rotary_batch_stride % 4 == 0;
}

// Elements of a row, from its beginning to the end of the last head.
inline int64_t used_width(const OffloadRotaryAppend& x) {
    const int per_group = x.heads / x.kv_heads * x.head_dim;
    int64_t width = x.q_offset + (x.kv_heads - 1) * x.q_group_stride + per_group;
    for (int64_t offset : {x.k_offset, x.v_offset}) {
        const int64_t end = offset + (x.kv_heads - 1) * x.kv_group_stride + x.head_dim;
        width = end > width ? end : width;
    }
    return width;
}

// Whether L2 cannot hold the rows for who reads them next.
template <typename T>
bool exceeds_l2(const OffloadRotaryAppend& x, const Device& device) {
    return static_cast<int64_t>(x.batch) * x.tokens * used_width(x) *
               static_cast<int64_t>(sizeof(T)) >
           device.l2_bytes;
}

// For arguments that are in_packs(). A head has so many `lanes` of a warp, and a thread `usual`
// heads: fewer where rows are few, so that there are more warps, each done sooner; `most` where the
// caller says so. Returns 0, or refuses.
template <typename T>
int plan_append(const OffloadRotaryAppend& x, const Device& device, int lanes, int usual, int most,
                AppendPlan* plan) {
    *plan = {};
    plan->packs = x.head_dim / (16 / static_cast<int>(sizeof(T)));
    plan->lanes = Divisor(lanes);
    plan->groups = 32 / lanes;
    const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
    int64_t warps = 0;                        // of a row
    const auto share_heads = [&](int most) {  // heads of a thread
        warps = 0;
        for (int kind = 0; kind < 3; ++kind) {
            HeadsOfKind& heads = plan->kinds[kind];
            heads.count = kind ? x.kv_heads : x.heads;
            const int turns = (heads.count + plan->groups - 1) / plan->groups;
            heads.warps = (turns + most - 1) / most;
            heads.per_thread = (turns + heads.warps - 1) / heads.warps;
            warps += heads.warps;
        }
    };
    int heads = x.variant == 0 ? usual : x.variant < most ? x.variant : most;
    share_heads(heads);
    while (!x.variant && heads > 1 && rows * warps < 16 * device.multiprocessors)
        share_heads(heads /= 2);
    if (rows * warps > INT32_MAX - kAppendWarps)
        return refuse("rotary_append: %lld rows of %d heads are too many for one launch",
                      static_cast<long long>(rows), x.heads);
    const int64_t offsets[3] = {x.q_offset, x.k_offset, x.v_offset};
    for (int kind = 0; kind < 3; ++kind) {
        plan->kinds[kind].offset = static_cast<int>(offsets[kind]);
        plan->kinds[kind].stride = static_cast<int>(kind ? x.kv_group_stride : x.q_group_stride);
    }
    int per_group = x.heads / x.kv_heads;
    if (x.kv_heads == 1 || x.q_group_stride == static_cast<int64_t>(per_group) * x.head_dim) {
        plan->kinds[0].stride = x.head_dim;
        per_group = 1;
    }
    plan->per_group = Divisor(per_group);
    plan->warps = Divisor(static_cast<int>(warps));
    plan->tokens = Divisor(x.tokens);
    plan->all_warps = static_cast<int>(rows * warps);
    plan->share = 1.f / x.head_dim;
    plan->row_bytes = static_cast<int>(used_width(x) * sizeof(T));
    plan->once = exceeds_l2<T>(x, device);
    plan->ahead = static_cast<int>((bytes_ahead(device) + plan->row_bytes - 1) / plan->row_bytes);
    return 0;
}

inline int launch_append(void (*kernel)(OffloadRotaryAppend, AppendPlan),
                         const OffloadRotaryAppend& x, const AppendPlan& plan, void* stream) {
    return launch("rotary_append", kernel,
                  dim3(static_cast<unsigned>((plan.all_warps + kAppendWarps - 1) / kAppendWarps)),
                  dim3(32 * kAppendWarps), 0, stream, x.launch_early, x, plan);
}

}  // namespace offload
