// Whole packs: a lane has one place in the head, N elements, and goes through a few heads at that
// place, so that its angles and its norm's weights are read once; all its loads are under way
// before the first is used. A warp reads and writes whole heads next to each other, and what an
// element is rotated with comes from another lane: pairs of packs a lane would need no shuffles,
// but where rotary_dim is not head_dim their pieces are no multiples of HBM's sectors. A warp's
// heads are of one kind and one row, and what can be known before the launch is: index arithmetic
// would cost as much as the rotation.
#pragma once
#include "elementwise.cuh"

namespace offload {

constexpr int kPackWarps = 4;  // of a block
constexpr int kPackHeads = 8;  // of one thread, at most

// The queries, the keys or the values of a row.
struct HeadsOfKind {
    int count;
    int warps;       // that take them
    int per_thread;  // heads
    int offset;      // of the first, in the row
    int stride;      // from one to the next; of queries, from one group to the next
};

struct PackPlan {
    HeadsOfKind kinds[3];  // queries, keys, values
    Divisor lanes;         // of a head; with norms a power of two
    Divisor warps;         // of a row
    Divisor tokens;        // of a sequence
    Divisor per_group;     // queries of a group; 1 where all lie at one stride
    int all_warps;         // of all rows
    int packs;             // of a head, one a lane
    int groups;            // heads of a warp at a time
    int ahead;             // a row's first warp asks for the row so many after it; 0: for none
    int row_bytes;         // of a row that is asked for
    float share;           // 1 / head_dim
    bool once;             // what is written leaves L2 first
};

// kCommon: no bias, neither of the rows nor of a norm, and no norm but RMS. At HBM's rate a warp
// has some 216 instructions for what a lane holds of one head (of 16 bits, on an H200); with a norm
// they are 112, and 440 before the first head.
template <typename T, bool kNormed, bool kCommon>
__global__ void __launch_bounds__(32 * kPackWarps, 5)
    rotary_append_packs(OffloadRotaryAppend x, PackPlan plan) {
    constexpr int N = 16 / sizeof(T), kQuads = N / 4, kWords = Pack<T, N>::kWords;
    let_next_kernel_begin();
    // By a shuffle, so that the compiler knows that a warp's lanes agree on it.
    const int warp = blockIdx.x * kPackWarps + __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp >= plan.all_warps) return;  // there are no barriers
    const int row_index = plan.warps(warp);
    const int part = warp - row_index * plan.warps.by;
    const int batch = plan.tokens(row_index), token = row_index - batch * plan.tokens.by;
    const int before_values = plan.kinds[0].warps + plan.kinds[1].warps;
    const int kind = (part >= plan.kinds[0].warps) + (part >= before_values);
    const HeadsOfKind& heads = plan.kinds[kind];
    const int part_of_kind = part - (kind == 0   ? 0
                                     : kind == 1 ? plan.kinds[0].warps
                                                 : before_values);
    const int lane_of_warp = threadIdx.x % 32;
    const int group = plan.lanes(lane_of_warp), lane = lane_of_warp - group * plan.lanes.by;
    const int first = part_of_kind * heads.per_thread * plan.groups + min(group, plan.groups - 1);
    const bool inside = group < plan.groups && lane < plan.packs;
    const int at = min(lane, plan.packs - 1) * N;
    const T* const bias = static_cast<const T*>(x.bias);

    // Beyond the last head (or with lanes beyond the last group) a head is read again, so that no
    // load has a branch of its own; it is not written.
    int sources[kPackHeads];
    const int last = heads.count - 1;
#pragma unroll
    for (int i = 0; i < kPackHeads; ++i)
        sources[i] = heads.offset + at + min(first + i * plan.groups, last) * heads.stride;
    if (kind == 0 && plan.per_group.by > 1) {
#pragma unroll
        for (int i = 0; i < kPackHeads; ++i) {
            const int head = min(first + i * plan.groups, last), kv = plan.per_group(head);
            sources[i] = heads.offset + at + kv * heads.stride +
                         (head - kv * plan.per_group.by) * x.head_dim;
        }
    }
    if (!kCommon && bias && gridDim.x <= 256) {  // else L1 and L2 have it
#pragma unroll
        for (int i = 0; i < kPackHeads; ++i) prefetch(bias + sources[i]);
    }
    wait_for_previous_kernel();

    const T* const row =
        static_cast<const T*>(x.qkv) + static_cast<int64_t>(row_index) * x.row_stride;
    Pack<T, N> raw[kPackHeads];
#pragma unroll
    for (int i = 0; i < kPackHeads; ++i)
        if (i < heads.per_thread) raw[i] = load_once<T, N>(row + sources[i]);
    // At an address that a lane has its own of, for all the compiler knows: what is one for a warp
    // it moves to a uniform register, and waits for, ahead of the angles' loads.
    const int of_lane = lane_of_warp & plan.groups >> 6;  // 0
    const int first_column =
        kind ? x.column[static_cast<int64_t>(batch) * x.column_stride + of_lane] : 0;
    if (plan.ahead && part == 0 && lane_of_warp == 0 && row_index + plan.ahead < x.batch * x.tokens)
        prefetch_bulk(row + static_cast<int64_t>(plan.ahead) * x.row_stride, plan.row_bytes);

    // Four neighbours are rotated as one: by which angles, and with whose. `crossed`: a lane's
    // first four with another's second. An element becomes own * itself + others * its partner,
    // which have the norm's weights in them, + added, of the norm's bias.
    const int half = x.rotary_dim / 2;
    const bool turns = at < x.rotary_dim, crossed = kQuads == 2 && half / 4 % 2;
    float own[N], others[N], added[kNormed && !kCommon ? N : 1];
    int partner[kQuads] = {};  // a lane
    int partner_at[kQuads];    // a column
#pragma unroll
    for (int j = 0; j < N; ++j) {
        own[j] = 1.f;
        others[j] = 0.f;
    }
    if (half && kind < 2) {
        const int64_t angles = batch * x.rotary_batch_stride + static_cast<int64_t>(token) * half;
        if (x.interleaved) {
            if (turns) {
                float c[N / 2], s[N / 2];
                to_floats(load<float, N / 2>(x.cos + angles + at / 2), c);
                to_floats(load<float, N / 2>(x.sin + angles + at / 2), s);
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    own[j] = c[j / 2];
                    others[j] = j % 2 ? s[j / 2] : -s[j / 2];
                }
            }
        } else {
#pragma unroll
            for (int q = 0; q < kQuads; ++q) {
                const int i = at + 4 * q;
                const bool is_second = i >= half;
                partner_at[q] = !turns ? i : is_second ? i - half : i + half;
                partner[q] = group * plan.lanes.by + partner_at[q] / N;
                if (!turns) continue;
                const int angle = is_second ? partner_at[q] : i;
                to_floats(load<float, 4>(x.cos + angles + angle), own + 4 * q);
                to_floats(load<float, 4>(x.sin + angles + angle), others + 4 * q);
#pragma unroll
                for (int j = 4 * q; j < 4 * q + 4; ++j)
                    others[j] = is_second ? others[j] : -others[j];
            }
        }
    }
    const OffloadNorm& norm = kind ? x.k_norm : x.q_norm;
    if constexpr (kNormed) {
        // f(own column's, partner's) of what the norm has for each column.
        const auto of_columns = [&](const void* from, auto f) {
            const T* const of_norm = static_cast<const T*>(from);
            float mine[N], theirs[N];
            to_floats(load<T, N>(of_norm + at), mine);
            if (half && !x.interleaved) {
#pragma unroll
                for (int q = 0; q < kQuads; ++q)
                    to_floats(load<T, 4>(of_norm + partner_at[q]), theirs + 4 * q);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) theirs[j] = mine[j ^ 1];
            }
#pragma unroll
            for (int j = 0; j < N; ++j) f(j, mine[j], theirs[j]);
        };
        if constexpr (!kCommon) {
#pragma unroll
            for (int j = 0; j < N; ++j) added[j] = 0.f;
            if (kind < 2 && norm.kind && norm.bias)
                of_columns(norm.bias, [&](int j, float mine, float theirs) {
                    added[j] = own[j] * mine + (turns ? others[j] * theirs : 0.f);
                });
        }
        if (kind < 2 && norm.kind && norm.weight)
            of_columns(norm.weight, [&](int j, float mine, float theirs) {
                own[j] *= mine + norm.weight_offset;
                others[j] *= theirs + norm.weight_offset;
            });
    }
    // Behind what is read with the rows: this waits for the column.
    T* to;
    int64_t stride;
    int last_written = inside ? last : -1;
    if (kind == 0) {
        to = static_cast<T*>(x.query) + batch * x.query_batch_stride + token * x.query_token_stride;
        stride = x.query_head_stride;
    } else {
        const int64_t column = static_cast<int64_t>(first_column) + token;
        to = static_cast<T*>(kind == 1 ? x.key_cache : x.value_cache) +
             batch * x.cache_batch_stride + column * x.head_dim;
        stride = x.cache_head_stride;
        if (column < 0 || column >= x.cache_capacity) last_written = -1;
    }
    to += first * stride + at;
    stride *= plan.groups;
    const auto write = [&](int i, const Pack<T, N>& pack) {
        if (first + i * plan.groups <= last_written) store<T, N>(to, pack, plan.once);
        to += stride;
    };
    const auto biased = [&](int i, float* v) {
        to_floats(raw[i], v);
        if (!kCommon && bias) add_to<T, N>(v, bias + sources[i]);
    };

    if (kind == 2) {
#pragma unroll
        for (int i = 0; i < kPackHeads; ++i) {
            if (i >= heads.per_thread) break;
            if (!kCommon) {
                float v[N];
                biased(i, v);
                raw[i] = from_floats<T, N>(v);
            }
            write(i, raw[i]);
        }
        return;
    }

    const bool any_centred =
        !kCommon && (x.q_norm.kind == OFFLOAD_NORM_LAYER || x.k_norm.kind == OFFLOAD_NORM_LAYER);

#pragma unroll
    for (int i = 0; i < kPackHeads; ++i) {
        if (i >= heads.per_thread) break;
        float v[N], with[N], y[N];
        biased(i, v);
        const auto mean_of = [&](auto of_value) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < N; ++j) sum = of_value(v[j], sum);
            return sum_of_head(lane < plan.packs ? sum : 0.f, plan.lanes.by) * plan.share;
        };
        if (kNormed && any_centred) {
            const float mean = mean_of([](float y, float sum) { return sum + y; });
#pragma unroll
            for (int j = 0; j < N; ++j) v[j] -= norm.kind == OFFLOAD_NORM_LAYER ? mean : 0.f;
        }
        const auto exchange = [&](int cross) {
            if constexpr (kCommon) {  // as they came: half the shuffles where words are two
                                      // elements
                constexpr int kPerWord = N / kWords;
                Pack<T, N> theirs;
#pragma unroll
                for (int j = 0; j < kWords; ++j)
                    theirs.words[j] = __shfl_sync(0xffffffffu, raw[i].words[j ^ cross / kPerWord],
                                                  partner[j * kPerWord / 4]);
                to_floats(theirs, with);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j)
                    with[j] = __shfl_sync(0xffffffffu, v[j ^ cross], partner[j / 4]);
            }
        };
        if (half && !x.interleaved) {
            if (crossed)
                exchange(4);
            else
                exchange(0);
        }
        float scale = 1.f;
        if constexpr (kNormed) {
            const float squares = mean_of([](float y, float sum) { return fmaf(y, y, sum); });
            if (norm.kind) scale = inverse_root(squares + norm.eps);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] = v[j] * own[j];
        if (turns) {
            if (x.interleaved) {
#pragma unroll
                for (int j = 0; j < N; ++j) y[j] = fmaf(v[j ^ 1], others[j], y[j]);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) y[j] = fmaf(with[j], others[j], y[j]);
            }
        }
        if constexpr (kNormed) {
#pragma unroll
            for (int j = 0; j < N; ++j) y[j] = kCommon ? y[j] * scale : fmaf(y[j], scale, added[j]);
        }
        write(i, from_floats<T, N>(y));
    }
}

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

// For arguments that are in_packs().
template <typename T>
int launch_append_packs(const OffloadRotaryAppend& x, const Device& device, void* stream) {
    constexpr int N = 16 / sizeof(T);
    PackPlan plan = {};
    plan.packs = x.head_dim / N;
    int lanes = plan.packs;
    if (has_norm(x))
        for (lanes = 1; lanes < plan.packs;) lanes *= 2;
    plan.lanes = Divisor(lanes);
    plan.groups = 32 / lanes;

    const int64_t rows = static_cast<int64_t>(x.batch) * x.tokens;
    int64_t warps = 0;                        // of a row
    const auto share_heads = [&](int most) {  // of a thread
        warps = 0;
        for (int kind = 0; kind < 3; ++kind) {
            HeadsOfKind& heads = plan.kinds[kind];
            heads.count = kind ? x.kv_heads : x.heads;
            const int turns = (heads.count + plan.groups - 1) / plan.groups;
            heads.warps = (turns + most - 1) / most;
            heads.per_thread = (turns + heads.warps - 1) / heads.warps;
            warps += heads.warps;
        }
    };
    // Rows that L2 can hold stay there for who reads them next, and are few: a thread has four
    // heads, or fewer, so that there are more warps, each done sooner.
    plan.row_bytes = static_cast<int>(used_width(x) * sizeof(T));
    plan.once = rows * plan.row_bytes > device.l2_bytes;
    int most = x.variant ? x.variant : plan.once ? kPackHeads : kPackHeads / 2;
    share_heads(most);
    while (!x.variant && most > 1 && rows * warps < 16 * device.multiprocessors)
        share_heads(most /= 2);
    if (rows * warps > INT32_MAX - kPackWarps)
        return refuse("rotary_append: %lld rows of %d heads are too many for one launch",
                      static_cast<long long>(rows), x.heads);
    const int64_t offsets[3] = {x.q_offset, x.k_offset, x.v_offset};
    for (int kind = 0; kind < 3; ++kind) {
        plan.kinds[kind].offset = static_cast<int>(offsets[kind]);
        plan.kinds[kind].stride = static_cast<int>(kind ? x.kv_group_stride : x.q_group_stride);
    }
    int per_group = x.heads / x.kv_heads;
    if (x.kv_heads == 1 || x.q_group_stride == static_cast<int64_t>(per_group) * x.head_dim) {
        plan.kinds[0].stride = x.head_dim;
        per_group = 1;
    }
    plan.per_group = Divisor(per_group);
    plan.warps = Divisor(static_cast<int>(warps));
    plan.tokens = Divisor(x.tokens);
    plan.all_warps = static_cast<int>(rows * warps);
    plan.share = 1.f / x.head_dim;

    plan.ahead = static_cast<int>((bytes_ahead(device) + plan.row_bytes - 1) / plan.row_bytes);
    bool common = !x.bias;
    for (const OffloadNorm& norm : {x.q_norm, x.k_norm})
        common = common && norm.kind != OFFLOAD_NORM_LAYER && !(norm.kind && norm.bias);
    const auto kernel =
        has_norm(x)
            ? (common ? rotary_append_packs<T, true, true> : rotary_append_packs<T, true, false>)
            : (common ? rotary_append_packs<T, false, true> : rotary_append_packs<T, false, false>);
    return launch("rotary_append", kernel,
                  dim3(static_cast<unsigned>((plan.all_warps + kPackWarps - 1) / kPackWarps)),
                  dim3(32 * kPackWarps), 0, stream, x.launch_early, x, plan);
}

}  // namespace offload
